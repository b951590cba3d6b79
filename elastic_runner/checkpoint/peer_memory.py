"""Memory of this node's other ranks, read by process_vm_readv: at the speed of a copy, to where the bytes are wanted.

No page is shared for it, so that the memory can be private and in huge pages. It takes Linux, one user and one process
namespace, and no seccomp filter on the call (container runtimes' default profiles let it pass). Where Yama keeps it
from all but a process's ancestors (ptrace_scope 1, as on Ubuntu), the owner gives leave; under ptrace_scope 2 and 3
nobody has it. ``can_read`` finds out.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from elastic_runner.checkpoint.image import PrivateBuffer
from elastic_runner.errors import PeerLost

_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)
_NOBODY = ctypes.c_ulong(0)
_TOKEN_BYTES = 16


class _Span(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_size_t), ("length", ctypes.c_size_t))


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Some bytes in a process's memory, sent to others so that they can try to read them."""

    pid: int
    """The process."""
    address: int
    """Where in its memory they are."""
    token: bytes
    """What they are: another process of that number has others."""


@contextmanager
def readable() -> Iterator[Probe]:
    """Let other processes of this user read this one's memory, where that takes its leave, while the context lasts."""
    buffer = ctypes.create_string_buffer(os.urandom(_TOKEN_BYTES), _TOKEN_BYTES)
    _give_leave(_ANYBODY)
    try:
        yield Probe(pid=os.getpid(), address=ctypes.addressof(buffer), token=buffer.raw)
    finally:
        _give_leave(_NOBODY)


def can_read(probe: Probe) -> bool:
    """Whether this process can read the memory of the one that made ``probe``."""
    found = ctypes.create_string_buffer(_TOKEN_BYTES)
    try:
        _read(probe.pid, probe.address, ctypes.addressof(found), _TOKEN_BYTES)
    except (OSError, AttributeError):  # forbidden; a C library without the call
        return False
    return found.raw == probe.token


@dataclass
class Scratch:
    """Memory for bytes on their way, made when it is needed and used again."""

    buffer: PrivateBuffer | None = field(default=None, init=False)
    """What there is so far."""

    def take(self, size: int) -> memoryview:
        """So many bytes, until the next call."""
        if self.buffer is None or self.buffer.size < size:
            self.buffer = PrivateBuffer(max(size, 1))
        return self.buffer.view[:size]


@dataclass(frozen=True, kw_only=True)
class PeerFile:
    """A file in the memory of another process."""

    pid: int
    """The process."""
    address: int
    """Where in its memory the file begins."""
    size: int
    """Bytes."""
    scratch: Scratch
    """For what is looked at here."""

    def part(self, offset: int, length: int) -> memoryview:
        """A copy of some of it, there until the next call; as a slice does, it ends with the file. Raises PeerLost."""
        found = self.scratch.take(max(0, min(length, self.size - offset)))
        if found:
            self.fill(offset, torch.frombuffer(found, dtype=torch.uint8))
        return found

    def fill(self, offset: int, target: torch.Tensor) -> None:
        """Fill a contiguous tensor in this process's memory from ``offset`` on. Raises PeerLost."""
        assert offset >= 0 and offset + target.nbytes <= self.size, "within the file"
        try:
            _read(self.pid, self.address + offset, target.data_ptr(), target.nbytes)
        except OSError as error:
            raise PeerLost(f"restore: memory of process {self.pid} cannot be read any more: {error}") from error


def _read(pid: int, source: int, target: int, length: int) -> None:
    """Copy between addresses; the GIL is let go of. Raises OSError."""
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    call = _library().process_vm_readv
    while length:
        here, there = _Span(target, length), _Span(source, length)
        done = call(ctypes.c_int(pid), ctypes.byref(here), one, ctypes.byref(there), one, none)
        if done <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        source, target, length = source + done, target + done, length - done


def _give_leave(to: ctypes.c_ulong) -> None:
    """Without Yama the kernel does not know this option, and nothing has to be allowed."""
    none = ctypes.c_ulong(0)
    _library().prctl(ctypes.c_int(_PR_SET_PTRACER), to, none, none, none)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    with suppress(AttributeError):  # a C library without it; can_read says so
        library.process_vm_readv.restype = ctypes.c_ssize_t
    return library
