"""Who gets in: keys, the anonymous tenant, and the ways to be refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_router.auth import Authenticator, Credentials, KeyIndex, digest, index_keys, is_loopback, salt_of
from paceline_router.errors import Unauthorized
from paceline_router.records import KeyRef, TenantRecord

PREFIX = b"prefix"
TENANTS = {name: TenantRecord(name, key_refs=(KeyRef(name, "apiKey"),)) for name in ("alice", "bob")}
TENANTS["guest"] = TenantRecord("guest")
KEYS, _ = index_keys([("alice", digest(PREFIX, "sk-alice")), ("bob", digest(PREFIX, "sk-bob"))])
LOCAL = {"host": "127.0.0.1:8080"}


def ask(headers: dict[str, str], peer: str | None = "127.0.0.1", anonymous: str | None = None) -> str:
    credentials = Credentials.of(headers, peer)
    return Authenticator(PREFIX).tenant_of(credentials, keys=KEYS, tenants=TENANTS, anonymous_tenant=anonymous).name


def reason(headers: dict[str, str], peer: str | None = "127.0.0.1", anonymous: str | None = None) -> str:
    with pytest.raises(Unauthorized) as refusal:
        ask(headers, peer, anonymous)
    assert refusal.value.status == 401
    return refusal.value.reason


@pytest.mark.parametrize("header", ["Bearer sk-alice", "bearer sk-alice", " Bearer   sk-alice "])
def test_a_key_is_its_tenant(header: str):
    assert ask({"authorization": header}) == "alice"


@given(st.text(max_size=20))
def test_no_other_key_opens_anything(key: str):
    if key.strip() and key.strip() not in ("sk-alice", "sk-bob"):
        assert reason({"authorization": f"Bearer {key}"}, anonymous="guest") == "unknown_key"


@pytest.mark.parametrize("header", ["Basic c2s=", "sk-alice", "Basic"])
def test_other_schemes_are_refused(header: str):
    assert reason({"authorization": header}, anonymous="guest") == "scheme"


def test_without_a_key_nobody_gets_in_by_default():
    assert reason(LOCAL) == "missing_key"


def test_the_named_anonymous_tenant_is_for_loopback_only():
    assert ask(LOCAL, "127.0.0.1", "guest") == "guest"
    assert ask({"host": "localhost:8080"}, "::1", "guest") == "guest"
    assert ask({"host": "[::1]:8080"}, "::ffff:127.0.0.1", "guest") == "guest"
    assert reason(LOCAL, "10.0.0.7", "guest") == "missing_key"
    assert reason(LOCAL, None, "guest") == "missing_key"


def ask_keyless(headers: dict[str, str], peer: str | None = "127.0.0.1", keyed: bool = False) -> str:
    """Of a namespace with an anonymous tenant in which, unless `keyed`, no tenant has a key."""
    refs = (KeyRef("not-there-yet", "apiKey"),) if keyed else ()
    tenants = {"guest": TenantRecord("guest"), "alice": TenantRecord("alice", key_refs=refs)}
    credentials = Credentials.of({**LOCAL, "authorization": "Bearer anything", **headers}, peer)
    found = Authenticator(PREFIX).tenant_of(
        credentials, keys=KeyIndex({}), tenants=tenants, anonymous_tenant="guest"
    )  # fmt: skip
    return found.name


def test_where_nobody_has_a_key_any_key_is_anonymous():
    assert ask_keyless({}) == "guest"


def test_one_key_of_any_tenant_makes_other_keys_unknown():
    with pytest.raises(Unauthorized) as refusal:
        ask_keyless({}, keyed=True)
    assert refusal.value.reason == "unknown_key"


@pytest.mark.parametrize(
    ("headers", "peer"),
    [({}, "10.0.0.7"), ({"x-forwarded-for": "1.2.3.4"}, "127.0.0.1"), ({"origin": "https://evil.example"}, "::1")],
)
def test_only_a_local_callers_key_counts_as_none(headers: dict[str, str], peer: str):
    with pytest.raises(Unauthorized) as refusal:
        ask_keyless(headers, peer)
    assert refusal.value.reason == "unknown_key"


def test_without_an_anonymous_tenant_an_unknown_key_opens_nothing():
    with pytest.raises(Unauthorized) as refusal:
        Authenticator(PREFIX).tenant_of(
            Credentials.of({**LOCAL, "authorization": "Bearer x"}, "127.0.0.1"),
            keys=KeyIndex({}),
            tenants={"guest": TenantRecord("guest")},
            anonymous_tenant=None,
        )
    assert refusal.value.reason == "unknown_key"


def test_an_empty_key_is_none():
    assert ask({**LOCAL, "authorization": "Bearer "}, anonymous="guest") == "guest"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "1.2.3.4"},
        {"forwarded": "for=1.2.3.4"},
        {"x-real-ip": "127.0.0.1"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "rebound.example:8080"},
    ],
)
def test_a_proxy_or_a_foreign_web_page_is_not_local(headers: dict[str, str]):
    assert reason({**LOCAL, **headers}, anonymous="guest") == "missing_key"


def test_a_page_of_this_machine_is_local():
    assert ask({**LOCAL, "origin": "http://localhost:3000"}, anonymous="guest") == "guest"


def test_an_anonymous_tenant_that_does_not_exist_lets_nobody_in():
    assert reason(LOCAL, anonymous="nobody") == "no_anonymous_tenant"


def test_a_key_of_two_tenants_opens_neither_and_is_reported():
    shared, own = digest(PREFIX, "shared"), digest(PREFIX, "own")
    index, problems = index_keys([("b", shared), ("a", shared), ("a", own), ("a", own)])
    assert index.find(shared) is None
    assert index.find(own) == "a"
    assert problems == ["tenants a, b share an API key: it is refused until only one of them has it"]


def test_half_a_matching_digest_is_no_match():
    key = digest(PREFIX, "k")
    index = KeyIndex({key: "a"})
    assert index.find(key) == "a"
    assert index.find(key[:16] + bytes(16)) is None


def test_salts_depend_on_tenant_and_secret():
    salts = {salt_of(secret, tenant) for secret in (b"one", b"two") for tenant in ("alice", "bob")}
    assert len(salts) == 4
    assert salt_of(b"one", "alice") == salt_of(b"one", "alice")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", [None, "", "10.0.0.1", "localhost.evil.example", "0.0.0.0", "::"])
def test_not_loopback(host: str | None):
    assert not is_loopback(host)
