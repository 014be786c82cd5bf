"""KV that outlives the engine: a prompt that another process computed is loaded, and the text is the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_process import HTTP, EngineProcess, engine_process, wait_for
from prometheus_client.parser import text_string_to_metric_families
from seaweedfs import credentials, make_bucket, serve

# Two engines load a model in each test.
pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(300)]
# Chunks of 256 tokens: two whole ones, and a part of a third that is computed.
PROMPT = {"model": "m", "prompt": [1000 + 7 * i % 4001 for i in range(700)], "max_tokens": 12, "temperature": 0}


def stop(engine: EngineProcess) -> None:
    engine.popen.send_signal(signal.SIGTERM)
    assert engine.wait_exit() == 0


def value_of(engine: EngineProcess, metric: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    families = text_string_to_metric_families(HTTP.get(f"{engine.metrics}/metrics").text)
    samples = [sample for family in families if family.name == metric for sample in family.samples]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def by_tier(answer: dict[str, Any]) -> dict[str, int]:
    return answer["usage"]["prompt_tokens_details"].get("cached_tokens_by_tier", {})


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
        wait_for("counts", lambda: value_of(second, "paceline_kvstore_hits", tier="disk") == 2.0)
        exposed = HTTP.get(f"{second.metrics}/metrics").text
        second.wait_idle()
        assert HTTP.post(f"{second.admin}/reset_prefix_cache").status_code == 200
        after_reset = second.post(PROMPT).json()
        stop(second)
    details = loaded["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 512, "cached_tokens_by_tier": {"device": 0, "disk": 512}}
    assert 'paceline_engine_kv_loaded_tokens_total{model_name="m",tier="disk"} 512.0' in exposed
    assert 'paceline_kvstore_read_seconds_count{tier="disk"} 2.0' in exposed
    assert "paceline_engine_kv_dropped_chunks_total" in exposed
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 688}  # The device has it now.
    for nothing in (other_tenant, after_reset):
        assert nothing["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    texts = [answer["choices"][0]["text"] for answer in (computed, loaded, again, other_tenant, after_reset)]
    assert texts == [texts[0]] * 5


def test_a_prompt_comes_back_from_s3_and_without_s3_everything_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (tmp_path / "weed").mkdir()
        url = stack.enter_context(serve(tmp_path / "weed"))
        secret = credentials(tmp_path / "secret")
        s3 = {"bucket": make_bucket(url), "endpoint": url, "region": "us-east-1", "credentialsDir": str(secret)}
        settings = tmp_path / "kv.json"
        settings.write_text(json.dumps({"memory": {"capacity": "256Mi"}, "s3": s3}))
        # Blocks for one prompt and a half.
        options = ("--device", "cpu", "--max-model-len", "1024", "--kv-cache-memory", "48Mi")
        options += ("--kv-store-config", str(settings))
        with engine_process(tmp_path, *options) as first:
            computed = first.post(PROMPT).json()
            stop(first)
        # A store that is gone can take nothing: it is not waited for longer than a drain may take.
        with engine_process(tmp_path, *options, "--drain-timeout", "2s") as second:
            loaded = second.post(PROMPT).json()
            wait_for("counts", lambda: value_of(second, "paceline_kvstore_hits", tier="s3") == 2.0)
            stack.close()  # S3 is gone.
            other = [3000 - 2 * i for i in range(700)]
            answers = [
                second.post(PROMPT | {"prompt": other}),
                second.post(PROMPT),
                second.post(PROMPT | {"prompt": other}),
            ]
            errors = "paceline_kvstore_errors"
            wait_for("errors of S3", lambda: value_of(second, errors, tier="s3") > 0.0)
            stop(second)
    assert by_tier(loaded) == {"device": 0, "s3": 512}
    assert [answer.status_code for answer in answers] == [200] * 3
    assert "memory" in by_tier(answers[1].json())  # It came there with the load from S3.
    texts = [answer["choices"][0]["text"] for answer in (computed, loaded, answers[1].json())]
    assert texts == [texts[0]] * 3
    assert answers[0].json()["choices"] == answers[2].json()["choices"]


def test_an_engine_that_was_drained_can_be_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    """Memory has what the disk has not been offered twice; the drain writes that."""
    settings = tmp_path / "kv.json"
    tiers = {"memory": {"capacity": "512Mi"}, "disk": {"path": str(tmp_path / "kv"), "capacity": "512Mi"}}
    settings.write_text(json.dumps(tiers | {"reuse": "always"}))
    options = ("--device", "cpu", "--max-model-len", "1024", "--kv-store-config", str(settings))
    with engine_process(tmp_path, *options) as first:
        computed = first.post(PROMPT).json()
        assert first.load()["kv_flush"] == ""
        command = [sys.executable, "-m", "paceline_engine.cli", "drain", "--admin-port", first.admin.rpartition(":")[2]]
        assert subprocess.run([*command, "--timeout", "60s"], check=False).returncode == 0
        assert first.load()["kv_flush"] == "done"
        first.close()
    with engine_process(tmp_path, *options) as second:
        found = second.post(PROMPT).json()
        stop(second)
    details = found["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 512, "cached_tokens_by_tier": {"device": 0, "disk": 512}}
    assert found["choices"][0]["text"] == computed["choices"][0]["text"]


def test_a_restarted_engine_has_the_prompt_on_its_device_before_it_is_ready(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--max-model-len", "1024", "--kv-store-disk", str(tmp_path / "kv"))
    options += ("--kv-store-disk-capacity", "512Mi", "--kv-store-warm-up", "60s")
    with engine_process(tmp_path, *options) as first:
        computed = first.post(PROMPT).json()
        stop(first)
    with engine_process(tmp_path, *options) as second:
        found = second.post(PROMPT).json()
        other_tenant = second.post(PROMPT | {"cache_salt": "another"}).json()
        log = second.log.read_text()
        stop(second)
    # All of it was there, so nothing was loaded for the request.
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 512}
    assert other_tenant["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert found["choices"][0]["text"] == other_tenant["choices"][0]["text"] == computed["choices"][0]["text"]
    assert "warm-up: 512 tokens of stored KV" in log
