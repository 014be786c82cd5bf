"""An engine that is killed while it writes KV to disk, and a disk that is damaged: the next one says the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_process import EngineProcess, engine_process, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.engine]
# A chunk of 256 tokens each, which is 11 MiB and has a segment of its own, and a part of another.
PROMPTS = [[1000 + (7 + 2 * number) * i % 4001 for i in range(300)] for number in range(3)]


def ask(engine: EngineProcess, prompt: list[int]) -> dict[str, Any]:
    answer = engine.post({"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0})
    assert answer.status_code == 200
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def from_disk(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"].get("cached_tokens_by_tier", {}).get("disk", 0)


def kill(engine: EngineProcess) -> None:
    """Both processes at once, as the kernel does when memory is short."""
    core = engine.core
    engine.popen.kill()
    core.kill()
    engine.wait_exit()
    psutil.wait_procs([core])


def damage(folder: Path) -> None:
    """Turn a bit in the first chunk's numbers, and cut the end of the last segment off."""
    first, last = (sorted(folder.glob("segment-*"))[index] for index in (0, -1))
    with first.open("r+b") as file:
        file.seek(1 << 20)
        byte = file.read(1)[0]
        file.seek(1 << 20)
        file.write(bytes([byte ^ 1 << random.Random(1).randrange(8)]))
    with last.open("r+b") as file:
        file.truncate(max(0, last.stat().st_size - 5000))


@pytest.mark.timeout(300)
def test_kill_9_while_it_writes_and_a_damaged_disk_change_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options = ("--device", "cpu", "--max-model-len", "1024", "--kv-store-disk", str(folder))
    options += ("--kv-store-disk-capacity", "512Mi")

    def bytes_written() -> int:
        return sum(path.stat().st_size for path in folder.glob("segment-*"))

    with engine_process(tmp_path, *options) as first:
        expected = [text_of(ask(first, prompt)) for prompt in PROMPTS]
        wait_for("the third chunk is being written", lambda: bytes_written() > 23 << 20)
        kill(first)
    damage(folder)
    with engine_process(tmp_path, *options) as second:
        answers = [ask(second, prompt) for prompt in PROMPTS]
        assert [text_of(answer) for answer in answers] == expected
        assert [from_disk(answer) for answer in answers[:2]] == [0, 256], "damaged, and whole"
        for path in folder.glob("segment-*"):
            path.unlink()
        assert text_of(ask(second, [*PROMPTS[1][:280], 5])), "without files it goes on"
        kill(second)
