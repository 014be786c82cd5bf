"""Thread counts follow what the process may really use."""

from __future__ import annotations

import os

import pytest

from paceline_engine.backends.threads import num_threads, prepare_environment


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000\n", 4),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("5000 100000\n", 1),
        ("rubbish", 4),
        (None, 4),
    ],
)
def test_a_cgroup_quota_limits_threads(tmp_path, monkeypatch, cpu_max, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3}, raising=False)
    file = tmp_path / "cpu.max"
    if cpu_max is not None:
        file.write_text(cpu_max)
    assert num_threads(file) == expected


def test_a_users_choice_of_wait_policy_stays(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
