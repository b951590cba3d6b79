"""Process groups of one attempt, safe from keys that dead workers left in a store that outlives them.

Stock torchrun 2.13 keeps one TCPStore across restarts and gives workers no attempt prefix, so new workers can read
dead ones' addresses (gloo: "connectFullMesh ... refused", or a hang). Here the ranks first call the roll, which
gives them a token that no attempt has used before, and the process group's keys live under that token.
"""

from __future__ import annotations

import uuid
from datetime import timedelta

import torch.distributed as dist

from elastic_runner.environment import Environment
from elastic_runner.errors import SetupError

_CLOSED = "closed"


def connect(environment: Environment, seconds: float) -> dist.Store:
    """The launcher's store, or one of our own for a world of one. Raises SetupError."""
    if not environment.distributed:
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"no store at MASTER_ADDR:MASTER_PORT: {str(error).splitlines()[0]}") from error
    return store


def call_roll(store: dist.Store, rank: int, world_size: int, seconds: float) -> str:
    """Agree with the ``world_size`` - 1 live peers on a token that no earlier attempt has used.

    Rolls are numbered. Rank 0 opens the first free number and closes those that dead ones left open; every other rank
    signs the first roll in which its place is free and waits for its verdict. A roll that was completed has every
    place taken, so no newcomer can mistake it for its own. Raises SetupError naming who is absent after ``seconds``.
    """
    mine = uuid.uuid4().hex
    if world_size == 1:
        return mine
    store.set_timeout(timedelta(seconds=seconds))
    return _open_roll(store, mine, world_size) if rank == 0 else _sign_roll(store, mine, rank, world_size)


def _open_roll(store: dist.Store, mine: str, world_size: int) -> str:
    number = 1
    while _claim(store, f"{number}/opened", mine) != mine:
        _claim(store, f"{number}/verdict", _CLOSED)
        number += 1
    places = [f"{number}/rank {rank}" for rank in range(1, world_size)]
    try:
        store.wait(places)
    except dist.DistError as error:
        absent = [place.partition("/")[2] for place in places if not store.check([place])]
        raise SetupError(f"{', '.join(absent)} of {world_size} did not come in time (timeouts.setup)") from error
    if _claim(store, f"{number}/verdict", f"complete {world_size}") == _CLOSED:
        raise SetupError("a newer rank 0 has taken over")
    return mine


def _sign_roll(store: dist.Store, mine: str, rank: int, world_size: int) -> str:
    number = 0
    while True:
        number += 1
        try:
            store.wait([f"{number}/opened"])
            if _claim(store, f"{number}/rank {rank}", mine) != mine:
                continue
            verdict = store.get(f"{number}/verdict").decode()  # waits until there is one
        except dist.DistError as error:
            raise SetupError(f"rank {rank}: rank 0 did not call the roll in time (timeouts.setup)") from error
        if verdict == f"complete {world_size}":
            return store.get(f"{number}/opened").decode()


def _claim(store: dist.Store, key: str, value: str) -> str:
    """Set ``key`` if nobody has; return what it holds."""
    return store.compare_set(key, "", value).decode()


def start_groups(
    store: dist.Store, environment: Environment, backend: str, *, setup: float, step: float, checkpoint: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """Start the default group, and gloo groups for steps, for checkpoints and for what is saved beside training.

    Each has its time-out in seconds.
    """
    rank, world = environment.rank, environment.world_size
    try:
        token = call_roll(dist.PrefixStore("elastic_runner/roll", store), rank, world, setup)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"elastic_runner/{token}", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=step),
        )
        steps = dist.new_group(backend="gloo", timeout=timedelta(seconds=step))
        checkpoints = dist.new_group(backend="gloo", timeout=timedelta(seconds=checkpoint))
        background = dist.new_group(backend="gloo", timeout=timedelta(seconds=checkpoint))
    except RuntimeError as error:
        raise SetupError(f"the process group did not come up: {str(error).splitlines()[0]}") from error
    return steps, checkpoints, background
