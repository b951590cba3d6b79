"""The command line of the launcher."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args

from elastic_runner.errors import ConfigError
from elastic_runner.launch.options import budgets, by_itself, check, check_port, logs_within, parse
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
    check(parse(["--standby", __file__]))
    check(parse(["--start-by=exec", "--no-python", "s.sh"]))
    for how in ("--start-by exec", "--no-python"):
        with pytest.raises(ConfigError, match=f"--standby is for workers that are started by fork, not with {how}"):
            check(parse(["--standby", *how.split(), "s"]))


STATIC = "torch's static rendezvous waits until all 3 nodes are there; .* needs --rdzv-backend=elastic"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--nproc-per-node=0", "a node has at least 1 worker"),
        ("--nproc-per-node=-2", "a node has at least 1 worker"),
        ("--nnodes=3:1", "it is N or MIN:MAX, from 1 node"),
        ("--nnodes=0", "it is N or MIN:MAX, from 1 node"),
        ("--nnodes=1:2:3", "it is N or MIN:MAX, from 1 node"),
        ("--nnodes=1:3", STATIC),
        ("--nnodes=1:3 --rdzv-endpoint=host:1", STATIC),
        ("--max-restarts=-1", "0 is the least"),
        ("--notice-url=nonsense", "it is http://HOST/… or https://HOST/…"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(flags: str, why: str) -> None:
    """As a wrong command line, code 2, which nobody repeats; torch's assertions are a failure."""
    option, _, value = flags.split()[0].partition("=")
    with pytest.raises(ConfigError, match=f"{option} {value}: {why}"):
        check(parse([*flags.split(), __file__]))


@pytest.mark.parametrize(
    "flags",
    [
        "--nproc-per-node=gpu --nnodes=3 --max-restarts=0",
        "--nnodes=2:2 --notice-url=http://169.254.169.254/latest/meta-data/spot/instance-action",
        "--nnodes=1:3 --rdzv-backend=c10d --rdzv-endpoint=host:1",
        "--nnodes=1:3 --standalone",
    ],
)
def test_what_may_work_is_tried(flags: str) -> None:
    check(parse([*flags.split(), __file__]))


def test_a_script_that_is_not_there_is_a_wrong_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case c02: and no failure of training, twice over. A directory can be a script, and a program is looked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_module.py").touch()
    for there in (["a_module.py"], [str(tmp_path)], ["-m", "a_module"], ["-m", "json.tool"], ["--no-python", "train"]):
        check(parse(there))
    for lacking in ("s.py", "a_module.py/s.py", str(tmp_path / "s.py")):
        with pytest.raises(ConfigError, match=f"{lacking}: there is no such script on "):
            check(parse([lacking]))
    with pytest.raises(ConfigError, match=r"-m no\.such: there is no such module"):
        check(parse(["-m", "no.such"]))
    monkeypatch.setenv("PYTHON_EXEC", "another_python")
    check(parse(["-m", "no.such"]))


def test_torch_s_directory_of_logs_goes_with_ours(tmp_path: Path) -> None:
    """Unless there is something in it for people."""
    options = parse(["s.py"])
    logs_within(options, tmp_path)
    config, _, _ = config_from_args(options)
    assert config.logs_specs is not None and config.logs_specs.root_log_dir == str(tmp_path / "logs")
    for flag in ("--log-dir=mine", "--redirects=3", "--tee=0:1"):
        options = parse([flag, "s.py"])
        before = vars(options).copy()
        logs_within(options, tmp_path)
        assert vars(options) == before


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
