"""Two imports of one step, at once or after one that was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_runner import paths
from elastic_runner.checkpoint.tools.importing import import_state
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.checkpoint.tools.written import no_bar
from elastic_runner.errors import ConfigError
from elastic_runner.storage import LocalStorage
from tests.support.checkpointing import Net
from tests.support.exporting import imported


def test_two_imports_of_one_step_do_not_mix(tmp_path: Path) -> None:
    """The second is refused while the first one writes; what a killed one has left is in nobody's way for ever."""
    torch.save(Net().state_dict(), tmp_path / "w.pt")
    storage = LocalStorage(tmp_path / "run/checkpoints")
    refused: list[str] = []

    @contextmanager
    def another(what: str, total: int) -> Iterator[Any]:
        with pytest.raises(ConfigError) as caught:
            imported(tmp_path / "w.pt", tmp_path / "run/checkpoints", step=3)
        refused.append(str(caught.value))
        yield lambda more: None

    with opened(str(tmp_path / "w.pt"), {}) as source:
        import_state(source, str(tmp_path / "run/checkpoints"), {}, step=3, bar=another)
    assert [f"delete {paths.import_claim(3)} below" in said for said in refused] == [True]
    assert sorted(storage.list(paths.step_directory(3))) == ["data-000000", "manifest-000000.json"]
    with opened(f"{tmp_path}/run/checkpoints@3", {}) as source:
        source.verify(no_bar)


@pytest.mark.parametrize("cut", [0, 50])
def test_what_a_killed_import_has_left_is_replaced(cut: int, tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "w.pt")
    storage = LocalStorage(tmp_path / "run/checkpoints")
    imported(tmp_path / "w.pt", tmp_path / "run/checkpoints", step=3)
    whole = storage.read(paths.manifest(3, 0))
    storage.put(paths.manifest(3, 0), whole[:cut])
    imported(tmp_path / "w.pt", tmp_path / "run/checkpoints", step=3)
    storage.put(paths.manifest(3, 0), whole.replace(b'"step": 3', b'"step": 4'))
    with pytest.raises(ConfigError, match=r"of step 3 already: .*was changed after it was written"):
        imported(tmp_path / "w.pt", tmp_path / "run/checkpoints", step=3)
