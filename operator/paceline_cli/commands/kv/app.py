"""Flags and arguments of `paceline kv`. A command's module is imported when it runs: this one must stay light."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline_cli.commands.kv.place import Place

_EPILOG = """\b
Examples:
  paceline kv stats /var/lib/paceline/kv         how much is there, and of which models
  paceline kv ls s3://fleet-kv/prod --limit 20   the first chunks under a prefix
  paceline kv verify /var/lib/paceline/kv        read everything and check it
  paceline kv gc s3://fleet-kv/prod --keep 3fa9  remove what other models and revisions left
  paceline kv bench /mnt/nvme --chunks 64        how fast this device stores and loads
"""

app = typer.Typer(
    name="kv",
    help="Look at, check, tidy and measure where KV is stored: a disk tier's folder, s3://BUCKET/PREFIX, or a node "
    "server at tcp://HOST:PORT or unix:///PATH.\n\nA folder must not be in use by an engine meanwhile.",
    epilog=_EPILOG,
    no_args_is_help=True,
)

Where = Annotated[
    str,
    typer.Argument(metavar="PLACE", help="A disk tier's folder, s3://BUCKET/PREFIX, tcp://HOST:PORT, unix:///PATH."),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]
Endpoint = Annotated[str | None, typer.Option(metavar="URL", help="S3 server; default: AWS.")]
Region = Annotated[str | None, typer.Option(help="S3 region.")]
CredentialsDir = Annotated[
    Path | None,
    typer.Option(help="Folder with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; default: as the AWS tools find them."),
]
CaFile = Annotated[Path | None, typer.Option(help="Certificates of the authority that the S3 or node server's is of.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token of the node server.")]
Namespaces = Annotated[list[str] | None, typer.Option(metavar="HEX", help="First digits of a namespace; repeatable.")]


def _place(
    where: str,
    endpoint: str | None,
    region: str | None,
    credentials_dir: Path | None,
    ca_file: Path | None,
    token_file: Path | None,
) -> Place:
    from paceline_cli.commands.kv.place import Place

    return Place(where, endpoint, region, credentials_dir, ca_file, token_file)


@app.command("stats")
def _stats(
    place: Where,
    endpoint: Endpoint = None,
    region: Region = None,
    credentials_dir: CredentialsDir = None,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Count chunks, tokens and bytes, by namespace.

    A namespace is one model with its weights and layout.
    """
    from paceline_cli.commands.kv import contents

    where = _place(place, endpoint, region, credentials_dir, ca_file, token_file)
    raise typer.Exit(contents.stats(where, as_json=as_json))


@app.command("ls")
def _ls(
    place: Where,
    namespace: Annotated[str, typer.Option(metavar="HEX", help="Only this namespace: its first digits.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    credentials_dir: CredentialsDir = None,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List chunks, in no order.

    A line is namespace/chain+tokens@rank, shortened; with --json one full object.
    """
    from paceline_cli.commands.kv import contents

    where = _place(place, endpoint, region, credentials_dir, ca_file, token_file)
    raise typer.Exit(contents.ls(where, namespace, limit, as_json=as_json))


@app.command("verify")
def _verify(
    place: Where,
    endpoint: Endpoint = None,
    region: Region = None,
    credentials_dir: CredentialsDir = None,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Read every chunk and check key, length and checksum. Exit code 1 if one is bad.

    Bad chunks of a folder are dropped, as an engine that came upon them would.
    """
    from paceline_cli.commands.kv import checking

    where = _place(place, endpoint, region, credentials_dir, ca_file, token_file)
    raise typer.Exit(checking.verify(where, as_json=as_json))


@app.command("gc")
def _gc(
    place: Where,
    namespace: Namespaces = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="HEX", help="Remove all namespaces but this one; repeatable.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Remove this tenant's chunks.")] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Evict, whole files of chunks at a time, until a folder has at most that, such as 50Gi.",
        ),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    credentials_dir: CredentialsDir = None,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Remove what is named.

    In S3, uploads whose writers died a day ago or earlier are aborted, too.
    """
    from paceline_cli.commands.kv import checking

    where = _place(place, endpoint, region, credentials_dir, ca_file, token_file)
    options = checking.GcOptions(namespace or [], keep or [], tenant, capacity)
    raise typer.Exit(checking.gc(where, options, as_json=as_json))


@app.command("bench")
def _bench(
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="Any folder on the device, s3://BUCKET/PREFIX, or a node server.")
    ],
    chunks: Annotated[int, typer.Option(min=1, max=100_000, help="Chunks to store.")] = 64,
    chunk_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a chunk.")] = "8Mi",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Calls at a time.")] = 4,
    endpoint: Endpoint = None,
    region: Region = None,
    credentials_dir: CredentialsDir = None,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Measure how fast a place stores and loads.

    Random chunks are stored until they are durable, loaded, and removed; Ctrl-C removes them, too.
    """
    from paceline_cli.commands.kv import bench

    where = _place(place, endpoint, region, credentials_dir, ca_file, token_file)
    raise typer.Exit(bench.run(where, bench.BenchOptions(chunks, chunk_size, threads), as_json=as_json))
