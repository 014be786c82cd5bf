"""Names that Kubernetes accepts, whatever the user's are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_api import names

DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
OBJECT_NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True)


@given(OBJECT_NAMES)
def test_children_of_any_object_name_are_dns_labels(name: str) -> None:
    for child in (names.engine_name(name), names.router_name(name)):
        assert len(child) <= 63
        assert DNS_LABEL.match(child), child


def test_short_names_stay_readable() -> None:
    assert names.engine_name("chat") == "chat-engine"
    assert names.router_name("default") == "paceline-default-router"


def test_names_that_truncate_or_clean_alike_stay_apart() -> None:
    assert names.engine_name("a" * 63) != names.engine_name("a" * 62 + "b")
    assert names.engine_name("a.b") != names.engine_name("a-b")


@given(st.text(max_size=300))
def test_any_text_becomes_a_label_value(text: str) -> None:
    value = names.label_value(text)
    assert len(value) <= 63
    assert LABEL_VALUE.match(value)


@pytest.mark.parametrize(("left", "right"), [("Org/Name", "Org-Name"), ("a" * 64, "a" * 65)])
def test_label_values_that_had_to_change_stay_apart(left: str, right: str) -> None:
    assert names.label_value(left) != names.label_value(right)


def test_port_variables_follow_port_names() -> None:
    assert names.port_env("http") == "PACELINE_PORT_HTTP"
