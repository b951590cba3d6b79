"""Ranks as real processes, forked from a clean server that has imported torch once."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "elastic_runner"]
)


class RankFailed(AssertionError):
    """A rank raised or died; ``errors`` maps rank to its traceback, or to how it died."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        self.errors = errors


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` ranks (torchelastic's variables set) and return their results.

    ``function`` must be importable (module level). Raises RankFailed with every rank's error. No rank survives.
    """
    # Hosted here, as an agent would: no port is chosen before it is bound.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": 1,
        }
        process = CONTEXT.Process(target=_run, args=(sender, variables, function, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes, processes, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _run(sender: Connection, variables: dict[str, Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes:
        ready = wait(list(open_pipes), timeout)
        if not ready:
            errors.update({rank: f"no result within {timeout} s" for rank in open_pipes.values()})
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                good, value = False, f"died with exit code {processes[rank].exitcode}"
            (results if good else errors)[rank] = value
    if errors:
        raise RankFailed(errors)
    return [results[rank] for rank in range(len(pipes))]
