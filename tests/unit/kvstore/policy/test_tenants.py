"""Tenants with quotas: nobody has more than its bytes, and only its own chunks pay for it."""

from __future__ import annotations

import random

from paceline_kvstore.policy.quotas import Quotas
from paceline_kvstore.policy.tenants import TenantChunks


def _chunks(limits: dict[str, int], default: int | None = None) -> TenantChunks[int]:
    return TenantChunks(Quotas(default, limits))


def test_a_tenant_over_its_bytes_gives_up_its_own_oldest() -> None:
    chunks = _chunks({"acme": 100})
    for key in (1, 2):
        assert chunks.reserve("acme", key, 40) == (True, [])
    chunks.touch(1)
    assert chunks.reserve("acme", 3, 40) == (True, [2])
    assert chunks.used("acme") == 80
    assert chunks.reserve("acme", 4, 101) == (False, [])


def test_others_have_no_limit_unless_there_is_a_default() -> None:
    assert all(_chunks({"acme": 100}).reserve("other", key, 1000) == (True, []) for key in range(100))
    chunks = _chunks({}, default=50)
    assert chunks.reserve("other", 1, 30) == (True, [])
    assert chunks.reserve("another", 2, 30) == (True, [])
    assert chunks.reserve("other", 3, 30) == (True, [1])


def test_the_chain_that_is_being_made_longer_stays() -> None:
    chunks = _chunks({"acme": 100})
    chunks.reserve("acme", 1, 50)
    chunks.reserve("acme", 2, 50, parent=1)
    assert chunks.reserve("acme", 3, 50, parent=2) == (False, [])
    assert chunks.reserve("acme", 9, 50) == (True, [2])


def test_bytes_add_up_after_any_schedule() -> None:
    limits = {"a": 500, "b": 90, "c": 0}
    chunks = _chunks(limits)
    held: dict[int, tuple[str, int]] = {}
    dice = random.Random(5)
    for _ in range(3000):
        key = dice.randrange(60)
        match dice.randrange(4):
            case 0:
                chunks.remove(key)
                held.pop(key, None)
            case 1:
                chunks.touch(key)
            case _ if key not in held:
                tenant, size = dice.choice("abcd"), dice.randrange(1, 100)
                fits, victims = chunks.reserve(tenant, key, size, dice.choice([None, dice.randrange(60)]))
                for victim in victims:
                    assert held.pop(victim)[0] == tenant
                if fits and tenant in limits:
                    held[key] = (tenant, size)
            case _:
                pass
        chunks.check_integrity()
        for tenant, limit in limits.items():
            assert chunks.used(tenant) == sum(size for owner, size in held.values() if owner == tenant) <= limit
