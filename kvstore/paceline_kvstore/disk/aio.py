"""Several reads or writes of one thread in flight at once: Linux's asynchronous I/O (io_submit, io_getevents).

While the device works on a payload, its checksum is made, or that of the part that is there already. Threads could do
that too, but wake up late on a busy machine. Works on files opened with O_DIRECT; where the kernel, a container's rules
or the processor's architecture don't offer it, `available` is False.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_kvstore.arena import Bytes

DEPTH = 64
READ, WRITE = 0, 1
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Of io_setup, io_destroy, io_getevents and io_submit: the C library has no names for them."""


class _Control(ctypes.Structure):
    """struct iocb of linux/aio_abi.h, little-endian."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Transfer:
    """Memory that goes to, or is filled from, the file at `offset`; both on block boundaries."""

    memory: Bytes
    offset: int


class Flight:
    """The transfers of one thread, numbered from 0 in the order in which they began, until `drain` ends them all."""

    def __init__(self) -> None:
        self._context = ctypes.c_ulong(0)
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._controls = (_Control * DEPTH)()
        self._pointers = (ctypes.c_void_p * DEPTH)(*(ctypes.addressof(control) for control in self._controls))
        self._events = (_Event * DEPTH)()
        self._results: list[int | None] = []
        self._begun = self._done = 0
        # The kernel writes into this memory until `drain`, so it must stay.
        self._memory: list[Bytes] = []
        self._numbers = _NUMBERS.get(platform.machine())
        self._owner = os.getpid()
        if self._numbers is not None and self._do(self._numbers[0], ctypes.c_uint(DEPTH), ctypes.byref(self._context)):
            self._numbers = None

    def __del__(self) -> None:
        if self.available and self._numbers is not None:
            self._do(self._numbers[1], self._context)

    @property
    def available(self) -> bool:
        """False where `begin` would refuse."""
        # A forked child has no part in the parent's.
        return self._numbers is not None and self._owner == os.getpid()

    def begin(self, fd: int, kind: int, transfers: Sequence[Transfer]) -> None:
        """Start transfers, all READ or all WRITE; at most DEPTH between two drains. OSError, with nothing in flight."""
        for number, transfer in enumerate(transfers, len(self._results)):
            control = self._controls[number]
            control.data, control.opcode, control.fd = number, kind, fd
            control.buffer, control.num_bytes = transfer.memory.ctypes.data, len(transfer.memory)
            control.offset = transfer.offset
        self._memory += [transfer.memory for transfer in transfers]
        self._results += [None] * len(transfers)
        while self._begun < len(self._results):
            left = len(self._results) - self._begun
            pointers = ctypes.byref(self._pointers, self._begun * ctypes.sizeof(ctypes.c_void_p))
            begun = self._do(self._number(3), self._context, ctypes.c_long(left), pointers)
            if begun > 0:
                self._begun += begun
            elif begun == -errno.EAGAIN and self._done < self._begun:
                self._reap()
            else:
                self.drain()
                raise OSError(-begun, os.strerror(-begun))

    def wait(self, number: int) -> int:
        """Bytes that a transfer moved, when it and those before it are done; perhaps fewer than asked for. OSError."""
        # Woken up once, not once for each: on a busy machine every time costs.
        while missing := self._results[: number + 1].count(None):
            self._reap(missing)
        result = self._results[number]
        assert result is not None
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def drain(self) -> None:
        """Return when nothing is in flight: memory and file are the caller's again."""
        while self._done < self._begun:
            self._reap(self._begun - self._done)
        self._begun = self._done = 0
        self._results, self._memory = [], []

    def _reap(self, at_least: int = 1) -> None:
        least, most = ctypes.c_long(at_least), ctypes.c_long(DEPTH)
        got = self._do(self._number(2), self._context, least, most, self._events, None)
        if got < 0 and got != -errno.EINTR:
            raise OSError(-got, os.strerror(-got))
        for event in self._events[: max(0, got)]:
            self._results[event.data] = event.result
            self._done += 1

    def _number(self, which: int) -> int:
        if self._numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return self._numbers[which]

    def _do(self, number: int, *arguments: object) -> int:
        """A system call's result, or minus its error number."""
        result = self._call(ctypes.c_long(number), *arguments)
        return -ctypes.get_errno() if result < 0 else result


class _Local(threading.local):
    flight: Flight | None = None


_local = _Local()


def flight() -> Flight:
    """The calling thread's."""
    if _local.flight is None:
        _local.flight = Flight()
    return _local.flight
