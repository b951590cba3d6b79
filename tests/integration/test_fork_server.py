"""Workers made by fork are what the same command line would have made by exec."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.chaos.driver import launch_command
from elastic_runner.environment import AGENT_DIR
from elastic_runner.launch import fork_server, forking
from elastic_runner.launch.forking import ForkedProcess, ForkServer
from elastic_runner.launch.processes import descendants
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On the server's PYTHONPATH."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def server(modules: Path) -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules))
        server = ForkServer()
    yield server
    server.close()


class Script:
    """A script run by fork, its output in files."""

    def __init__(self, server: ForkServer, directory: Path, modules: Path | None = None) -> None:
        self.server, self.directory, self.modules = server, directory, modules or directory

    def start(
        self, text: str, *arguments: str, env: dict[str, str] | None = None, module: bool = False
    ) -> ForkedProcess:
        path = (self.modules if module else self.directory) / "the_script.py"
        path.write_text(textwrap.dedent(text))
        argv = ["-m", "the_script", *arguments] if module else [str(path), *arguments]
        environment = {**os.environ, **(env or {})}
        files = {name: str(self.directory / name) for name in ("stdout", "stderr")}
        return self.server.spawn([sys.executable, "-u", *argv], environment, **files)

    def run(self, text: str, *arguments: str, **how: Any) -> tuple[int, str, str]:
        code = self.start(text, *arguments, **how).wait(60)
        return code, (self.directory / "stdout").read_text(), (self.directory / "stderr").read_text()


@pytest.fixture
def script(server: ForkServer, tmp_path: Path, modules: Path) -> Script:
    return Script(server, tmp_path, modules)


LOOK = """
    import json, os, signal, sys, threading
    class Mine:
        pass
    if __name__ == "__main__":
        print(json.dumps({
            "argv": sys.argv[1:],
            "name": Mine.__module__,
            "main": sys.modules["__main__"].__dict__.get("Mine") is Mine,
            "env": {k: v for k, v in os.environ.items() if k.startswith("MY_")},
            "path": sys.path[0],
            "session": os.getsid(0) == os.getpid(),
            "stdin": sys.stdin.read(),
            "signals": [signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)],
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3],
        }))
"""


def test_a_script_finds_the_world_as_it_expects_it(script: Script) -> None:
    os.environ["MY_OLD"] = "set after the server began, but given on"
    try:
        code, out, error = script.run(LOOK, "--flag", "x y", env={"MY_NEW": "1"})
    finally:
        del os.environ["MY_OLD"]
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert found["argv"] == ["--flag", "x y"]
    assert found["name"] == "__main__" and found["main"]
    assert found["env"] == {"MY_OLD": "set after the server began, but given on", "MY_NEW": "1"}
    assert found["path"] == str(script.directory)
    assert found["session"] and found["stdin"] == ""
    assert found["signals"] == [True] * 3 and found["interrupt"]
    assert found["fds"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no such thing')", 1, "no such thing\n"),
        ("raise ValueError('mine')", 1, "ValueError: mine\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'last'); print('first', end=' ')", 0, ""),
        ("this is no Python", 1, "SyntaxError: invalid syntax\n"),
    ],
    ids=["exit", "exit message", "raise", "killed", "atexit", "syntax"],
)
def test_how_a_script_ends_is_told(text: str, code: int, error: str, script: Script) -> None:
    found, out, told = script.run(text)
    assert found == code and told.endswith(error)
    if "atexit" in text:
        assert out == "first last\n"


def test_ctrl_c_ends_a_script_without_a_traceback(script: Script) -> None:
    """Case c18: all ranks would print theirs at once. A script that catches it still can."""
    text = """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("caught", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
    """
    assert script.run(text, env={AGENT_DIR: str(script.directory)}) == (-signal.SIGINT, "caught\n", "")


def test_a_module_is_run_like_a_script(script: Script) -> None:
    code, out, _ = script.run(LOOK, "a", module=True)
    assert code == 0 and json.loads(out)["argv"] == ["a"] and json.loads(out)["name"] == "__main__"


def test_forked_workers_draw_different_random_numbers(script: Script) -> None:
    text = "import random, numpy; print(random.random(), numpy.random.random())"
    assert script.run(text)[1] != script.run(text)[1]


def test_loader_processes_work(script: Script) -> None:
    text = """
        import torch
        from torch.utils.data import DataLoader
        for method in ("fork", "spawn"):
            if __name__ == "__main__":
                loader = DataLoader(list(range(4)), num_workers=1, multiprocessing_context=method)
                print([int(x) for x in loader])
    """
    code, out, error = script.run(text)
    assert (code, out) == (0, "[0, 1, 2, 3]\n" * 2), error


def wait_until_written(path: Path) -> str:
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.01)
    return path.read_text()


def test_a_worker_can_be_waited_for_and_killed(script: Script) -> None:
    process = script.start("import time; print('here'); time.sleep(600)")
    wait_until_written(script.directory / "stdout")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM == process.poll()


def test_a_server_with_threads_starts_workers_by_exec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "begins_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(["begins_a_thread"])
    try:
        text = "import sys; print('begins_a_thread' in sys.modules, open('/proc/self/cmdline').read().split(chr(0))[1])"
        assert Script(server, tmp_path).run(text)[:2] == (0, "False -u\n")
    finally:
        server.close()
    assert "threads are running in the fork server" in caplog.text


def test_what_was_asked_for_and_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And no end of the server."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "MODULES", ("of.our.own",))
    (tmp_path / "breaks.py").write_text("raise OSError('no library')")
    for name in ("of.our.own", "no.such", "breaks"):
        fork_server._preload(name)
    assert capfd.readouterr().err == (
        "elastic-runner: --preload no.such cannot be imported: ModuleNotFoundError: No module named 'no'\n"
        "elastic-runner: --preload breaks cannot be imported: OSError: no library\n"
    )


def test_a_killed_server_is_replaced_whenever_it_was_killed(tmp_path: Path) -> None:
    server = ForkServer(fork=False)
    try:
        first = server.spawn(["/bin/sh", "-c", "sleep 600"], dict(os.environ))
        os.kill(server._server.pid, signal.SIGKILL)
        assert server.spawn(["/bin/sh", "-c", "exit 9"], dict(os.environ)).wait(60) == 9
        assert first.wait(60) == -signal.SIGKILL
        while not is_gone(first.pid):
            time.sleep(0.01)
    finally:
        server.close()


def test_what_cannot_be_started_says_why(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no_such_program cannot be started: No such file"):
        server.spawn([str(tmp_path / "no_such_program")], dict(os.environ))
    process = server.spawn(["/bin/sh", "-c", "exit 9"], dict(os.environ))
    assert process.wait(60) == 9


def is_gone(pid: int) -> bool:
    """Also as a zombie: on this machine PID 1 reaps late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("how", ["fork", "exec"])
@pytest.mark.parametrize("victim", ["agent", "server"])
def test_nobody_outlives_a_killed_agent(victim: str, how: str, tmp_path: Path) -> None:
    """Whatever kills it: not the server, not the workers, not what they have started in a session of its own."""
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, time, pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "pathlib.Path(os.environ['RANK'] + '.pid').write_text(f'{os.getpid()} {child.pid}\\n')\n"
        "time.sleep(600)"
    )
    agent = subprocess.Popen(
        launch_command(2, "--max-restarts=0", "--start-by", how, str(script)),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        pids = [int(pid) for rank in range(2) for pid in wait_until_written(tmp_path / f"{rank}.pid").split()]
        family = descendants(agent.pid)
        assert set(pids) < set(family)
        os.kill({"agent": agent.pid, "server": family[0]}[victim], signal.SIGKILL)
        agent.wait(60)
        while not all(is_gone(pid) for pid in family):
            time.sleep(0.01)
    finally:
        kill_all([agent.pid, *family])
        agent.wait()


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_launched_script_that_fails_prints_its_traceback_once(how: str, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise KeyError('the reason')")
    command = [*launch_command(1, "--start-by", how, "--max-restarts", "0"), str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.count("\nKeyError: 'the reason'\n") == result.stderr.count("Traceback") == 1, result.stderr


def test_the_end_of_a_child_that_a_script_forked_is_not_the_worker_s(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, sys\npid = os.fork()\nif not pid:\n    raise KeyError('of the child')\n"
        "os.waitpid(pid, 0)\nsys.exit(9)\n"
    )
    command = [*launch_command(1, "--max-restarts", "0"), str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "KeyError: 'of the child'" in result.stderr
    assert "ended with exit code 9" in result.stdout and "KeyError" not in result.stdout


ASKS_TO_STOP = """
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # as some libraries do
"""
HEARS = """
import os, signal
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ForkServer]]:
    """Servers of short patience that import a module of these lines, and nothing else."""
    monkeypatch.setattr(forking, "MODULES", ())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    servers = []

    def start(lines: str = "", **how: Any) -> ForkServer:
        (tmp_path / "preloaded.py").write_text(lines)
        servers.append(ForkServer(["preloaded"], answering=0.5, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_server_is_deaf_to_signals_from_its_first_moment(quick: Callable[..., ForkServer], tmp_path: Path) -> None:
    """A scheduler sends them to all processes; workers hear them as ever."""
    server = quick(ASKS_TO_STOP)
    first = server._server.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(first, number)
    assert Script(server, tmp_path).run(HEARS)[0] == -signal.SIGUSR1
    os.kill(first, signal.SIGTERM)
    assert server.spawn(["/bin/sh", "-c", "kill -HUP $$"], dict(os.environ)).wait(60) == -signal.SIGHUP
    assert server._server.pid == first
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_stopped_server_is_replaced_when_it_is_needed_and_its_workers_train_on_until_then(
    quick: Callable[..., ForkServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = quick(standby=True)
    worker = Script(server, tmp_path).start("import time; time.sleep(600)")
    os.kill(server._server.pid, signal.SIGSTOP)
    server.prepare([0])
    assert "the fork server has not answered for 0.5 s; the next workers get another one" in caplog.text
    assert worker.poll() is None and not is_gone(worker.pid)
    assert Script(server, tmp_path).run("import sys; sys.exit(9)")[0] == 9
    assert worker.wait(60) == -signal.SIGKILL and is_gone(worker.pid)


def test_the_end_of_a_worker_that_a_stopped_server_does_not_tell_is_known(
    quick: Callable[..., ForkServer], tmp_path: Path
) -> None:
    server = quick()
    worker = Script(server, tmp_path).start("import time; time.sleep(600)")
    os.kill(server._server.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.01)
    os.kill(worker.pid, signal.SIGTERM)
    eventually(lambda: is_gone(worker.pid), "its end")
    assert worker.wait(0.01) == -signal.SIGKILL, "its own is lost"


def test_a_standby_that_cannot_be_forked_is_one_warning(
    quick: Callable[..., ForkServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = """
        import errno, os
        forks = iter([os.fork, os.fork])
        def fork():
            for real in forks:
                return real()
            raise OSError(errno.EAGAIN, "too many processes")
        os.fork = fork
    """
    server, script = quick(textwrap.dedent(fails), standby=True), tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(600)")
    for rank in (0, 1):
        server.spawn([sys.executable, "-u", str(script)], dict(os.environ), local_rank=rank)
    server.prepare([0, 1])
    (said,) = caplog.messages
    assert said == "not every worker has a standby: no process can be forked: too many processes"
