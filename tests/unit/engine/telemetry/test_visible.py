"""CUDA_VISIBLE_DEVICES means to the metrics what it means to CUDA."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_engine.telemetry.visible import Card, Part, visible_targets

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8f1b2c3d-0000-4000-8000-000000000001", "GPU-aa-2")


def part(index: int, uuid: str, gpu_instance: int) -> Part:
    return Part(index=index, uuid=uuid, gpu_instance=gpu_instance, compute_instance=0)


WHOLE = [Card(index=index, uuid=uuid) for index, uuid in enumerate(UUIDS)]
MIXED = [
    Card(index=0, uuid=UUIDS[0]),
    Card(index=1, uuid=UUIDS[1], parts=(part(0, "MIG-c7384736-a", 9), part(2, "MIG-c7384736-b", 11))),
    Card(index=2, uuid=UUIDS[2], parts=()),
]


@pytest.mark.parametrize(
    ("variable", "labels"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("1", ["1"]),
        ("2,0", ["2", "0"]),
        (" 2 , 1", ["2", "1"]),
        ("0,2,-1,1", ["0", "2"]),
        ("-1", []),
        ("0,7,1", ["0"]),
        ("1,1", []),
        ("1gpu,2", ["1", "2"]),
        ("none", []),
        (UUIDS[1], ["1"]),
        (f"{UUIDS[2]},{UUIDS[0]}", ["2", "0"]),
        ("GPU-89", ["0"]),
        ("GPU-8", []),
        (f"{UUIDS[1]},1", ["1"]),
        (f"1,{UUIDS[0]}", ["1"]),
        (f"{UUIDS[1]},GPU-8f1b", []),
        ("GPU-unknown", []),
    ],
)
def test_whole_cards(variable: str | None, labels: list[str]) -> None:
    assert [target.label for target in visible_targets(WHOLE, variable)] == labels


@pytest.mark.parametrize(
    ("variable", "labels"),
    [
        (None, ["1:0"]),
        ("0", ["0"]),
        ("0,1", ["1:0"]),
        ("2", []),
        (UUIDS[1], ["1:0"]),
        ("MIG-c7384736-b", ["1:2"]),
        ("MIG-c7384736-b,MIG-c7384736-a", ["1:2", "1:0"]),
        ("MIG-c7384736", []),
        (f"MIG-{UUIDS[1]}/11/0", ["1:2"]),
        (f"MIG-{UUIDS[1]}/11/1", []),
        (f"MIG-{UUIDS[0]}/9/0", []),
    ],
)
def test_partitioned_cards(variable: str | None, labels: list[str]) -> None:
    targets = visible_targets(MIXED, variable)
    assert [target.label for target in targets] == labels
    assert all(target.uuid == (target.part or target.card).uuid for target in targets)


@given(st.text(alphabet="0123456789,-+ GPUMIabf/\n", max_size=40))
def test_any_text_gives_known_devices_once_each(variable: str) -> None:
    for cards in (WHOLE, MIXED):
        targets = visible_targets(cards, variable)
        assert len(set(targets)) == len(targets) <= 5
        assert all(target.card in cards for target in targets)
