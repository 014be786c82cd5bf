"""The log of KV events: replay by sequence, a new start for readers that fell behind, bounded whoever reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from paceline_engine.messages import KVEvent
from paceline_engine.server.kv_events import EventLog


def stored(sequence: int) -> KVEvent:
    return KVEvent(sequence=sequence, kind="stored", block_hashes=(bytes([sequence]),), token_ids=(1, 2))


def read(log: EventLog, count: int, epoch: str | None = None, start: int = 0) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        lines = log.lines(epoch, start, {"block_size": 16}, heartbeat=0.01)
        made = []
        async for line in lines:
            made.append(json.loads(line))
            if len(made) == count:
                break
        await lines.aclose()
        return made

    return asyncio.run(main())


def test_a_new_reader_gets_everything_and_then_heartbeats() -> None:
    log = EventLog("e1")
    log.add([stored(0), KVEvent(sequence=1, kind="removed", block_hashes=(b"\x00",))])
    header, first, second, beat = read(log, 4)
    assert header == {"v": 1, "epoch": "e1", "from": 0, "complete": True, "block_size": 16}
    assert first == {"sequence": 0, "kind": "stored", "block_hashes": ["00"], "parent_hash": None, "token_ids": [1, 2]}
    assert second == {"sequence": 1, "kind": "removed", "block_hashes": ["00"]}
    assert beat == {}


def test_a_reader_goes_on_where_it_stopped_within_an_epoch_only() -> None:
    log = EventLog("e1")
    log.add([stored(number) for number in range(5)])
    header, first = read(log, 2, "e1", 3)
    assert (header["from"], header["complete"], first["sequence"]) == (3, True, 3)
    header, first = read(log, 2, "e0", 3)
    assert (header["from"], header["complete"], first["sequence"]) == (0, False, 0)


def test_what_is_no_longer_kept_is_told() -> None:
    log = EventLog("e1", max_events=3)
    log.add([stored(number) for number in range(5)])
    header, first = read(log, 2, "e1", 1)
    assert (header["from"], header["complete"], first["sequence"]) == (2, False, 2)


def test_a_reader_that_falls_behind_is_ended() -> None:
    async def main() -> list[int]:
        log = EventLog("e1", max_events=3)
        log.add([stored(number) for number in range(3)])
        seen = []
        async for line in log.lines(None, 0, {}):
            payload = json.loads(line)
            if "sequence" in payload:
                seen.append(payload["sequence"])
            if seen == [0]:
                log.add([stored(number) for number in range(3, 9)])
        return seen

    assert asyncio.run(main()) == [0, 1, 2]


def test_news_wakes_a_waiting_reader() -> None:
    async def main() -> dict[str, Any]:
        log = EventLog("e1")
        lines = log.lines("e1", 0, {}, heartbeat=60)
        await anext(lines)
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        log.add([stored(0)])
        return json.loads(await asyncio.wait_for(waiting, 10))

    assert asyncio.run(main())["sequence"] == 0
