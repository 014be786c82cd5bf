"""What goes to the device arrives as it was; nothing that is staged later changes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline_engine.backends.triton.staging import ALIGNMENT, Download, upload

CPU = torch.device("cpu")

ANY_ARRAYS = st.dictionaries(
    st.text(max_size=3),
    st.sampled_from([np.int64, np.int32, np.float32]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
    ),
    max_size=6,
)


@given(ANY_ARRAYS, st.booleans())
def test_arrays_arrive_with_their_shapes_and_types(staged, reverse):
    sources = {name: array[::-1] if reverse else array for name, array in staged.items()}
    got = upload(sources, CPU)
    assert list(got) == list(sources)
    for name, array in sources.items():
        np.testing.assert_array_equal(got[name].numpy(), array)
        assert got[name].numpy().dtype == array.dtype
        assert got[name].is_contiguous()


def test_arrays_share_one_block_and_begin_where_kernels_want_them():
    got = upload({"a": np.arange(3, dtype=np.int32), "b": np.arange(5), "c": np.zeros(1, np.float32)}, CPU)
    blocks = {tensor.untyped_storage().data_ptr() for tensor in got.values()}
    assert len(blocks) == 1
    assert all((tensor.storage_offset() * tensor.element_size()) % ALIGNMENT == 0 for tensor in got.values())


def test_later_uploads_and_changes_to_the_source_leave_an_upload_alone():
    source = np.arange(100)
    first = upload({"a": source}, CPU)["a"]
    source[:] = -1
    upload({"a": source}, CPU)
    assert first.tolist() == list(range(100))


def test_a_type_that_the_device_does_not_get_is_named():
    with pytest.raises(TypeError, match="steps is float64; only int64, int32, float32 go to the device"):
        upload({"steps": np.zeros(2)}, CPU)


def test_a_download_holds_what_the_tensors_held_when_it_began():
    tensor = torch.arange(4)
    download = Download({"ids": tensor, "none": torch.empty(0, 3)})
    tensor += 1
    arrived = download.wait()
    assert arrived["ids"].tolist() == [0, 1, 2, 3]
    assert arrived["none"].shape == (0, 3)
