"""Runs whose attempts do not simply follow on each other: their record tells what led to the state, and proves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import elastic_runner as er
from elastic_runner import paths
from elastic_runner.checkpoint.tools.importing import import_state
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.data.audit import Audit, audit
from elastic_runner.data.ledger import Record, read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import count
from elastic_runner.errors import StorageError
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support import job


def train(run_dir: Path, steps: int, *, every: int = 5) -> int:
    """An attempt that ends after so many steps; where it resumed."""
    return int(job.train(job.config(str(run_dir), strategy="single", steps=steps, every=every))["resumed"])


def audited(run_dir: Path) -> Audit:
    return audit(lambda: read_records(LocalStorage(run_dir)))


def led(run_dir: Path) -> list[Record]:
    return [r for r in effective(read_records(LocalStorage(run_dir)))[0] if r["event"] == "step"]


def test_a_checkpoint_that_was_passed_over_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 10 could not be read for a while. Case c67."""
    assert train(tmp_path, 10) == 0
    read = LocalStorage.read

    def failing(self: LocalStorage, path: str) -> bytes:
        if path.endswith(paths.manifest(10, 1)):
            raise StorageError(f"read {path}: Errno 5")
        return read(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read", failing)
        assert train(tmp_path, 11, every=100) == 5
    (tmp_path / paths.CHECKPOINTS / paths.manifest(11, 2)).unlink()
    assert train(tmp_path, 12) == 10
    found = audited(tmp_path)
    assert (found.verdict, found.steps, found.lost) == ("proven", 12, 6), found.findings
    assert [r["attempt"] for r in led(tmp_path)] == [1] * 10 + [3] * 2
    counts, lost = count(lambda: read_records(LocalStorage(tmp_path)))
    assert (counts.steps, counts.gaps, counts.repeated, counts.skipped, lost) == (12, 0, 0, 0, 6)
    summary = read_summary(LocalStorage(tmp_path))
    assert summary is not None and (summary.lost_steps, summary.samples_seen) == (6, counts.samples)


def test_a_run_that_begins_with_an_imported_state_proves_what_it_did_itself(tmp_path: Path) -> None:
    train(tmp_path / "old", 9)
    with opened(f"{tmp_path}/old/{paths.CHECKPOINTS}", {}) as source:
        import_state(source, f"{tmp_path}/new/{paths.CHECKPOINTS}", {})
    assert train(tmp_path / "new", 12) == 9
    assert train(tmp_path / "new", 15) == 12
    found = audited(tmp_path / "new")
    assert (found.verdict, found.steps, found.lost) == ("open", 6, 0), found.findings
    verdicts = {finding.name: finding.verdict for finding in found.findings}
    assert verdicts == {
        "steps": "open", "resumes": "open", "coverage": "open",
        "batch": "proven", "order": "proven", "rates": "proven",
    }  # fmt: skip
    summary = read_summary(LocalStorage(tmp_path / "new"))
    assert summary is not None and (summary.samples_skipped, summary.samples_repeated) == (0, 0)


@pytest.mark.parametrize("restores", [False, True])
def test_a_program_with_two_loops_goes_on_or_back(restores: bool, tmp_path: Path) -> None:
    settings = job.config(str(tmp_path), strategy="single", steps=8, every=3)
    with er.Worker(settings) as worker:
        model = worker.prepare(job.Net())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        loader = er.ElasticLoader(job.dataset(), settings.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(settings.checkpoint, state, worker)
        for last in (4, 8):
            if restores:
                checkpointer.restore()
            for step in worker.steps(state):
                for x, y in step.microbatches():
                    step.backward((model(x) - y).square().mean())
                step.optimize()
                checkpointer.maybe_save(step)
                if step.number == last:
                    break
    found = audited(tmp_path)
    assert (found.verdict, found.steps, found.lost) == ("proven", 8, restores), found.findings
