"""The `paceline` command: flags and arguments of every subcommand, exit codes, and errors as single lines.

A subcommand's module is imported when it runs, so that `--help`, `version` and shell completion answer at once. Must
not import torch, kopf or a Kubernetes client, not even through others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline_cli.commands.kv.app import app as kv
from paceline_cli.errors import CliError

_HELP = """Run and check fleets of LLM engines described as Kubernetes objects.

Exit codes: 0 done, 1 failed, 2 bad input."""

_EPILOG = """\b
Examples:
  paceline up                              run manifests/examples/smollm2.yaml on this machine
  paceline up my.yaml --port 9090          run your own objects
  paceline validate deploy/*.yaml          check files before a cluster sees them
  kubectl get pisvc -o yaml | paceline validate -
  paceline render my.yaml | less           what the operator would create
  paceline explain prompt a.json b.json    why two prompts share no more of the cache
  paceline explain request my-id           what a waiting request waits for
  paceline kv stats /var/lib/paceline/kv   how much KV is stored
"""

app = typer.Typer(
    name="paceline",
    help=_HELP,
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Files = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="YAML or JSON files, folders of them, or - for standard input.")
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from paceline_cli.commands import version

        raise typer.Exit(version.run(as_json=False))


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the subcommand."""


@app.command("up")
def _up(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE...]", help="Objects to run. Default: manifests/examples/smollm2.yaml."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Loopback port of the router; 0 takes any free one.")
    ] = 8080,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of logs and of the kubeconfig. Default: $PACELINE_STATE_DIR or ~/.local/state/paceline."
        ),
    ] = None,
    tty: Annotated[
        bool | None, typer.Option("--tty/--no-tty", help="A live table, or a line for each change. Default: by stdout.")
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", "--json", help="One JSON object for each change.")
    ] = False,
) -> None:
    """Run the objects of FILE as processes of this machine, under the same operator as in a cluster.

    Shows objects and pods, and the URL once everything is ready. Ctrl-C finishes the requests in flight and stops every
    process; a second Ctrl-C does not wait. The files are read once: to change a running object, use kubectl with the
    kubeconfig that is shown, or stop and start again.
    """
    from paceline_cli.commands.up import command

    options = command.Options(port=port, state_dir=state_dir, tty=tty, json_lines=json_lines)
    raise typer.Exit(command.run(files or [], options))


@app.command("version")
def _version(as_json: Json = False) -> None:
    """Show the versions of Paceline, its API and Python."""
    from paceline_cli.commands import version

    raise typer.Exit(version.run(as_json=as_json))


@app.command("validate")
def _validate(files: Files, as_json: Json = False) -> None:
    """Check files: every problem with its line, field and what to do. Nothing is sent anywhere.

    Objects of other API groups, such as Secrets, are accepted as they are. References to objects that are not in the
    files are warnings. Exit code 2 if there is a problem.
    """
    from paceline_cli.commands import validate

    raise typer.Exit(validate.run(files, as_json=as_json))


@app.command("render")
def _render(
    files: Files,
    as_json: Json = False,
    image_engine: Annotated[str, typer.Option(metavar="IMAGE", help="Engine image; default: the operator's.")] = "",
    image_router: Annotated[str, typer.Option(metavar="IMAGE", help="Router image; default: the operator's.")] = "",
    image_kvstore: Annotated[
        str, typer.Option(metavar="IMAGE", help="Node server image; default: the operator's.")
    ] = "",
) -> None:
    """Show the children that the operator would create, as YAML. No cluster is asked.

    The output is for reading and diffing: owner references are left out and the tokens are placeholders.
    """
    from paceline_cli.commands import render
    from paceline_operator.planner.model import PlanSettings

    images = {"image_engine": image_engine, "image_router": image_router, "image_kvstore": image_kvstore}
    settings = PlanSettings(**{name: value for name, value in images.items() if value})
    raise typer.Exit(render.run(files, as_json=as_json, settings=settings))


explain = typer.Typer(name="explain", help="Say why the engine does what it does.", no_args_is_help=True)
app.add_typer(explain)
app.add_typer(kv)


@explain.command("prompt")
def _explain_prompt(
    first: Annotated[str, typer.Argument(metavar="A", help="File with a prompt or the JSON body of a request.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    engine: Annotated[
        str, typer.Option(metavar="URL", help="A running engine, which tokenises.")
    ] = "http://127.0.0.1:8000",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    internal_token_file: Annotated[Path | None, typer.Option(help="File with the engine's bearer token.")] = None,
    as_json: Json = False,
) -> None:
    """Show how many tokens two prompts share in the prefix cache, the first that differs, and why no more is reused."""
    from paceline_cli.commands import explain_prompt

    options = explain_prompt.Options(engine, block_size, internal_token_file, as_json)
    raise typer.Exit(explain_prompt.run(first, second, options))


@explain.command("tokens")
def _explain_tokens(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="File with the JSON body of a request.")],
    engine: Annotated[str, typer.Option(metavar="URL", help="A running engine.")] = "http://127.0.0.1:8000",
    html: Annotated[Path | None, typer.Option("--html", help="Write a page there instead.")] = None,
    internal_token_file: Annotated[Path | None, typer.Option(help="File with the engine's bearer token.")] = None,
    as_json: Json = False,
) -> None:
    """Send a request and show its answer's tokens in the colours of how speculative decoding came by them."""
    from paceline_cli.commands import explain_tokens

    options = explain_tokens.Options(engine, html, internal_token_file, as_json)
    raise typer.Exit(explain_tokens.run(request, options))


@explain.command("request")
def _explain_request(
    request_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="The request's x-request-id. Default: all that wait.")
    ] = "",
    engine: Annotated[
        str, typer.Option(metavar="URL", help="Admin address of the engine that has it.")
    ] = "http://127.0.0.1:8001",
    internal_token_file: Annotated[Path | None, typer.Option(help="File with the engine's bearer token.")] = None,
    as_json: Json = False,
) -> None:
    """Show why a request waits in an engine's queue, and how much of what is missing.

    Exit code 1 if the engine has no such request: it has ended, or never came.
    """
    from paceline_cli.commands import explain_request

    raise typer.Exit(explain_request.run(request_id, explain_request.Options(engine, internal_token_file, as_json)))


def main() -> None:
    """Entry point: every CliError becomes one line per message on stderr."""
    try:
        app()
    except CliError as error:
        for message in error.messages:
            sys.stderr.write(f"paceline: {message}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
