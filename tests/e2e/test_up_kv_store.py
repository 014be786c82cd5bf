"""KVStores under `paceline up`: KV outlives engines, node servers and the whole run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import httpx
import pytest
import yaml
from up_process import EXAMPLES, Up, answers, until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hack"))

from seaweedfs import ACCESS_KEY, SECRET_KEY, serve

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(300)]

EXAMPLE = EXAMPLES / "kv-store.yaml"
PROMPT = "The quick brown fox jumps over the lazy dog near the river bank. " * 60
# Two whole chunks of the prompt, which is 871 tokens long.
TOKENS = 512


class Answer(NamedTuple):
    text: str
    cached: dict[str, int]


def answer_to(url: str) -> Answer:
    """Greedy, and where the prompt's KV came from."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 8,
    }
    found = httpx.post(f"{url}/chat/completions", json=body, timeout=120)
    assert found.status_code == 200, found.text
    details = found.json()["usage"]["prompt_tokens_details"]
    return Answer(found.json()["choices"][0]["message"]["content"], details.get("cached_tokens_by_tier") or {})


def written(path: Path, store: dict[str, Any], *more: dict[str, Any]) -> str:
    """The example's objects with this store, which loads whatever it has: how fast the machine is decides nothing."""
    objects = list(yaml.safe_load_all(EXAMPLE.read_text()))
    for item in objects:
        if item["kind"] == "KVStore":
            item["spec"] = {**store, "reuse": {"policy": "always"}}
    path.write_text(yaml.safe_dump_all([*more, *objects]))
    return str(path)


def stop(instance: Up) -> None:
    instance.signal(signal.SIGINT)
    assert instance.wait_end() == 0


def test_kv_on_disk_outlives_the_run(up, tmp_path: Path) -> None:
    file = written(tmp_path / "disk.yaml", {"memory": {"capacity": "512Mi"}, "disk": {"capacity": "1Gi"}})
    first_run = up(file)
    first = answer_to(first_run.wait_ready())
    assert first.cached.get("disk", 0) == 0
    stop(first_run)
    second_run = up(file)
    second = answer_to(second_run.wait_ready())
    assert second.text == first.text
    assert second.cached["disk"] >= TOKENS
    stop(second_run)


def test_a_node_server_outlives_an_engine_and_the_bucket_behind_it_outlives_both(up, tmp_path: Path) -> None:
    (tmp_path / "weed").mkdir()
    with serve(tmp_path / "weed") as endpoint:
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="fleet-kv")
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "kv-s3"},
            "stringData": {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
        }
        s3 = {"bucket": "fleet-kv", "endpoint": endpoint, "credentialsSecretRef": {"name": "kv-s3"}}
        store = {"mode": "node", "memory": {"capacity": "512Mi"}, "s3": s3}
        file = written(tmp_path / "node.yaml", store, secret)

        first_run = up(file)
        url = first_run.wait_ready()
        first = answer_to(url)
        assert first.cached.get("node", 0) == 0
        first_run.engine().kill()
        restarted = {"event": "pod", "ready": True, "restarts": 1}
        first_run.wait_for(lambda event: restarted.items() <= event.items())
        until(lambda: answers(url), "the service answers again")
        second = answer_to(url)
        assert second.text == first.text
        assert second.cached["node"] >= TOKENS
        stop(first_run)

        second_run = up(file)
        third = answer_to(second_run.wait_ready())
        assert third.text == first.text
        assert third.cached["node"] >= TOKENS
        stop(second_run)
