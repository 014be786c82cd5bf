"""Tenants pay for their own bytes, and only they."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore.policy.quotas import Quotas

TENANTS = st.sampled_from(["a", "b", ""])


@given(
    st.dictionaries(TENANTS, st.integers(0, 100)),
    st.none() | st.integers(0, 100),
    st.lists(st.tuples(TENANTS, st.integers(1, 60))),
)
def test_whoever_makes_the_room_that_is_asked_for_stays_within_the_quota(of, default, puts):
    quotas = Quotas(default, of)
    used: dict[str, int] = {}
    for tenant, size in puts:
        excess = quotas.excess(tenant, size)
        limit = of.get(tenant, default)
        if excess is None:
            assert limit is not None and size > limit
            continue
        assert 0 <= excess <= used.get(tenant, 0)
        quotas.charge(tenant, -excess)
        quotas.charge(tenant, size)
        used[tenant] = used.get(tenant, 0) - excess + size
        assert quotas.used(tenant) == used[tenant]
        assert limit is None or used[tenant] <= limit
    assert set(quotas.tenants()) == {tenant for tenant, held in used.items() if held}


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="the quota of b must not be negative, it is -1 bytes"):
        Quotas(of={"b": -1})
    with pytest.raises(ValueError, match="would use -1 bytes"):
        Quotas().charge("a", -1)
