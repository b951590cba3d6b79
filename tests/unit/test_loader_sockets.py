"""Where loader processes keep their sockets: a private name of multiprocessing (data/processes.py)."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, cast

import pytest

from elastic_runner.data.processes import place_sockets, remove_sockets


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What multiprocessing knows of this process: from whoever started it, it has a directory."""
    ours = cast(dict[str, Any], vars(mp.current_process())["_config"])
    monkeypatch.setitem(ours, "tempdir", "/nowhere")
    return ours


@pytest.mark.usefixtures("ours")
def test_sockets_are_in_the_launchers_directory(tmp_path: Path) -> None:
    """Which is the launcher's to remove."""
    place_sockets(str(tmp_path))
    with Listener(family="AF_UNIX") as listener:
        assert Path(cast(str, listener.address)).parent == tmp_path
    remove_sockets(str(tmp_path))
    assert tmp_path.exists()


@pytest.mark.parametrize("agent_dir", [None, "/" + "x" * 100])
def test_without_one_or_where_its_name_leaves_no_room_they_are_in_one_of_their_own(
    agent_dir: str | None, ours: dict[str, Any], tmp_path: Path
) -> None:
    place_sockets(agent_dir)
    assert ours["tempdir"] is None
    remove_sockets(agent_dir)  # none was needed
    ours["tempdir"] = str(tmp_path)
    remove_sockets(agent_dir)
    assert not tmp_path.exists()
