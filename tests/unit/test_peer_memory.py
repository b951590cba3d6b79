"""Reading another process's memory, and finding out whether that is allowed."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from elastic_runner.checkpoint import peer_memory
from elastic_runner.checkpoint.peer_memory import PeerFile, Probe, Scratch, can_read, readable
from elastic_runner.errors import PeerLost

BYTES = bytes(range(200)) * 50
PEER = """
import ctypes, os, sys
held = ctypes.create_string_buffer(bytes(range(200)) * 50, 10000)
print(os.getpid(), ctypes.addressof(held), flush=True)
sys.stdin.read()
"""


@contextmanager
def peer() -> Iterator[PeerFile]:
    """Another process that holds BYTES; gone when the context ends."""
    with subprocess.Popen([sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            pid, address = map(int, process.stdout.readline().split())
            yield PeerFile(pid=pid, address=address, size=len(BYTES), scratch=Scratch())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def file() -> Iterator[PeerFile]:
    with peer() as found:
        if not can_read(Probe(pid=found.pid, address=found.address, token=BYTES[:16])):
            pytest.skip("this machine lets no process read another one's memory (ptrace_scope, or a container's rules)")
        yield found


@pytest.mark.parametrize(("offset", "length"), [(0, 10000), (0, 0), (7, 4099), (9999, 1), (9990, 100), (10001, 5)])
def test_a_part_is_what_a_slice_is(offset: int, length: int, file: PeerFile) -> None:
    assert bytes(file.part(offset, length)) == BYTES[offset : offset + length]


def test_tensors_are_filled_where_they_are(file: PeerFile) -> None:
    whole = torch.zeros(6, 100, dtype=torch.int16)
    file.fill(200, whole[2:5])
    assert whole[2:5].numpy().tobytes() == BYTES[200:800]
    assert not whole[:2].any() and not whole[5:].any()


def test_nothing_beyond_the_file_is_read(file: PeerFile) -> None:
    for offset in (-1, 9_998):
        with pytest.raises(AssertionError):
            file.fill(offset, torch.zeros(3, dtype=torch.uint8))


def test_a_process_that_is_gone_is_a_lost_peer() -> None:
    with peer() as found:
        pass
    with pytest.raises(PeerLost, match=f"memory of process {found.pid} cannot be read"):
        found.fill(0, torch.zeros(3, dtype=torch.uint8))


def test_a_process_is_known_by_what_it_holds(file: PeerFile) -> None:
    right = Probe(pid=file.pid, address=file.address, token=BYTES[:16])
    assert can_read(right)
    assert not can_read(replace(right, token=bytes(16)))
    assert not can_read(replace(right, address=8))


def test_ones_own_probe_can_be_read_while_the_context_lasts() -> None:
    with readable() as probe, readable() as other:
        assert can_read(probe) and probe.token != other.token


def test_leave_is_given_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []

    def prctl(option: ctypes.c_int, to: ctypes.c_ulong, *_: object) -> int:
        assert option.value == int.from_bytes(b"Yama", "big")
        said.append(to.value)
        return 0

    monkeypatch.setattr(peer_memory, "_library", lambda: SimpleNamespace(prctl=prctl))
    with pytest.raises(KeyError), readable():
        assert said == [(1 << 64) - 1]
        raise KeyError
    assert said == [(1 << 64) - 1, 0]


def refused(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


@pytest.mark.parametrize("library", [SimpleNamespace(process_vm_readv=refused), SimpleNamespace()])
def test_a_refusal_is_no_error_when_it_is_asked_for(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_library", lambda: library)
    assert not can_read(Probe(pid=1, address=1, token=bytes(16)))


def test_what_comes_in_pieces_is_put_together(file: PeerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel copies at most 2 GiB at a time."""
    library = peer_memory._library()

    def some(pid: object, here: object, one: object, there: object, *rest: object) -> int:
        for span in (here, there):
            spanned = span._obj  # type: ignore[attr-defined]
            spanned.length = min(spanned.length, 999)
        return int(library.process_vm_readv(pid, here, one, there, *rest))

    monkeypatch.setattr(peer_memory, "_library", lambda: SimpleNamespace(process_vm_readv=some))
    assert bytes(file.part(0, len(BYTES))) == BYTES
