"""Memory given back to the system while its address stays: what a sleeping engine does with its KV pool.

Whoever holds a pointer into the memory, a kernel or a view, may keep it; the contents are zeros afterwards. Linux only;
elsewhere nothing is given back. Knows nothing of what the memory is for.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_MADV_DONTNEED = 4


def release_pages(tensor: torch.Tensor) -> int:
    """Give back the whole pages of a contiguous host tensor that nobody reads any more; how many bytes that were.

    Pages come back as zeros when they are next touched.
    """
    if sys.platform != "linux" or not tensor.is_contiguous():
        return 0
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    last = (tensor.data_ptr() + tensor.nbytes) // page * page
    if last <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
    return 0 if failed else last - first
