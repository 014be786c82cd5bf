"""Which cards CUDA's device numbers mean, from $CUDA_VISIBLE_DEVICES and the cards that the driver lists.

The rules are those of the CUDA Programming Guide (CUDA environment variables) and of the MIG User Guide (device
enumeration). The driver's library lists cards in PCI order, and so does CUDA unless cards of different speeds are mixed
and CUDA_DEVICE_ORDER isn't PCI_BUS_ID. Pure: no environment, no driver.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LEADING_INTEGER = re.compile(r"\s*([+-]?\d+)")
# How drivers before R470 named a part: of which card, and the two instances.
_PART_OF_CARD = re.compile(r"MIG-(?P<card>GPU-[^/]+)/(?P<gpu_instance>\d+)/(?P<compute_instance>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A MIG device: a share of a card that CUDA treats as a device. index: its place on the card."""

    index: int
    uuid: str
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as the driver lists it. parts: its MIG devices; None where the card isn't partitioned."""

    index: int
    uuid: str
    parts: tuple[Part, ...] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What CUDA counts as one device: a whole card, or a part of one."""

    card: Card
    part: Part | None = None

    @property
    def label(self) -> str:
        """As in nvidia-smi and NVIDIA_VISIBLE_DEVICES: the card's index, and the part's behind a colon."""
        return str(self.card.index) if self.part is None else f"{self.card.index}:{self.part.index}"

    @property
    def uuid(self) -> str:
        """Of the part where there is one."""
        return self.card.uuid if self.part is None else self.part.uuid


def visible_targets(cards: Sequence[Card], variable: str | None) -> tuple[Target, ...]:
    """CUDA's devices 0, 1, ... under CUDA_VISIBLE_DEVICES=`variable`, None where it isn't set.

    An entry that names nothing, or is of another kind than the first, ends the list; one that is named twice leaves no
    device at all. Without names of parts CUDA sees one part at most, and then no whole card.
    """
    if variable is None:
        return _first_part_only([target for card in cards for target in _usable(card)])
    entries = [entry.strip() for entry in variable.split(",")]
    kind = entries[0][:4]
    found: list[Target] = []
    for entry in entries:
        if kind in ("GPU-", "MIG-"):
            target = _by_name(cards, entry) if entry.startswith(kind) else None
        else:
            target = _by_number(cards, entry)
        if target is None:
            break
        if target in found:
            return ()
        found.append(target)
    return tuple(found) if kind == "MIG-" else _first_part_only(found)


def _usable(card: Card) -> tuple[Target, ...]:
    """The card, or the only one of its parts that CUDA takes when the card is named; nothing if it has none."""
    if card.parts is None:
        return (Target(card),)
    return tuple(Target(card, part) for part in card.parts[:1])


def _first_part_only(targets: Sequence[Target]) -> tuple[Target, ...]:
    parts = [target for target in targets if target.part is not None]
    return tuple(parts[:1]) if parts else tuple(targets)


def _by_number(cards: Sequence[Card], entry: str) -> Target | None:
    number = _LEADING_INTEGER.match(entry)
    if number is None or not 0 <= int(number[1]) < len(cards):
        return None
    return next(iter(_usable(cards[int(number[1])])), None)


def _by_name(cards: Sequence[Card], name: str) -> Target | None:
    """The one that the name, or the beginning of it, is of; None if that is none or several."""
    old = _PART_OF_CARD.match(name)
    matches: list[Target] = []
    for card in cards:
        if name.startswith("GPU-"):
            matches += _usable(card) if card.uuid.startswith(name) else ()
            continue
        for part in card.parts or ():
            if old is None:
                same = part.uuid.startswith(name)
            else:
                instances = (int(old["gpu_instance"]), int(old["compute_instance"]))
                same = card.uuid.startswith(old["card"]) and (part.gpu_instance, part.compute_instance) == instances
            matches += [Target(card, part)] if same else []
    return matches[0] if len(matches) == 1 else None
