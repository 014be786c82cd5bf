"""Makes the sample builders beside this file importable: tests have no packages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest
from operator_samples import FakeCluster
from whole_operator import FAST

from paceline_operator.app import Operator


@pytest.fixture
def cluster():
    made = FakeCluster()
    yield made
    made.store.close()


@pytest.fixture
def start(cluster):
    """Starts operators over the cluster and stops them after the test."""
    running: list[Operator] = []

    def run(client=None, settings=FAST, **options) -> Operator:
        operator = Operator(client or cluster.store, settings, **options)
        running.append(operator)
        operator.start()
        return operator

    yield run
    cluster.store.close()
    for operator in running:
        operator.stop()
