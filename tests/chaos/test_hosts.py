"""Three hosts, one of them cut off: the others go on, and it comes back when it is healed. At default settings."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Literal

import pytest

from tests.support.agents import LAUNCH, TORCHRUN, Job
from tests.support.hosts import running_hosts

pytestmark = pytest.mark.slow

BOUND = 10.0
"""Seconds until the others go on; twice that is allowed here, where the machine does other things, too."""


@pytest.mark.parametrize(
    ("fault", "whom"),
    [("cut", "other"), ("unplug", "other"), ("freeze", "other")],
    ids=["cut", "link down", "frozen"],
)
def test_the_others_go_on_and_it_comes_back(
    fault: Literal["cut", "unplug", "freeze"], whom: str, tmp_path: Path
) -> None:
    with running_hosts(3) as hosts, Job(tmp_path, "2:3", LAUNCH) as job:
        agents = {number: job.start(within=hosts.on(number)) for number in (1, 2, 3)}
        attempt = job.wait_for_world(3)
        target = job.host() if whom == "host" else job.others()[0]
        (number,) = [number for number, agent in agents.items() if agent is target]
        begun = time.time()
        if fault == "freeze":
            job.signal(target, signal.SIGSTOP)
        else:
            (hosts.cut if fault == "cut" else hosts.unplug)(number)
        attempt = job.wait_for_world(2, after=attempt)
        took = min(record["time"] for record in job.records() if record["attempt"] == attempt) - begun
        if fault == "freeze":
            job.signal(target, signal.SIGCONT)
        else:
            (hosts.heal if fault == "cut" else hosts.plug)(number)
        job.wait_for_world(3, after=attempt)
        job.finish()
        print(f"{fault} of {whom}: the others went on after {took:.1f} s")
        assert took < 2 * BOUND
        assert_one_world(job)


@pytest.mark.parametrize(
    ("launcher", "ending"),
    [(LAUNCH, 0.0), (TORCHRUN, 30.0)],  # torch's agent waits so long for workers that are stuck in a collective
    ids=["launch", "torchrun"],
)
def test_the_host_is_cut_off_and_healed_and_another_one_is_killed(
    launcher: tuple[str, ...], ending: float, tmp_path: Path
) -> None:
    with running_hosts(3) as hosts, Job(tmp_path, "2:3", launcher) as job:
        agents = {number: job.start(within=hosts.on(number)) for number in (1, 2, 3)}
        attempt = job.wait_for_world(3)
        host = job.host()
        (number,) = [number for number, agent in agents.items() if agent is host]
        begun = time.time()
        hosts.cut(number)
        attempt = job.wait_for_world(2, after=attempt)
        took = min(record["time"] for record in job.records() if record["attempt"] == attempt) - begun
        hosts.heal(number)
        attempt = job.wait_for_world(3, after=attempt)
        job.kill(job.host())
        job.wait_for_world(2, after=attempt)
        job.finish(killed=1)
        print(f"the host cut off: the others went on after {took:.1f} s")
        assert took < 2 * BOUND + ending
        assert_one_world(job)


def assert_one_world(job: Job) -> None:
    """No attempt committed a step after a later one had."""
    attempts = [record["attempt"] for record in sorted(job.records(), key=lambda record: record["time"])]
    assert attempts == sorted(attempts), "two worlds were at work"
