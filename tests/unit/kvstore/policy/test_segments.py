"""Which segment of the log goes, and what of it is copied on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore.policy.segments import Candidate, SegmentFacts, keepers, victims

CANDIDATES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3), st.booleans())).map(
    lambda drawn: [Candidate(slot, *attributes) for slot, attributes in enumerate(drawn)]
)


def test_mostly_dead_segments_go_first_then_by_turn():
    old, young, dead, later = (
        SegmentFacts(1, 1, 100, 90),
        SegmentFacts(2, 2, 100, 90),
        SegmentFacts(3, 3, 100, 50),
        SegmentFacts(0, 9, 100, 90),
    )
    assert victims([young, later, dead, old]) == [dead, old, young, later]


@given(CANDIDATES, st.integers(0, 200), st.booleans())
def test_keepers_fit_and_are_the_most_wanted(candidates: list[Candidate], budget: int, keep_unused: bool):
    chosen = keepers(candidates, budget, keep_unused=keep_unused)
    spared = {record.slot for record in candidates if record.spared}
    if chosen is None:
        assert sum(record.size for record in candidates if record.spared) > budget
        return
    kept = {record.slot: record for record in candidates if record.slot in chosen.slots}
    assert spared <= kept.keys()
    assert sum(record.size for record in kept.values()) <= budget
    left = [record for record in candidates if record.slot not in kept]
    assert chosen.lost_used == sum(record.uses > 0 for record in left)
    assert keep_unused or all(record.uses or record.spared for record in kept.values())
    room = budget - sum(record.size for record in kept.values())
    assert all(record.size > room for record in left if record.uses or keep_unused), "what fits is kept"
