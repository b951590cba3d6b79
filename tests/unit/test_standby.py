"""A standby worker from within: its part of what it and the fork server say to each other."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

import elastic_runner.device
from elastic_runner.launch.standby import stand_by

ENV = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1", "CUDA_X": "mine"}


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's end of the socket and the standby's, which has an environment of its own."""
    monkeypatch.setattr(os, "environ", {})
    server, standby = socket.socketpair()
    with server, standby:
        yield server, standby


def test_the_device_is_open_before_anything_is_said(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, standby = ends
    seen: list[object] = []

    def open_device(local_rank: int) -> None:
        seen.extend([local_rank, os.environ["CUDA_X"]])
        with pytest.raises(BlockingIOError):
            server.recv(1, socket.MSG_DONTWAIT)

    monkeypatch.setattr(elastic_runner.device, "open_device", open_device)
    server.sendall(json.dumps({"a": "request"}).encode() + b"\n")
    assert stand_by(standby, ENV) == {"a": "request"}
    assert seen == [1, "mine"] and server.recv(9) == b"rt"


def test_a_device_that_cannot_be_opened_is_said_in_one_line(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_device(local_rank: int) -> None:
        raise RuntimeError("it fell off the bus")

    monkeypatch.setattr(elastic_runner.device, "open_device", open_device)
    with pytest.raises(SystemExit, match="no standby worker for local rank 1: its device cannot be opened: it fell"):
        stand_by(ends[1], ENV)


def test_without_a_server_there_is_nothing_to_wait_for(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].shutdown(socket.SHUT_WR)
    assert stand_by(ends[1], ENV) is None
