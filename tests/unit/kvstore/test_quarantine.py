"""What was refused is counted for good and remembered for a while."""

from __future__ import annotations

from paceline_kvstore import ChunkKey, CorruptChunk, ForeignChunk, UnsupportedVersion
from paceline_kvstore.quarantine import Quarantine

KEY = ChunkKey(b"n" * 32, b"c" * 32, 16)


def test_each_reason_has_its_count():
    quarantine = Quarantine()
    for error in (CorruptChunk("a"), CorruptChunk("b"), ForeignChunk("c"), UnsupportedVersion("d")):
        quarantine.add(KEY, "here", error)
    assert quarantine.counts == {"corrupt": 2, "foreign": 1, "version": 1}
    assert quarantine.total == 4


def test_only_the_latest_are_remembered():
    quarantine = Quarantine(remembered=2)
    for number in range(5):
        quarantine.add(KEY, f"place {number}", CorruptChunk(f"bad {number}"))
    assert [(refusal.place, refusal.message) for refusal in quarantine.latest()] == [
        ("place 3", "bad 3"),
        ("place 4", "bad 4"),
    ]
    assert quarantine.total == 5
