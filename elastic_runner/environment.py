"""The only reader of environment variables set by launchers (torchelastic's names)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_runner.errors import ConfigError

CONFIG_FILE = "ELASTIC_RUNNER_CONFIG"
AGENT_DIR = "ELASTIC_RUNNER_AGENT_DIR"
HEARTBEATS = "ELASTIC_RUNNER_HEARTBEATS"
SNAPSHOTS = "ELASTIC_RUNNER_SNAPSHOTS"
TRACEBACK = "ELASTIC_RUNNER_TRACEBACK"
_FLIGHT_RECORDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Where torch dumps what its collectives were at: the first name is torch 2.13's, the other one older."""

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals by which schedulers, agents and people ask a run to stop."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where this process stands, as its launcher told it."""

    rank: int = 0
    """Global rank, 0-based."""
    world_size: int = 1
    """Number of worker processes in the job."""
    local_rank: int = 0
    """Rank among the workers of this node."""
    local_world_size: int = 1
    """Workers on this node."""
    distributed: bool = False
    """Whether a launcher set the variables of ``env://`` rendezvous."""
    uses_agent_store: bool = False
    """Whether an agent hosts the store, which then outlives attempts."""
    run_id: str = "none"
    """The rendezvous id."""
    error_file: str | None = None
    """Where torchelastic wants the first error described."""
    agent_dir: str | None = None
    """Scratch directory of ``elastic-runner launch``, by which worker and launcher find each other."""
    heartbeats: tuple[str, ...] = ()
    """The node's heartbeat records, files by local rank; none where the agent is not ours."""
    snapshots: tuple[tuple[str, ...], ...] = ()
    """The node's memory for snapshots, files by local rank; none where the agent is not ours."""
    config_file: str | None = None
    """TOML file named by the launcher."""
    traceback: bool = False
    """Whether our own errors should print their whole traceback."""


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Parse ``variables`` (default: this process's). Raises ConfigError for a half-set or malformed world."""
    env = os.environ if variables is None else variables
    distributed = bool(env.get("RANK") or env.get("WORLD_SIZE"))
    rank, world, local_rank, local_world = _placement(env) if distributed else (0, 1, 0, 1)
    return Environment(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        distributed=distributed,
        uses_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=env.get("TORCHELASTIC_RUN_ID", "none"),
        error_file=env.get("TORCHELASTIC_ERROR_FILE"),
        agent_dir=env.get(AGENT_DIR),
        heartbeats=tuple(filter(None, env.get(HEARTBEATS, "").split(os.pathsep))),
        snapshots=_by_local_rank(snapshot_files(env), local_world),
        config_file=env.get(CONFIG_FILE),
        traceback=env.get(TRACEBACK, "0") not in ("", "0"),
    )


def snapshot_files(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The node's memory for snapshots, whoever of its workers writes them."""
    env = os.environ if variables is None else variables
    return tuple(filter(None, env.get(SNAPSHOTS, "").split(os.pathsep)))


def flight_recorder(variables: Mapping[str, str] | None = None) -> str | None:
    """Where torch's flight recorder is told to dump: the beginning of the files' names; None when it is not."""
    env = os.environ if variables is None else variables
    return next((env[name] for name in _FLIGHT_RECORDER if env.get(name)), None)


def other_python(variables: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun is told to start workers by another interpreter than its own."""
    env = os.environ if variables is None else variables
    return bool(env.get("PYTHON_EXEC"))


def _placement(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank, local world size; each checked, since a wrong one would train alone or hang."""
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if lacking:
        given = " and ".join(name for name in ("RANK", "WORLD_SIZE") if env.get(name))
        raise ConfigError(f"{given} set but {' and '.join(lacking)} not: start by torchrun, or unset {given}")
    _integer(env, "MASTER_PORT", 0)
    rank, world = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise ConfigError(f"RANK={rank} is not within WORLD_SIZE={world}")
    local_rank = _integer(env, "LOCAL_RANK", 0)
    local_world = _integer(env, "LOCAL_WORLD_SIZE", local_rank + 1)
    if not 0 <= local_rank < local_world:
        raise ConfigError(f"LOCAL_RANK={local_rank} is not within LOCAL_WORLD_SIZE={local_world}")
    return rank, world, local_rank, local_world


def _by_local_rank(files: tuple[str, ...], local_world: int) -> tuple[tuple[str, ...], ...]:
    """Each rank has as many."""
    each = len(files) // local_world
    return tuple(files[rank * each : (rank + 1) * each] for rank in range(local_world)) if each else ()


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not an integer") from None
