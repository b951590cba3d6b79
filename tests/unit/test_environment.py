"""What launchers say to a worker."""

from __future__ import annotations

import pytest

from elastic_runner.environment import Environment, read_environment
from elastic_runner.errors import ConfigError

WORLD = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
NODE = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_without_a_launcher_the_world_is_one() -> None:
    assert read_environment({"PATH": "/bin"}) == Environment()


def test_a_world_is_read() -> None:
    env = read_environment({**WORLD, **NODE, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (3, 4, 1, 2)
    assert env.distributed and env.uses_agent_store and env.run_id == "job"


def test_empty_values_are_unset_ones() -> None:
    assert read_environment({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}) == Environment()


@pytest.mark.parametrize("missing", WORLD)
def test_a_half_set_world_is_refused(missing: str) -> None:
    """Without WORLD_SIZE each rank would train alone, all in one run directory."""
    rest = {name: value for name, value in WORLD.items() if name != missing}
    with pytest.raises(ConfigError, match=missing):
        read_environment(rest)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "three"),
        ("WORLD_SIZE", "4.0"),
        ("MASTER_PORT", "http"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_WORLD_SIZE", "x"),
        ("RANK", "4"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "2"),
    ],
)
def test_malformed_values_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='?{value}"):
        read_environment({**WORLD, **NODE, name: value})


def test_local_values_without_a_world_count_for_nothing() -> None:
    """Some cluster images set them for every shell."""
    assert read_environment({"LOCAL_RANK": "5"}).local_rank == 0


@pytest.mark.parametrize(("text", "wanted"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_traceback_switch(text: str, wanted: bool) -> None:
    assert read_environment({"ELASTIC_RUNNER_TRACEBACK": text}).traceback is wanted
