"""Agreement among real ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_runner.coordination import Coordinator, _mapped
from elastic_runner.errors import ElasticRunnerError, LoopError, Mismatch, PeerLost, PhaseTimeout, StorageFull
from tests.support.ranks import RankFailed, run_ranks


def on_ranks(world_size: int, action: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(coordinated, world_size, action, *args, timeout=60)


def coordinated(action: Callable[..., Any], *args: Any) -> Any:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    coordinator = Coordinator(dist.group.WORLD)
    try:
        return action(coordinator, *args)
    finally:
        coordinator.close()
        dist.destroy_process_group()


def raised(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Name and text of what ``action`` raises, and after how many seconds."""
    begun = time.monotonic()
    try:
        action()
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        return type(error).__name__, " ".join([str(error), *notes]), time.monotonic() - begun
    return "", "", time.monotonic() - begun


class Unusual(Exception):
    """Cannot be unpickled: its __init__ wants more than its args hold."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def exchange(c: Coordinator) -> Any:
    return (
        c.gather("rank", c.rank * 10),
        c.agree("square", lambda: c.rank**2),
        c.once("main", lambda: f"by {c.rank}"),
        c.sum("sum", torch.tensor([1.0, c.rank])).tolist(),
        c.is_main,
    )


def test_values_reach_every_rank_in_rank_order() -> None:
    assert on_ranks(3, exchange) == [([0, 10, 20], [0, 1, 4], "by 0", [3.0, 3.0], rank == 0) for rank in range(3)]


def test_of_one_rank() -> None:
    assert exchange(Coordinator()) == ([0], [0], "by 0", [1.0, 0.0], True)
    with pytest.raises(StorageFull):
        Coordinator().agree("x", fail(StorageFull("no space")))


def fail(error: BaseException) -> Callable[[], Any]:
    def action() -> Any:
        raise error

    return action


def errors(c: Coordinator) -> Any:
    def on(*ranks: int) -> Callable[[], Any]:
        failing = fail(Mismatch(f"on rank {c.rank}", missing=["w"]))
        return failing if c.rank in ranks else lambda: None

    return (
        raised(lambda: c.agree("one", on(1)))[:2],
        raised(lambda: c.agree("two", on(1, 2)))[:2],
        raised(lambda: c.once("main", fail(StorageFull("no space"))))[:2],
        raised(lambda: c.agree("foreign", fail(Unusual(1, 2)) if c.rank == 1 else lambda: None))[:2],
        raised(lambda: c.gather("value", (lambda: 0) if c.rank == 1 else 0))[:2],
        c.gather("still in step", c.rank),
    )


def test_an_error_on_any_rank_is_raised_alike_on_every_rank() -> None:
    for rank, (one, two, main, foreign, value, after) in enumerate(on_ranks(3, errors)):
        assert one[0] == "Mismatch" and one[1].startswith("on rank 1")
        assert ("raised on rank 1" in one[1]) == (rank != 1)
        assert two[0] == "Mismatch" and two[1].startswith("on rank 1"), "the lowest rank's"
        assert main[0] == "StorageFull" and main[1].startswith("no space")
        assert foreign[0] == ElasticRunnerError.__name__ and foreign[1].startswith("Unusual: 1 and 2")
        assert value[0] == LoopError.__name__ and "'value'" in value[1] and "cannot be sent" in value[1]
        assert after == [0, 1, 2]


def different_places(c: Coordinator) -> Any:
    def mine() -> Any:
        if c.rank == 0:
            return c.once("save under 'if rank 0'", lambda: 0)
        return c.sum("step 4", torch.zeros(5))

    return raised(mine)


def test_ranks_in_different_places_name_both() -> None:
    """c15: barriers under 'if rank 0' pair up with whatever comes next."""
    for name, text, seconds in on_ranks(2, different_places):
        assert name == LoopError.__name__
        assert "rank 0: save under 'if rank 0'" in text and "rank 1: step 4" in text
        assert seconds < 5


def peer_dies(c: Coordinator) -> Any:
    c.gather("up", None)
    if c.rank == 1:
        os._exit(9)
    name, text, seconds = raised(lambda: c.gather("after", None))
    assert name == PeerLost.__name__, (name, text)
    assert "'after'" in text
    assert seconds < 5
    os._exit(0)


def test_a_dead_peer_is_noticed_within_seconds() -> None:
    with pytest.raises(RankFailed) as caught:
        on_ranks(2, peer_dies)
    assert caught.value.errors == {0: "died with exit code 0", 1: "died with exit code 9"}


def at_work(signs: Path, elsewhere: bool) -> Any:
    """Rank 0 works until rank 1 has written ``signs``: when it was told so three times, or when it has met an error."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    told: list[None] = []

    def moved() -> None:
        told.append(None)
        if len(told) == 3:
            signs.touch()

    def work() -> str:
        end = time.monotonic() + 20
        while not signs.exists():
            assert time.monotonic() < end, "nobody was told"
            time.sleep(0.01)
        return "done"

    c = Coordinator(dist.group.WORLD, moved=moved, every=0.05)
    if elsewhere:
        name, _, _ = raised(lambda: c.once("save", work) if c.rank == 0 else c.gather("step 4", None))
        signs.touch()
        return name
    once = c.once("save", work)
    signs.unlink() if c.rank == 0 else None
    told.clear()
    error, _, _ = raised(lambda: c.agree("fails", lambda: work() and 1 / 0 if c.rank == 0 else "quick"))
    return once, c.gather("and after", c.rank), len(told) >= 3, error


def test_who_waits_is_told_that_another_is_at_work(tmp_path: Path) -> None:
    """c17: within the exchange, so that it need not be taken for stuck. c15: nor does it wait in the wrong one."""
    waiting = [("done", [0, 1], rank == 1, "ZeroDivisionError") for rank in range(2)]
    assert run_ranks(at_work, 2, tmp_path / "signs", False, timeout=60) == waiting
    assert run_ranks(at_work, 2, tmp_path / "others", True, timeout=60) == [LoopError.__name__] * 2


def peer_sleeps(gone: Path) -> Any:
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    c = Coordinator(dist.group.WORLD)
    c.gather("up", None)
    if c.rank == 1:
        # Comes only when the other one has given up.
        while not gone.exists():
            time.sleep(0.05)
        os._exit(0)
    name, text, seconds = raised(lambda: c.gather("after", None))
    gone.touch()
    assert name == PhaseTimeout.__name__, (name, text)
    assert "'after'" in text
    assert seconds < 10
    os._exit(0)


def test_a_peer_that_does_not_come_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(peer_sleeps, 2, tmp_path / "gone", timeout=60)
    assert caught.value.errors == {0: "died with exit code 0", 1: "died with exit code 0"}


def test_a_rank_that_has_left_agrees_with_nobody() -> None:
    """Not with itself alone, as if it were the world: its manifest would name its own files only."""
    coordinator = Coordinator()
    coordinator.world_size = 2
    coordinator.close()
    for exchange in (
        lambda: coordinator.gather("x", 1),
        lambda: coordinator.agree("x", lambda: 1),
        lambda: coordinator.once("x", lambda: 1),
        lambda: coordinator.decide("x", 1, lambda values: values),
        lambda: coordinator.sum("x", torch.zeros(1)),
    ):
        with pytest.raises(PeerLost, match="'x': this rank has left the group"):
            exchange()


def test_a_loader_s_death_inside_an_exchange_is_not_a_peer_s() -> None:
    """torch raises it from its handler of SIGCHLD, wherever the program is."""
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised, _mapped("step 3"):
        raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed. ")
    assert not isinstance(raised.value, PeerLost)
    with pytest.raises(PeerLost), _mapped("step 3"):
        raise RuntimeError("Connection closed by peer")
