"""KV that outlives the engine: a prompt that another process computed is loaded, and the text is the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from engine_process import HTTP, EngineProcess, engine_process

pytestmark = [pytest.mark.e2e, pytest.mark.engine]
# Chunks of 256 tokens: two whole ones, and a part of a third that is computed.
PROMPT = {"model": "m", "prompt": [1000 + 7 * i % 4001 for i in range(700)], "max_tokens": 12, "temperature": 0}


def stop(engine: EngineProcess) -> None:
    engine.popen.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0


def test_a_prompt_of_an_earlier_process_is_loaded_from_disk_and_says_the_same(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--max-model-len", "1024", "--kv-store-disk", str(tmp_path / "kv"))
    options += ("--kv-store-disk-capacity", "512Mi")
    with engine_process(tmp_path, *options) as first:
        computed = first.post(PROMPT).json()
        stop(first)
    assert computed["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    with engine_process(tmp_path, *options) as second:
        loaded = second.post(PROMPT).json()
        again = second.post(PROMPT).json()
        other_tenant = second.post(PROMPT | {"cache_salt": "another"}).json()
        exposed = HTTP.get(f"{second.metrics}/metrics").text
        second.wait_idle()
        assert HTTP.post(f"{second.admin}/reset_prefix_cache").status_code == 200
        after_reset = second.post(PROMPT).json()
        stop(second)
    details = loaded["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 512, "cached_tokens_by_tier": {"device": 0, "disk": 512}}
    assert 'paceline_engine_kv_loaded_tokens_total{model_name="m",tier="disk"} 512.0' in exposed
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 688}  # The device has it now.
    for nothing in (other_tenant, after_reset):
        assert nothing["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    texts = [answer["choices"][0]["text"] for answer in (computed, loaded, again, other_tenant, after_reset)]
    assert texts == [texts[0]] * 5
