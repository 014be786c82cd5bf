"""`paceline-kvstore`: serve a tier to the engines of a node, say the version.

Only options are handled here; a command imports what it needs when it runs, so that `--help` is quick. Exit codes: 0
done, 1 failed, 2 bad input.
"""

# No `from __future__ import annotations`: typer reads the options' aliases at run time.

import logging
import sys
from collections.abc import Callable
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, TypeVar, cast

import typer

from paceline_api.quantity import parse_bytes, parse_duration_s

T = TypeVar("T")

_EXAMPLES = """Examples:

  paceline-kvstore serve --memory 4Gi --socket /run/paceline/kv.sock

  paceline-kvstore serve --memory 16Gi --host 0.0.0.0 --token-file /etc/paceline/token --ttl 24h

  paceline-kvstore serve --config /etc/paceline/kv.json --socket /run/paceline/kv.sock

Sizes: 256Mi, 2Gi. Durations: 800ms, 120s, 1h30m. Exit codes: 0 done, 1 failed, 2 bad input.
"""
_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_PORT = 7460

app = typer.Typer(
    help="Paceline's KV store: attention state that outlives an engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A typer parser whose complaint is the function's own."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return convert


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise ValueError(f"{text!r} is not one of {', '.join(_LEVELS)}")
    return text


_SIZE, _DURATION = _parsed(parse_bytes), _parsed(parse_duration_s)


# Defaults that typer parses like input, so that --help shows them as users write them.
_PIN, _FRAME, _IDLE, _DRAIN = (cast("float", text) for text in ("10m", "30s", "10m", "30s"))

Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON settings of the tiers to share: memory, disk, s3, quotas.")
]
Memory = Annotated[
    int | None,
    typer.Option(parser=_SIZE, metavar="SIZE", help="Memory for chunks, without --config. Default: 1Gi."),
]
Socket = Annotated[Path | None, typer.Option(help="Path of a Unix socket for clients, for its owner alone.")]
Host = Annotated[str, typer.Option(help="Address to bind; loopback, unless there is a token file.")]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help=f"Port for clients. Default: {DEFAULT_PORT}; with --socket none. 0: any."),
]
AdminPort = Annotated[int, typer.Option(min=0, max=65535, help="HTTP port: health, metrics, admin. 0: any.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token that clients and /admin must have.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Let everybody in who reaches --host, without a token.")]
TlsCert = Annotated[
    Path | None, typer.Option(help="PEM file with the certificate for TLS over TCP and on the admin port.")
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key.")]
Ttl = Annotated[
    float | None, typer.Option(parser=_DURATION, metavar="DURATION", help="Forget chunks of that age. Default: never.")
]
MaxChunk = Annotated[
    int | None,
    typer.Option(parser=_SIZE, metavar="SIZE", help="Largest chunk taken. Default: 128Mi, or what the tiers take."),
]
MaxInflight = Annotated[
    int | None,
    typer.Option(parser=_SIZE, metavar="SIZE", help="Memory for chunks being received. Default: four --max-chunk."),
]
MaxConnections = Annotated[int, typer.Option(min=1, max=4096, help="Clients' connections.")]
MaxPinned = Annotated[
    int | None,
    typer.Option(parser=_SIZE, metavar="SIZE", help="Bytes that pins hold. Default: half of memory or disk."),
]
MaxPinTime = Annotated[float, typer.Option(parser=_DURATION, metavar="DURATION", help="Longest that a pin holds.")]
FrameTimeout = Annotated[
    float, typer.Option(parser=_DURATION, metavar="DURATION", help="For a request to arrive or an answer to be taken.")
]
IdleTimeout = Annotated[float, typer.Option(parser=_DURATION, metavar="DURATION", help="Between two requests.")]
DrainTimeout = Annotated[
    float, typer.Option(parser=_DURATION, metavar="DURATION", help="After SIGTERM, for what is in flight.")
]
LogLevel = Annotated[str, typer.Option(parser=_parsed(_level), metavar="LEVEL", help=f"One of {', '.join(_LEVELS)}.")]


@app.command(epilog=_EXAMPLES)
def serve(
    config: Config = None,
    memory: Memory = None,
    socket: Socket = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    admin_port: AdminPort = 7461,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    ttl: Ttl = None,
    max_chunk: MaxChunk = None,
    max_inflight: MaxInflight = None,
    max_connections: MaxConnections = 256,
    max_pinned: MaxPinned = None,
    max_pin_time: MaxPinTime = _PIN,
    frame_timeout: FrameTimeout = _FRAME,
    idle_timeout: IdleTimeout = _IDLE,
    drain_timeout: DrainTimeout = _DRAIN,
    log_level: LogLevel = "info",
) -> None:
    """Share memory, disk and S3 with engines until SIGTERM (answers what was asked) or a second signal (stops now)."""
    given = dict(locals())
    given["port"] = DEFAULT_PORT if port is None and socket is None else port
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=given.pop("log_level").upper(), format=form, stream=sys.stderr)
    from paceline_kvstore.server.options import BadInput, ServeOptions
    from paceline_kvstore.server.process import serve as run

    try:
        code = run(ServeOptions(**given))
    except BadInput as error:
        typer.echo(f"paceline-kvstore: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


@app.command()
def version() -> None:
    """Say the version."""
    typer.echo(f"paceline-kvstore {package_version('paceline')}")


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
