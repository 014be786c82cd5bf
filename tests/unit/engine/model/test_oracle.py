"""Recorded answers of transformers: asked for once, and again after a change of anything that they depend on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from oracle import PACKAGES, Answers, Question, answers, digest, versions


@pytest.fixture
def question(tmp_path: Path) -> Question:
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"weights")
    return Question(weights, [[1, 2], [3]], 4)


class Counted:
    """Computes answers that tell one computation from another."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, question: Question) -> Answers:
        self.count += 1
        return Answers({"made": self.count}, {"w": "d"}, [[self.count]], [[0.5]])


def test_what_was_answered_once_is_not_asked_again(question, tmp_path):
    compute = Counted()
    first = answers(question, tmp_path / "records", compute)
    assert answers(question, tmp_path / "records", compute) == first == Answers({"made": 1}, {"w": "d"}, [[1]], [[0.5]])
    assert compute.count == 1


@pytest.mark.parametrize("text", ["", '{"config": {}', "{}", "[]"])
def test_a_damaged_record_is_computed_again(question, tmp_path, text):
    compute = Counted()
    answers(question, tmp_path / "records", compute)
    (record,) = (tmp_path / "records").glob("*.json")
    record.write_text(text)
    assert answers(question, tmp_path / "records", compute).tokens == [[2]]
    assert answers(question, tmp_path / "records", compute).tokens == [[2]]


def test_other_weights_prompts_lengths_or_versions_are_other_questions(question):
    now = versions()
    assert {*PACKAGES, "cpu", "code"} == set(now)
    keys = {question.key(now), *(question.key(now | {name: f"{value}x"}) for name, value in now.items())}
    keys |= {
        dataclasses.replace(question, prompts=[[1, 2, 3]]).key(now),
        dataclasses.replace(question, prompts=[[1], [2, 3]]).key(now),
        dataclasses.replace(question, count=5).key(now),
    }
    question.weights.write_bytes(b"Weights")
    keys.add(question.key(now))
    assert len(keys) == len(now) + 5


def test_a_new_version_of_transformers_is_asked(question, tmp_path, monkeypatch):
    compute = Counted()
    answers(question, tmp_path / "records", compute)
    monkeypatch.setattr("oracle.versions", lambda: versions() | {"transformers": "another"})
    assert answers(question, tmp_path / "records", compute).tokens == [[2]]


def test_a_digest_tells_bits_and_shapes_apart():
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2), -torch.zeros(2, 3), torch.full((2, 3), 1e-45)]
    assert len({digest(tensor) for tensor in tensors}) == 4
    assert digest(torch.ones(2, dtype=torch.bfloat16)) == digest(torch.ones(2))
