"""Agents as processes, by stock torchrun and by our launcher: nodes are lost, frozen and come back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elastic_runner.errors import ExitCode
from tests.support.agents import LAUNCH, Job


def test_workers_nodes_and_the_host_are_lost_and_a_node_comes(tmp_path: Path) -> None:
    with Job(tmp_path, "1:3") as job:
        job.start(3)
        attempt = job.wait_for_world(3)
        os.kill(job.worker(job.others()[0]), signal.SIGKILL)
        attempt = job.wait_for_world(3, after=attempt)
        job.kill(job.others()[0])
        attempt = job.wait_for_world(2, after=attempt)
        job.start()
        attempt = job.wait_for_world(3, after=attempt)
        job.kill(job.host())
        job.wait_for_world(2, after=attempt)
        job.finish(killed=2)
        assert_quiet(job)


@pytest.mark.slow
def test_two_nodes_are_suspended_together_the_host_is_lost_and_one_comes(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2", LAUNCH) as job:
        job.start(2)
        attempt = job.wait_for_world(2)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for agent in job.agents:
                job.signal(agent, number)
            time.sleep(5)  # longer than a lease
        assert job.wait_for_world(2) == attempt, job.logs()
        job.kill(job.host())
        attempt = job.wait_for_world(1, after=attempt)
        job.start()
        job.wait_for_world(2, after=attempt)
        job.finish(killed=1)
        assert_quiet(job)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["host"])  # the other one: tests/chaos/test_hosts.py
def test_a_frozen_node_is_left_behind_and_comes_back(whom: str, tmp_path: Path) -> None:
    with Job(tmp_path, "1:2", LAUNCH) as job:  # torch's agent would wait 30 s for the other's worker to end
        job.start(2)
        attempt = job.wait_for_world(2)
        frozen = job.host() if whom == "host" else job.others()[0]
        job.signal(frozen, signal.SIGSTOP)
        attempt = job.wait_for_world(1, after=attempt)
        job.signal(frozen, signal.SIGCONT)
        job.wait_for_world(2, after=attempt)
        job.finish()
        assert_fenced(job)


@pytest.mark.slow
def test_an_agent_that_is_told_to_end_leaves_the_others_at_work(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        job.start(2)
        attempt = job.wait_for_world(2)
        host = job.host()
        host.send_signal(signal.SIGTERM)
        assert host.wait(timeout=60) not in (0, -signal.SIGABRT), job.logs()
        job.agents.remove(host)
        job.wait_for_world(1, after=attempt)
        job.finish()


@pytest.mark.slow
def test_when_too_few_nodes_are_left_the_others_wait_and_ask_to_be_started_again(tmp_path: Path) -> None:
    with Job(tmp_path, "2", (*LAUNCH, "--rdzv-conf=join_timeout=10")) as job:
        job.start(2)
        job.wait_for_world(2)
        job.kill(job.others()[0])
        assert job.host().wait(timeout=60) == ExitCode.INTERRUPTED, job.logs()
        assert "too few nodes are left" in job.logs()


def assert_quiet(job: Job) -> None:
    """Nothing of ours but a line on each fault; no traceback of an agent, no noise of C++."""
    text = job.logs()
    for noise in ("SIGABRT", "terminate called", "Exception in thread", "Fatal Python error", "TCPStore.cpp"):
        assert noise not in text, text


def assert_fenced(job: Job) -> None:
    """No attempt committed a step after a later one had: two worlds at work would have."""
    last = 0
    for record in sorted(job.records(), key=lambda record: record["time"]):
        assert record["attempt"] >= last, job.records()
        last = record["attempt"]
