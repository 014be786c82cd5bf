"""Kubernetes quantities and Go-style durations, as every YAML of the ecosystem writes them.

Strings stay strings in specs (floats in a spec do not survive a round trip); these functions give the numbers.
"""

from __future__ import annotations

import re
from decimal import Decimal

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$"

_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
}
_SECONDS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}


def parse_quantity(text: str) -> Decimal:
    """The number a quantity such as "512Mi", "0.90" or "250m" stands for."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if match is None or match.group(2) not in _SUFFIXES:
        raise ValueError(
            f"{text!r} is not a quantity: write a number with one of k M G T P Ki Mi Gi Ti Pi m, such as 512Mi"
        )
    return Decimal(match.group(1)) * _SUFFIXES[match.group(2)]


def parse_bytes(text: str) -> int:
    """Whole bytes of a quantity, at least one byte unless it is zero."""
    value = parse_quantity(text)
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number of bytes: write a size such as 512Mi")
    return int(value)


def parse_duration_s(text: str) -> float:
    """Seconds of a duration such as "800ms", "30s" or "1h30m"."""
    if re.fullmatch(DURATION_PATTERN, text) is None:
        raise ValueError(f"{text!r} is not a duration: write a number with one of ms s m h d, such as 800ms or 1h30m")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)", text)
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in parts))
