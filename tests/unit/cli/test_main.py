"""The command itself: exit codes, versions, help, and what it must not load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline_cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_help_shows_every_command_and_how_to_begin() -> None:
    result = paceline("--help")
    assert result.returncode == 0
    assert "paceline up" in result.stdout
    for command in ("up", "render", "validate", "version"):
        assert f"\n  {command} " in result.stdout


def test_versions() -> None:
    facts = json.loads(paceline("version", "--json").stdout)
    assert facts["apiVersion"] == "paceline.dev/v1alpha1"
    assert paceline("--version").stdout.startswith(f"paceline {facts['version']} ")


@pytest.mark.parametrize("arguments", [["validate"], ["no-such-command"], ["validate", "--no-such-flag", "x"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    result = paceline(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_a_problem_is_exit_code_2_and_one_line_on_stderr() -> None:
    result = paceline("validate", "no-such-file.yaml")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "paceline: no-such-file.yaml: no such file; check the path\n"


@pytest.mark.parametrize("arguments", ["['--help']", "['version']", "['validate', '--help']"])
def test_quick_commands_load_nothing_heavy(arguments: str) -> None:
    code = (
        f"import sys; sys.argv = ['paceline', *{arguments}]\n"
        "from paceline_cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code\n"
        "heavy = {'torch', 'kopf', 'kubernetes', 'aiohttp', 'fastapi', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


def test_paceline_up_itself_stays_small() -> None:
    code = (
        "import sys, paceline_cli.commands.up.command, paceline_cli.commands.up.runtime\n"
        "from paceline_cli.commands.up.prerequisites import missing_models, missing_packages\n"
        "missing_models([]), missing_packages()\n"
        "heavy = {'torch', 'transformers', 'kopf', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
