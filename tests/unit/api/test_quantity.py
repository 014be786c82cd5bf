"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest

from paceline_api.quantity import parse_bytes, parse_duration_s, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [("512Mi", 512 * 2**20), ("1Gi", 2**30), ("2G", 2 * 10**9), ("1.5Ki", 1536), ("7", 7), ("0", 0)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("250m", 0.25), ("0.90", 0.9), ("4", 4)])
def test_quantities(text: str, value: float) -> None:
    assert float(parse_quantity(text)) == value


@pytest.mark.parametrize("text", ["", "Mi", "12 Mi", "-1Gi", "1GiB", "1e3", "٣"])
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512Mi"):
        parse_quantity(text)


def test_part_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_bytes("100m")


@pytest.mark.parametrize(
    ("text", "seconds"), [("800ms", 0.8), ("30s", 30), ("2m", 120), ("1h30m", 5400), ("7d", 604800), ("1.5s", 1.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 s", "-1s", "1w", "s"])
def test_durations_need_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="800ms"):
        parse_duration_s(text)
