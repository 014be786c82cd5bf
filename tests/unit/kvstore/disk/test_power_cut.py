"""The power goes at any moment, and the device kept any part of what was not synced: nothing that was called durable
is lost, nothing deleted comes back, nothing wrong is served."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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


def work(tier: DiskTier, recorder: Recorder, dice: random.Random, steps: int) -> None:
    """Puts, some durable, reads, so that cleaning copies, and deletes; each promise is marked when it is made."""
    tier.listener = lambda chunk, is_held: None if is_held else recorder.mark(("gone", chunk))
    for _ in range(steps):
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


@dataclass(frozen=True)
class Promises:
    """Chunks that must be there, and chunks that must not."""

    durable: frozenset[ChunkKey] = frozenset()
    deleted: frozenset[ChunkKey] = frozenset()

    def after(self, calls: list[Call]) -> Promises:
        durable, deleted = set(self.durable), set(self.deleted)
        for call in calls:
            if call.kind != "mark":
                continue
            what, chunk = call.mark
            if what == "put":
                deleted.discard(chunk)
            else:
                (durable.add if what == "durable" else durable.discard)(chunk)
                (deleted.add if what == "deleted" else deleted.discard)(chunk)
        return Promises(frozenset(durable), frozenset(deleted))

    def check(self, tier: DiskTier, cut: str) -> None:
        tier.check_integrity()
        for number in range(KEYS):
            payload = tier.get(key(number))
            assert payload is None or payload == payload_of(number), f"{cut}: chunk {number} is wrong"
            assert payload is not None or key(number) not in self.durable, f"{cut}: durable chunk {number} is lost"
            assert payload is None or key(number) not in self.deleted, f"{cut}: chunk {number} came back"


def live(folder: Path, capacity: int, steps: int, seed: int) -> tuple[list[Call], int]:
    """A process opens the folder, works and closes it: all its calls, and how many it made before it worked."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder = Recorder(monkeypatch, folder)
        given = len(recorder.calls)
        tier = DiskTier(folder, capacity, OPTIONS)
        work(tier, recorder, random.Random(seed), steps)
        tier.close()
    return recorder.calls, given


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where that can be: what a device keeps is made up here, so syncs need not be waited for."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize("seed", [118, 243])
def test_whatever_a_power_cut_leaves_holds_every_promise(seed: int, base: Path):
    """The power goes again in every third of the folders that it left, while they are opened and worked in."""
    dice = random.Random(5)
    (base / "kv").mkdir()
    history, _ = live(base / "kv", CAPACITY, STEPS, seed)
    num_durable = num_deleted = 0
    for cut, moment in enumerate(moments(history, dice, CUTS)):
        calls, promised = history[:moment], Promises().after(history[:moment])
        folder = base / f"cut-{cut}"
        leave_behind(calls, folder, dice)
        if cut % 3 == 0:
            calls, given = live(folder, 2 * CAPACITY, STEPS // 10, cut)
            calls = calls[: dice.randrange(given, len(calls))]
            promised = promised.after(calls)
            leave_behind(calls, folder, dice)
        tier = DiskTier(folder, 2 * CAPACITY, OPTIONS)
        assert sum(path.stat().st_size for path in folder.glob("*.kv")) == tier.bytes_used
        promised.check(tier, f"cut {cut}")
        assert tier.put(key(KEYS), payload_of(KEYS), durable=True)
        tier.close()
        num_durable += len(promised.durable)
        num_deleted += len(promised.deleted)
    assert num_durable > CUTS
    assert num_deleted > CUTS // 4
