"""What an agent answers when it is asked how it is doing, and that nobody who asks holds it up."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_runner.errors import ConfigError
from elastic_runner.heartbeat import Beat, Figures
from elastic_runner.launch import health_server
from elastic_runner.launch.health import CAUSES, WATCHING, Health
from elastic_runner.launch.health_server import HealthServer
from elastic_runner.observability.metrics import expose


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def beat(step: int, *, rank: int = 0, phase: str = "step", at: float = 1000.0, **figures: Any) -> Beat:
    return Beat(
        number=1, pid=1, rank=rank, attempt=1, step=step, progress=0, since=at, limit=60.0, learned=False, phase=phase,
        at=at, figures=Figures(**figures),
    )  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock)


def test_live_until_the_loop_is_late(health: Health, clock: Clock) -> None:
    assert health.live().yes, "starting takes as long as it takes"
    health.doing(WATCHING, within=30)
    clock.now += 29
    assert health.live().yes
    clock.now += 2
    assert not health.live().yes
    assert health.live().why == "watching the workers: no turn for 31 s, 30 s are allowed"
    health.doing(WATCHING, within=30)
    assert health.live().yes


def test_ready_once_every_worker_is_in_its_loop(health: Health) -> None:
    assert (health.ready().yes, health.ready().why) == (False, "starting")
    beats = {0: beat(-1, phase="setup"), 1: None}
    health.begin(1, 4, lambda: beats)
    health.doing(WATCHING, within=30)
    assert health.ready().why == "rank 0 is in phase setup, before its first step"
    beats[0] = beat(0)
    assert health.ready().why == "local rank 1 has given no sign of life"
    beats[1] = beat(0, rank=3)
    assert (health.ready().yes, health.ready().why) == (True, "2 workers in their loop")
    health.doing("asked to stop: the workers save", within=600)
    assert (health.ready().yes, health.ready().why) == (False, "asked to stop: the workers save")


def test_sums_go_on_over_attempts_and_a_step_counts_for_goodput_once(health: Health, clock: Clock) -> None:
    health.doing(WATCHING, within=30)
    # Eleven steps, the first of which is not timed; two saves, of which one failed; then a crash.
    figures = {"steps": 11, "samples": 110, "step_seconds": 10.0, "last_rate": 9.0}
    saves = {"saves": 1, "saves_failed": 1, "save_seconds": 2.0, "save_stall": 0.5, "saved_at": 1004.0}
    first = {1: beat(11, rank=1), 0: beat(11, **figures, **saves)}
    health.begin(1, 2, lambda: first)
    clock.now += 20
    before = health.metrics()
    assert (before.ready, before.attempt, before.world_size, before.step) == (True, 1, 2, 11)
    assert (before.samples_per_second, before.goodput, before.checkpoint_age) == (9.0, 0.5, 16.0)
    assert before.heartbeat_ages == {0: 20.0, 1: 20.0}
    health.end("crash")
    between = health.metrics()
    assert (between.ready, between.world_size, between.step, between.heartbeat_ages) == (False, 0, 11, {})
    # Back to step 5: the untimed 6, five steps again, four new ones.
    second = {0: beat(15, steps=10, samples=100, step_seconds=18.0, save_stall=0.25)}
    health.begin(2, 1, lambda: second)
    clock.now += 20
    after = health.metrics()
    assert (after.attempt, after.world_size, after.step, after.steps, after.samples) == (2, 1, 15, 21, 210)
    assert after.goodput == pytest.approx((10.0 + 18.0 * 4 / 9) / 40)
    assert (after.saves, after.saves_failed, after.save_seconds, after.save_stall) == (1, 1, 2.0, 0.75)
    assert after.checkpoint_age == 36.0
    assert after.restarts == {**dict.fromkeys(CAUSES, 0), "crash": 1}


def test_before_a_first_step_nothing_is_claimed(health: Health) -> None:
    nothing = health.metrics()
    assert (nothing.step, nothing.checkpoint_age, nothing.goodput) == (None, None, 0.0)
    health.begin(1, 1, lambda: {0: beat(-1, phase="setup")})
    assert health.metrics().step is None


def test_prometheus_reads_what_is_exposed(health: Health, clock: Clock) -> None:
    health.begin(3, 8, lambda: {0: beat(7, rank=4, steps=7, samples=70)})
    health.doing(WATCHING, within=30)
    clock.now += 5
    families = {f.name: f for f in text_string_to_metric_families(expose(health.metrics()).decode())}
    values = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
    assert all(name.startswith("elastic_runner_") and family.documentation for name, family in families.items())
    assert values[("elastic_runner_step",)] == 7
    assert values[("elastic_runner_samples_total",)] == 70
    assert values[("elastic_runner_world_size",)] == 8
    assert values[("elastic_runner_heartbeat_age_seconds", "4")] == 5
    assert {key[1] for key in values if key[0] == "elastic_runner_restarts_total"} == set(CAUSES)
    assert "elastic_runner_checkpoint_age_seconds" not in {name for name, *_ in values}, "there is none yet"
    assert {families[f"elastic_runner_{name}"].type for name in ("restarts", "steps", "saves_failed")} == {"counter"}


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_it_answers_although_clients_are_silent(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_server._Handler, "timeout", 0.5)
    server = HealthServer(health, "127.0.0.1", 0)
    place = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        with ExitStack() as silent:
            for _ in range(health_server._AT_ONCE - 1):
                silent.enter_context(socket.create_connection(place))
            assert ask(f"{server.url}/live") == (200, "starting\n")
            for _ in range(health_server._AT_ONCE):  # more than there is room for
                silent.enter_context(socket.create_connection(place))
            with pytest.raises(OSError):
                ask(f"{server.url}/live")
        with socket.create_connection(place) as waits:
            waits.settimeout(10)
            assert waits.recv(1) == b"", "a silent client is sent away"
        assert ask(f"{server.url}/ready") == (503, "starting\n")
        assert ask(f"{server.url}/else") == (404, "there are /live, /ready and /metrics\n")
        with pytest.raises(ConfigError, match=f"--health 127.0.0.1:{place[1]}: Address already in use"):
            HealthServer(health, *place)
    finally:
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)
