"""`paceline-router`: reads flags, takes the ports, runs the process. Exit codes: 0 done, 1 failed, 2 bad input."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paceline_api import names
from paceline_api.quantity import parse_duration_s
from paceline_kube import ClusterUnreachable, OfficialKubeClient
from paceline_router.serve import CannotListen, RouterConfig, listen, serve
from paceline_router.settings import Limits
from paceline_router.token_file import TokenFile

BAD_INPUT = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    namespace: Annotated[
        str, typer.Option(envvar="PACELINE_NAMESPACE", help="Namespace whose services this router serves.")
    ] = "default",
    name: Annotated[str, typer.Option(help="Name of the Router object.")] = names.DEFAULT_ROUTER,
    host: Annotated[
        str, typer.Option(envvar=names.ENV_HOST, help="Address that all three ports listen on.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Public port: /v1 and /health.")] = names.ROUTER_HTTP_PORT,
    admin_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Admin port: /admin/endpoints and /slo, with the internal token.")
    ] = names.ROUTER_ADMIN_PORT,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Metrics port: /metrics.")
    ] = names.ROUTER_METRICS_PORT,
    internal_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that engines and the admin port ask for; read again when it changes."),
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Cluster to watch. Default: the pod's own, else the user's kubeconfig.")
    ] = None,
    drain_timeout: Annotated[
        str, typer.Option(help="Longest wait for running requests after SIGTERM, as a duration.")
    ] = "120s",
    connect_timeout: Annotated[str, typer.Option(help="Longest wait for a connection to an engine.")] = "2s",
    read_timeout: Annotated[str, typer.Option(help="Longest silence of an engine within an answer.")] = "600s",
    body_timeout: Annotated[str, typer.Option(help="Longest wait for a whole request body.")] = "60s",
    write_timeout: Annotated[str, typer.Option(help="Longest wait for a client that takes nothing.")] = "60s",
    max_requests: Annotated[int, typer.Option(min=1, help="Requests open at once; more are answered with 503.")] = 4096,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """OpenAI-compatible gateway for the InferenceServices of one namespace."""
    _configure_logging(log_level)
    try:
        limits = Limits(
            max_requests=max_requests,
            connect_timeout_s=parse_duration_s(connect_timeout),
            read_timeout_s=parse_duration_s(read_timeout),
            body_timeout_s=parse_duration_s(body_timeout),
            write_timeout_s=parse_duration_s(write_timeout),
            drain_timeout_s=parse_duration_s(drain_timeout),
        )
        token = None if internal_token_file is None else TokenFile(internal_token_file)
    except ValueError as error:
        _refuse(str(error))
    config = RouterConfig(
        namespace=namespace,
        name=name,
        host=host,
        port=port,
        admin_port=admin_port,
        metrics_port=metrics_port,
        internal_token_file=internal_token_file,
        limits=limits,
    )
    _run(config, kubeconfig, token)


def _run(config: RouterConfig, kubeconfig: Path | None, token: TokenFile | None) -> None:
    try:
        client = OfficialKubeClient.connect(kubeconfig)
        listeners = listen(config)
    except (ClusterUnreachable, CannotListen) as error:
        _refuse(getattr(error, "message", str(error)))
    with asyncio.Runner(loop_factory=_event_loop) as runner:
        runner.run(serve(config, client, token, listeners))


def _event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not built for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _configure_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        _refuse(f"--log-level {level}: write one of debug, info, warning, error")
    logging.basicConfig(level=number, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"paceline-router: {message}", err=True)
    raise typer.Exit(BAD_INPUT)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
