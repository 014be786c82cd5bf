"""Arguments of other engines, read by those engines' own parsers, where their Python packages can be imported.

Neither is a dependency of this project, nor installed by it; without them `documented_flags` is what arguments are
compared with. llama.cpp's parser has its test beside its server's (tests/e2e).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
from test_runtimes import container, manifest

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(300)]
# Each reads a list of arguments and writes what it made of them.
PARSERS = {
    "sglang": """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(json.load(sys.stdin))), default=str))
""",
    "vllm": """
import json, sys
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps(vars(parser.parse_args(json.load(sys.stdin))), default=str))
""",
}
READ: dict[str, dict[str, Any]] = {
    "sglang": {
        "model_path": "/var/lib/paceline/model/chat", "served_model_name": "chat", "port": 8000,
        "context_length": 4096, "max_running_requests": 32, "chunked_prefill_size": 4096, "page_size": 64,
        "disable_radix_cache": True, "mem_fraction_static": 0.85, "kv_cache_dtype": "fp8_e4m3", "tp_size": 2,
        "enable_metrics": True, "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "org/draft",
        "speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6,
    },
    "vllm": {
        "model_tag": "org/name", "served_model_name": ["chat"], "port": 8000, "revision": "abc",
        "max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 4096,
        "long_prefill_token_threshold": 512, "block_size": 16, "gpu_memory_utilization": 0.85,
        "kv_cache_memory_bytes": 2 << 30, "kv_cache_dtype": "fp8", "tensor_parallel_size": 2,
        "enable_prefix_caching": True,
        "speculative_config": {"num_speculative_tokens": 5, "method": "draft_model", "model": "org/draft"},
    },
}  # fmt: skip


@pytest.mark.parametrize("runtime", PARSERS)
def test_its_own_parser_reads_what_was_meant(runtime: str) -> None:
    if importlib.util.find_spec(runtime) is None:
        pytest.skip(f"the package {runtime} is not installed in this environment")
    words = container(manifest(runtime))["args"]
    values = {"$(PACELINE_HOST)": "0.0.0.0", "$(PACELINE_PORT_HTTP)": "8000"}
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", PARSERS[runtime]], input=json.dumps(words), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert {name: read.get(name) for name in READ[runtime]} == READ[runtime]
