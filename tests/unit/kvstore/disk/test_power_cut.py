"""The power goes at any moment, and the device kept any part of what was not synced: nothing that was called durable
is lost, nothing deleted comes back, nothing wrong is served."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from paceline_kvstore import ChunkKey
from paceline_kvstore.tiers import DiskOptions, DiskTier

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Test folders are no packages.

from power_cut import Call, Recorder, leave_behind, moments

CAPACITY = 512 << 10
OPTIONS = DiskOptions(segment_bytes=48 << 10, staging_bytes=1 << 20, direct=False)
KEYS = 60
STEPS = 260
CUTS = 60


def key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(random.Random(-number - 1).randrange(14_000))


def work(tier: DiskTier, recorder: Recorder, dice: random.Random) -> None:
    """Puts, some durable, reads, so that cleaning copies, and deletes; each promise is marked when it is made."""
    tier.listener = lambda chunk, is_held: None if is_held else recorder.mark(("gone", chunk))
    for _ in range(STEPS):
        number = dice.randrange(KEYS)
        match dice.randrange(10):
            case 0:
                if tier.delete(key(number)) and tier.flush():
                    recorder.mark(("deleted", key(number)))
            case 1 | 2 | 3:
                tier.get(key(number))
            case choice:
                recorder.mark(("put", key(number)))
                if tier.put(key(number), payload_of(number), durable=choice > 6) and choice > 6:
                    recorder.mark(("durable", key(number)))


def promises(calls: list[Call]) -> tuple[set[ChunkKey], set[ChunkKey]]:
    """Chunks that must be there, and chunks that must not, after these calls."""
    durable: set[ChunkKey] = set()
    deleted: set[ChunkKey] = set()
    for call in calls:
        if call.kind != "mark":
            continue
        what, chunk = call.mark
        (durable.add if what == "durable" else durable.discard)(chunk) if what != "put" else None
        (deleted.add if what == "deleted" else deleted.discard)(chunk) if what in ("deleted", "put") else None
    return durable, deleted


@pytest.fixture(params=[111, 118])
def history(request: pytest.FixtureRequest, tmp_path: Path) -> list[Call]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (tmp_path / "kv").mkdir()
        recorder = Recorder(monkeypatch)
        tier = DiskTier(tmp_path / "kv", CAPACITY, OPTIONS)
        work(tier, recorder, random.Random(request.param))
        assert tier.stats.evictions > 10
        tier.close()
    return recorder.calls


def test_whatever_a_power_cut_leaves_holds_every_promise(history: list[Call], tmp_path: Path):
    dice = random.Random(5)
    num_durable = num_deleted = 0
    for cut, moment in enumerate(moments(history, dice, CUTS)):
        calls = history[:moment]
        durable, deleted = promises(calls)
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        leave_behind(calls, folder, dice)
        tier = DiskTier(folder, 2 * CAPACITY, OPTIONS)
        tier.check_integrity()
        assert sum(path.stat().st_size for path in folder.glob("*.kv")) == tier.bytes_used
        for number in range(KEYS):
            payload = tier.get(key(number))
            assert payload is None or payload == payload_of(number), f"cut {cut}: chunk {number} is wrong"
            assert payload is not None or key(number) not in durable, f"cut {cut}: durable chunk {number} is lost"
            assert payload is None or key(number) not in deleted, f"cut {cut}: chunk {number} came back"
        assert tier.put(key(KEYS), payload_of(KEYS), durable=True)
        tier.close()
        shutil.rmtree(folder)
        num_durable += len(durable)
        num_deleted += len(deleted)
    assert num_durable > CUTS
    assert num_deleted > CUTS // 4
