"""One cell of the checkpoint benchmark, as its ranks run it: python -m benchmarks.checkpoint_worker CELL.json"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import s3fs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import TensorDataset

import elastic_runner as er
from benchmarks import raw
from benchmarks.trials import Variant, alternate
from elastic_runner import paths
from elastic_runner.checkpoint.checkpointer import checkpoint_storage
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.config import CheckpointConfig, SnapshotConfig, StrategyConfig, nested_options
from elastic_runner.storage.direct import sync_path

_LAYERS = 20
_ASYNC_SAVES = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one start of the ranks measures."""

    directory: str
    """Everything is written below it."""
    megabytes: int
    """Parameters and moments together, whatever the number of ranks."""
    ranks: int
    """Processes."""
    strategy: str
    """ddp or fsdp."""
    trials: int
    """Those that count."""
    thorough: bool = False
    """Also measure what is only for information: dcp_load, dcp with a kept stager, raw I/O from huge pages."""
    s3_url: str = ""
    """Measure saving to this place instead."""
    s3_options: dict[str, str] = field(default_factory=dict)
    """As storage_options."""

    @property
    def name(self) -> str:
        """As in the names of the results."""
        ranks = "1rank" if self.ranks == 1 else f"{self.ranks}ranks"
        return f"{self.megabytes}mb_{ranks}_{self.strategy}{'_s3' if self.s3_url else ''}"

    @property
    def result(self) -> Path:
        """Where rank 0 leaves what was measured."""
        return Path(self.directory) / "result.json"


@dataclass
class Step:
    """A step that is due."""

    number: int
    is_last: bool = False
    draining: bool = False
    save_ended: bool = False


def make_state(worker: er.Worker, megabytes: int) -> er.TrainState:
    """An embedding and a stack of layers with AdamW's moments, of ``megabytes`` in all."""
    numbers = megabytes * 1_000_000 // 12
    width = max(64, round((numbers * 2 / 3 / _LAYERS) ** 0.5 / 64) * 64)
    rows = max(width, (numbers - _LAYERS * width * (width + 1)) // width)
    layers = [nn.Linear(width, width) for _ in range(_LAYERS)]
    model = worker.prepare(nn.Sequential(nn.Embedding(rows, width), *layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    data = er.ElasticLoader(TensorDataset(torch.zeros(64, 1)), worker.config.data, worker)
    return er.TrainState(model=model, optimizer=optimizer, data=data)


class Bench:
    """The variants over one state."""

    def __init__(self, cell: Cell, worker: er.Worker) -> None:
        self.cell = cell
        self.worker = worker
        self.coordinator = worker.checkpoint_coordinator
        self.directory = Path(cell.directory)
        self.state = make_state(worker, cell.megabytes)
        self.bytes = sum(3 * p.numel() * p.element_size() for p in self.state.model.parameters())
        # Nobody's old files are deleted while the clock runs: tidy does that.
        config = CheckpointConfig(every=1, keep=1_000_000, url=cell.s3_url or None, options=cell.s3_options)
        self.checkpointer = er.Checkpointer(config, self.state, worker)
        self.storage = checkpoint_storage(
            config, run_url=worker.run_url, run_options={}, seconds=worker.storage_timeout
        )

    def async_save(self) -> None:
        """What a training step pays."""
        self.checkpointer.maybe_save(Step(self.state.step))

    def next_step(self) -> None:
        """A new state to save."""
        self.state.step += 1

    def tidy(self) -> None:
        """Delete all checkpoints but the newest."""
        if self.worker.is_main:
            for manifest in list_checkpoints(self.storage).manifests[1:]:
                self.storage.delete(paths.step_directory(manifest.step))

    def finish(self) -> None:
        """Wait for the save in flight."""
        self.checkpointer.save()
        self.tidy()

    def peak(self) -> list[int]:
        """Extra memory that asynchronous saves take at most, of each rank; nothing was saved before."""
        raw.trim()
        before = raw.resident("VmRSS")
        raw.forget_peak()
        for _ in range(_ASYNC_SAVES):
            self.next_step()
            self.async_save()
            self.finish()
        return self.coordinator.gather("peak", raw.resident("VmHWM") - before)

    def written(self) -> int:
        """Bytes that this rank copies in a save: those of its files."""
        newest = list_checkpoints(self.storage).manifests[0]
        mine = f"__{self.worker.rank}_"
        names = {file.path.rpartition("/")[2]: file.size for file in newest.files}
        return sum(size for name, size in names.items() if name.startswith(mine) and not name.endswith("_0.distcp"))

    def ours(self) -> list[Variant]:
        """This package."""
        save = self.checkpointer.save
        return [
            Variant(name="async_stall", before=self.next_step, run=self.async_save, after=self.finish),
            Variant(name="save", before=self.next_step, run=save, after=self.tidy),
            Variant(name="load", run=self.checkpointer.restore),
        ]

    def of_the_machine(self, size: int) -> list[Variant]:
        """The same number of bytes by the same number of processes, and nothing else."""
        source, target, huge = raw.Buffer(size), raw.Buffer(size), raw.Buffer(size, huge=True)
        file = self.directory / f"raw-{self.worker.rank}"

        def remove() -> None:
            file.unlink(missing_ok=True)

        return [
            Variant(name="memcpy", run=lambda: target.tensor.copy_(source.tensor)),
            Variant(name="raw_write", before=remove, run=lambda: raw.write_raw(file, source)),
            Variant(name="raw_huge_write", before=remove, run=lambda: raw.write_raw(file, huge)),
            Variant(name="raw_read", run=lambda: raw.read_raw(file, target)),
            Variant(name="raw_new_read", run=lambda: raw.read_raw(file, raw.Buffer(size, huge=True, new=True))),
            Variant(name="raw_huge_read", run=lambda: raw.read_raw(file, huge)),
        ]


class Stock:
    """torch.distributed.checkpoint over the same state."""

    def __init__(self, bench: Bench) -> None:
        self._worker = bench.worker
        self._directory = bench.directory / "dcp"
        model, optimizer = get_state_dict(bench.state.model, bench.state.optimizer)
        self._state: dict[str, Any] = {"model": model, "optim": optimizer}
        self._group = dist.new_group(backend="gloo")
        self._pending: Future[Any] | None = None
        # The configuration with the shortest stall: memory of the first save is kept for the next ones.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def variants(self) -> list[Variant]:
        """Asynchronous by default and with a kept stager, synchronous, loading."""
        new, path = self._new, str(self._directory)
        return [
            Variant(name="dcp_async_stall", before=new, run=lambda: self._start(), after=self._wait),
            Variant(
                name="dcp_async_kept_stall",
                before=new,
                run=lambda: self._start(async_stager=self._stager),
                after=self._wait,
            ),
            Variant(name="dcp_save", before=new, run=self._save),
            Variant(name="dcp_load", before=self._forget, run=lambda: dcp.load(self._state, checkpoint_id=path)),
        ]

    def _new(self) -> None:
        self._worker.coordinator.gather("before", None)
        if self._worker.is_main:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._worker.coordinator.gather("removed", None)

    def _start(self, **options: Any) -> None:
        path = str(self._directory)
        self._pending = cast(
            "Future[Any]", dcp.async_save(self._state, checkpoint_id=path, process_group=self._group, **options)
        )

    def _wait(self) -> None:
        assert self._pending is not None
        self._pending.result()
        self._pending = None

    def _save(self) -> None:
        dcp.save(self._state, storage_writer=dcp.FileSystemWriter(self._directory))
        for file in self._mine():
            sync_path(file)
        sync_path(self._directory)

    def _forget(self) -> None:
        raw.drop_cache(self._mine())

    def _mine(self) -> list[Path]:
        return sorted(self._directory.iterdir())[self._worker.rank :: self._worker.world_size]


def plain_upload(cell: Cell, rank: int, size: int) -> tuple[Variant, Callable[[], None]]:
    """One file in memory per rank, put by s3fs as it comes; and what removes the file."""
    options = nested_options(cell.s3_options)
    filesystem = s3fs.S3FileSystem(**options)
    file = Path("/dev/shm") / f"elastic-runner-bench-{Path(cell.directory).name}-{rank}"
    file.write_bytes(memoryview(raw.Buffer(size).view))
    target = f"{cell.s3_url}-plain/{rank}"
    variant = Variant(name="plain_upload", run=lambda: filesystem.put_file(str(file), target))
    return variant, lambda: file.unlink(missing_ok=True)


def measure(cell: Cell, worker: er.Worker) -> dict[str, Any]:
    """All that is known of a cell, the same on every rank."""
    bench = Bench(cell, worker)
    bench.next_step()
    if cell.s3_url:
        bench.checkpointer.save()
        plain, remove = plain_upload(cell, worker.rank, bench.written())
        ours = Variant(name="s3_save", before=bench.next_step, run=bench.checkpointer.save, after=bench.tidy)
        try:
            seconds = alternate([plain, ours], cell.trials, bench.coordinator)
        finally:
            remove()
        return {"state_bytes": bench.bytes, "seconds": seconds}
    peak = bench.peak()
    memcpy, raw_write, raw_huge_write, raw_read, raw_new_read, raw_huge_read = bench.of_the_machine(bench.written())
    async_stall, save, load = bench.ours()
    dcp_async, dcp_kept, dcp_save, dcp_load = Stock(bench).variants()
    order = [memcpy, async_stall, dcp_async, raw_write, save, dcp_save, raw_read, raw_new_read, load]
    if cell.thorough:
        order += [dcp_kept, raw_huge_write, raw_huge_read, dcp_load]
    seconds = alternate(order, cell.trials, bench.coordinator)
    return {"state_bytes": bench.bytes, "seconds": seconds, "peak_bytes": sum(peak)}


def main() -> None:
    """Measure and leave the result."""
    cell = Cell(**json.loads(Path(sys.argv[1]).read_text()))
    config = er.RunConfig(
        run_dir=str(Path(cell.directory) / "run"),
        strategy=StrategyConfig(name=cell.strategy),  # type: ignore[arg-type]
        # Taken at each save, too, but with a budget of their own (snapshot.share): saving alone is measured here.
        snapshot=SnapshotConfig(enabled=False),
    )
    with er.Worker(config) as worker:
        result = measure(cell, worker)
        if worker.is_main:
            cell.result.write_text(json.dumps(result))


def write_cell(cell: Cell) -> Path:
    """Where ``main`` finds it; readable by its owner only, since it may hold credentials."""
    path = Path(cell.directory) / "cell.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(asdict(cell)))
    return path


if __name__ == "__main__":
    main()
