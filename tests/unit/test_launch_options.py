"""The command line of the launcher."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args

from elastic_runner.errors import ConfigError
from elastic_runner.launch.options import budgets, by_itself, check_port, check_standby, parse
from elastic_runner.launch.restart import Budgets
from tests.support.handlers import kept_handlers


def test_budgets() -> None:
    assert budgets(parse(["s.py"])) == Budgets()
    many = budgets(parse(["--max-restarts=9", "--budget", "hang=1", "--budget=peer=2", "s.py"]))
    assert many == Budgets(crash=9, hang=1, storage=9, start=9, peer=2)
    for wrong in ("crash", "crash=x", "crash=-1", "fire=3"):
        with pytest.raises(ConfigError, match="it is CAUSE=N, with a cause of crash, hang, peer, start, storage"):
            budgets(parse([f"--budget={wrong}", "s.py"]))


def test_nohup_is_respected() -> None:
    with kept_handlers():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert parse(["s.py"]).signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert parse(["s.py"]).signals_to_handle == "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"


@pytest.mark.parametrize("flags", [[], ["--standalone"], ["--nnodes=1"], ["--nnodes=1:1", "--nproc-per-node=2"]])
def test_one_node_meets_itself(flags: list[str], tmp_path: Path) -> None:
    options = parse([*flags, "s.py"])
    by_itself(options, tmp_path)
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("elastic", str(tmp_path / "rendezvous"))
    assert not options.standalone


@pytest.mark.parametrize(
    "flags",
    [
        ["--nnodes=2"],
        ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=host:29400"],
        ["--rdzv-backend=elastic", "--rdzv-endpoint=s3://b/r"],
        ["--rdzv-endpoint=host:1"],
        ["--node-rank=1"],
    ],
)
def test_what_was_asked_for_stays(flags: list[str], tmp_path: Path) -> None:
    options = parse([*flags, "s.py"])
    before = vars(options).copy()
    by_itself(options, tmp_path)
    assert vars(options) == before


def test_a_busy_port_is_told_before_workers_start() -> None:
    """Case c12: with host and port, and not as a failure of training."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        busy = parse(["--nnodes=2", "--node-rank=0", "--master-addr=here", f"--master-port={port}", "s.py"])
        with pytest.raises(ConfigError, match=f"--master-port {port} of here: Address already in use; choose another"):
            check_port(busy)
        check_port(parse(["--nnodes=2", "--node-rank=1", f"--master-port={port}", "s.py"]))


def test_only_forked_workers_have_standbys() -> None:
    check_standby(parse(["--standby", "s.py"]))
    check_standby(parse(["--start-by=exec", "--no-python", "s.sh"]))
    for how in ("--start-by exec", "--no-python"):
        with pytest.raises(ConfigError, match=f"--standby is for workers that are started by fork, not with {how}"):
            check_standby(parse(["--standby", *how.split(), "s"]))


def test_where_health_is_asked_for() -> None:
    assert parse(["s.py"]).health is None
    assert parse(["--health=8080", "s.py"]).health == ("127.0.0.1", 8080), "on this machine alone"
    assert parse(["--health", "0.0.0.0:0", "s.py"]).health == ("0.0.0.0", 0)
    assert parse(["--health=[::1]:80", "s.py"]).health == ("::1", 80)
    for wrong in ("", "host", "host:", "host:x", "70000"):
        with pytest.raises(SystemExit, match="2"):
            parse([f"--health={wrong}", "s.py"])


def test_run_path_is_a_script_in_a_forked_process_as_all_are() -> None:
    """Torch would start a function with multiprocessing, which the agent knows nothing of."""
    _, command, arguments = config_from_args(parse(["--run-path", "--nproc-per-node=1", "/s.py", "x"]))
    assert isinstance(command, str) and arguments == ["-u", "/s.py", "x"]
