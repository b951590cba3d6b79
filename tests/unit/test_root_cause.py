"""Which failure is named first (case c08): the cause, not a victim."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elastic_runner.launch.launcher import root_cause


@dataclass
class Failure:
    exitcode: int
    timestamp: int
    message: str = ""


def cause(**failures: Failure) -> str:
    names = list(failures)
    rank, _ = root_cause(dict(enumerate(failures.values())))  # type: ignore[arg-type]
    return names[rank]


def test_a_killed_worker_comes_before_the_peers_that_noticed() -> None:
    victim = Failure(1, 5, "PeerLost: 'step 3': a peer went away")
    assert cause(victim=victim, killed=Failure(-signal.SIGKILL, 9)) == "killed"


def test_an_error_of_its_own_comes_before_one_about_a_peer() -> None:
    victim = Failure(1, 5, "PhaseTimeout: 'step 3': a peer did not come in time")
    assert cause(victim=victim, own=Failure(3, 9, "ValueError: bad"), stopped=Failure(-signal.SIGTERM, 1)) == "own"


def test_else_the_earliest() -> None:
    assert cause(late=Failure(1, 5, "ValueError"), early=Failure(1, 4, "KeyError")) == "early"
