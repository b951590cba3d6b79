"""What the ranks of the checkpoint tests run. Apart, so that ranks import nothing that only the tests need."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import elastic_runner as er
from elastic_runner.checkpoint.capture import capture
from elastic_runner.checkpoint.checkpointer import Checkpointer
from elastic_runner.checkpoint.full import FullSaver
from elastic_runner.checkpoint.sharded import ShardedSaver
from elastic_runner.config import CheckpointConfig, DdpConfig, FsdpConfig, RunConfig, StrategyConfig
from elastic_runner.errors import StorageError, StorageFull
from elastic_runner.train.state import TrainState
from elastic_runner.worker.attempt import begin_attempt
from tests.support.checkpointing import FixedData, Net, train

Dump = dict[str, tuple[str, tuple[int, ...], bytes]]


def configured(run_dir: str, options: dict[str, str], strategy: str, format: str) -> RunConfig:
    return RunConfig(
        run_dir=run_dir,
        storage_options=options,
        strategy=StrategyConfig(
            name=strategy,  # type: ignore[arg-type]
            ddp=DdpConfig(find_unused_parameters=True),
            fsdp=FsdpConfig(wrap_classes=("Linear",)),
        ),
        checkpoint=CheckpointConfig(format=format, keep=10),  # type: ignore[arg-type]
    )


def build(worker: er.Worker, model: torch.nn.Module | None = None) -> TrainState:
    model = worker.prepare(Net() if model is None else model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return TrainState(model=model, optimizer=optimizer, data=FixedData())  # type: ignore[arg-type]


def dump(state: TrainState) -> Dump:
    """Every tensor of a state, whole, as bytes, on every rank."""
    result: Dump = {}
    for key, tensor in sorted(capture(state).tensors.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        result[key] = (
            str(whole.dtype),
            tuple(whole.shape),
            whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    return result


def continue_and_save(
    run_dir: str, options: dict[str, str], strategy: str, format: str
) -> tuple[int, Dump, Dump, set[str]]:
    """Restore, train a step, save: the step found, the state found, the state saved, kinds of tensors met."""
    with er.Worker(configured(run_dir, options, strategy, format)) as worker:
        state = build(worker)
        checkpointer = er.Checkpointer(worker.config.checkpoint, state, worker)
        step = checkpointer.restore()
        found = dump(state)
        train(state)
        with torch.no_grad():  # leaves FSDP's root gathered, as an evaluation before a save does
            state.model(torch.arange(6))
        checkpointer.save()
        kinds = {type(tensor).__name__ for tensor in capture(state).tensors.values()}
        return step, found, dump(state), kinds


class Breaking:
    """A storage whose writers break after some bytes."""

    def __init__(self, inner: Any, error: Exception) -> None:
        self._inner = inner
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_bulk(self, path: str, bulk: Any) -> Any:
        with self.writer(path) as stream:
            for block in bulk.blocks():
                stream.write(block[:300])
                stream.write(block[300:])
        raise AssertionError("it should have broken")

    @contextmanager
    def writer(self, path: str) -> Iterator[Any]:
        with self._inner.writer(path) as stream:
            sink = stream._sink

            class Sink:
                def write(_, view: memoryview) -> int:
                    if stream.tell() > 200:
                        raise self._error
                    return int(sink.write(view))

            stream._sink = Sink()
            yield stream


def fail_on_one_rank(run_dir: str, format: str, failing: int, full: bool) -> dict[str, Any]:
    """Save step 1; fail to save step 2 on one rank; what each rank saw, and what a restore finds then."""
    with er.Worker(configured(run_dir, {}, "fsdp", format)) as worker:
        state = build(worker)
        checkpointer = er.Checkpointer(worker.config.checkpoint, state, worker)
        train(state)
        checkpointer.save()
        saved = dump(state)
        train(state)
        healthy = checkpointer._storage
        if worker.rank == failing:
            error = StorageFull("no space left") if full else StorageError("the network is gone")
            checkpointer._storage = Breaking(healthy, error)  # type: ignore[assignment]
        failure = _error(checkpointer.save)
        checkpointer._storage = healthy
        manifests = [
            f"{step}/{name}" for step in healthy.list("") for name in healthy.list(step) if name.startswith("manifest")
        ]
        step = er.Checkpointer(worker.config.checkpoint, state, worker).restore()
        same = dump(state) == saved
        train(state)
        return {
            "failure": failure,
            "manifests": manifests,
            "restored": step,
            "same": same,
            "again": _error(checkpointer.save),
        }


def _error(action: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        action()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


class Recording:
    """A storage that remembers what was created and deleted."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(path: str, *rest: Any) -> Any:
            if name in ("create", "delete", "put", "writer"):
                self.calls.append(f"{name} {path}")
            return getattr(self._inner, name)(path, *rest)

        return call


def record_storage_calls(run_dir: str, format: str) -> list[str]:
    with er.Worker(configured(run_dir, {}, "ddp", format)) as worker:
        state = build(worker)
        config = CheckpointConfig(format=format, keep=1)  # type: ignore[arg-type]
        checkpointer = er.Checkpointer(config, state, worker)
        recording = Recording(checkpointer._storage)
        checkpointer._storage = recording  # type: ignore[assignment]
        for _ in range(2):
            train(state)
            checkpointer.save()
        return recording.calls


def fenced_by_a_newer_attempt(run_dir: str, format: str) -> tuple[tuple[str, str] | None, list[str]]:
    with er.Worker(configured(run_dir, {}, "ddp", format)) as worker:
        state = build(worker)
        checkpointer = er.Checkpointer(worker.config.checkpoint, state, worker)
        train(state)
        worker.on_main(lambda: begin_attempt(worker.storage, {}))
        failure = _error(checkpointer.save)
        return failure, checkpointer._storage.list("step-0000000001")


def disagree_on_the_step(run_dir: str) -> tuple[tuple[str, str] | None, list[str]]:
    with er.Worker(configured(run_dir, {}, "ddp", "sharded")) as worker:
        state = build(worker)
        checkpointer = er.Checkpointer(worker.config.checkpoint, state, worker)
        train(state)
        state.step += worker.rank
        return _error(checkpointer.save), checkpointer._storage.list("")


def measure_what_travels(run_dir: str, format: str) -> dict[str, int]:
    """Bytes of the objects that one save exchanges, and of the copy of the state that this rank keeps for it."""
    sizes: list[int] = []
    exchange = dist.all_gather_object

    def measured(found: Any, mine: Any, group: Any = None) -> None:
        sizes.append(len(pickle.dumps(mine)))
        exchange(found, mine, group=group)

    with er.Worker(configured(run_dir, {}, "fsdp", format)) as worker:
        state = build(worker, torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)))
        train(state, features=512)
        checkpointer: Checkpointer = er.Checkpointer(worker.config.checkpoint, state, worker)
        dist.all_gather_object = measured
        try:
            checkpointer.save()
        finally:
            dist.all_gather_object = exchange
        saver = checkpointer._saver
        if isinstance(saver, FullSaver):
            kept = sum(tensor.nbytes for tensor in saver._copies.values())
        else:
            assert isinstance(saver, ShardedSaver)
            kept = sum(image.file.size for image in saver._images)
        return {"exchanged": sum(sizes), "kept": kept}
