"""What a KVStore may say. The same cases go to a real API server in tests/kube/test_api_crds.py."""

from __future__ import annotations

import pytest
from kv_store_cases import ACCEPTED, REFUSED

from paceline_api.validation import InvalidObject, parse


@pytest.mark.parametrize("manifest", ACCEPTED)
def test_what_is_whole_is_accepted(manifest):
    parse(manifest)


@pytest.mark.parametrize(("manifest", "field", "word"), REFUSED)
def test_what_is_not_is_refused_with_its_field(manifest, field, word):
    with pytest.raises(InvalidObject) as caught:
        parse(manifest)
    found = {problem.field: problem.message for problem in caught.value.problems}
    assert word in found[field]
