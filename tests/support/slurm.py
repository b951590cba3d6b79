"""A real SLURM: munged, slurmctld and a slurmd on each of some hosts that are namespaces of this machine.

Needs root and Debian's packages slurm-wlm and munge. Everything of it is in one directory; nothing is seen outside.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, running_hosts
from tests.support.waiting import eventually

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "nsenter", "unshare")

_CONF = """\
ClusterName=tests
SlurmctldHost={controller}
SlurmUser=root
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={root}/prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
MessageTimeout=5
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=2
PartitionName=preemptible Nodes=ALL PriorityTier=1 GraceTime=60
"""

_SIZE = "CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000"

_PROLOG = """\
#!/bin/sh
mkdir -p {root}/tmp-$SLURMD_NODENAME
echo export TMPDIR={root}/tmp-$SLURMD_NODENAME
"""

_BOOT = """\
for file in /etc/netns/$0/*; do mount --bind "$file" "/etc/${file##*/}"; done
mount -t tmpfs tmpfs /dev/shm
hostname $0
"$@" &
wait $!
"""
"""A host's first process, which ends with all others on it: own names of hosts, memory and name, then slurmd."""


class Slurm:
    """A cluster of ``count`` nodes, numbered from 1, and its users' commands."""

    def __init__(self, root: Path, hosts: Hosts, count: int) -> None:
        self._root = root
        self._hosts = hosts
        self.nodes = range(1, count + 1)
        self._controller = hosts.on(count + 1)
        self._machines: dict[int, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        conf = str(root / "slurm.conf")
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": conf, "OMP_NUM_THREADS": "1"}
        lines = [f"NodeName={self.name(number)} {_SIZE}" for number in self.nodes]
        text = _CONF.format(root=root, controller=hosts.name(count + 1), nodes="\n".join(lines))
        (root / "slurm.conf").write_text(text)
        (root / "prolog").write_text(_PROLOG.format(root=root))
        (root / "prolog").chmod(0o755)
        (root / "munge.key").write_bytes(os.urandom(128))
        (root / "munge.key").chmod(0o400)

    def start(self) -> None:
        """Until all nodes are idle."""
        root = self._root
        munged = ["munged", "--foreground", "--force", f"--key-file={root}/munge.key"]
        munged += [f"--socket={root}/munge.socket", f"--pid-file={root}/munged.pid", f"--seed-file={root}/munged.seed"]
        self._daemon("munged", munged)
        eventually((root / "munge.socket").exists, "munged", seconds=60)
        self._daemon("slurmctld", [*self._controller, "slurmctld", "-D"])
        for number in self.nodes:
            self.start_node(number)
        eventually(lambda: all(self.state(n) == "idle" for n in self.nodes), "all nodes idle", seconds=60, every=0.1)

    def start_node(self, number: int) -> None:
        """Switch a node on."""
        name = self.name(number)
        machine = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "--pid", "--fork"]
        machine += ["--kill-child=KILL", "--mount-proc", "sh", "-c", _BOOT, name]
        self._machines[number] = self._daemon(f"slurmd-{name}", [*machine, "slurmd", "-D", "-N", name])

    def lose_node(self, number: int) -> None:
        """Switch it off: slurmd and whatever else is on it are killed at once."""
        machine = self._machines.pop(number)
        machine.kill()
        machine.wait()
        eventually(lambda: not self.processes(number), "the end of a node's processes", seconds=60, every=0.1)

    def stop(self) -> None:
        """Whatever was started."""
        for daemon in reversed(self._daemons):  # the nodes, and all on them, before the controller
            daemon.kill()
            daemon.wait()

    def run(self, *command: str | Path, check: bool = True, cwd: Path | None = None) -> str:
        """A user's command; what it says."""
        done = subprocess.run(
            [*self._controller, *map(str, command)],
            env=self.environment, cwd=cwd or self._root, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def state(self, number: int) -> str:
        """A node's, as sinfo says."""
        return self.run("sinfo", "--noheader", "--nodes", self.name(number), "--format=%T", check=False).strip()

    def job(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job."""
        said = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def name(self, number: int) -> str:
        """A node's."""
        return self._hosts.name(number)

    def number(self, name: str) -> int:
        """A node's, by its name."""
        return next(number for number in self.nodes if self.name(number) == name)

    def quiet(self, number: int) -> bool:
        """Whether nothing is left on a node but its own."""
        return {name_of(pid) for pid in self.processes(number)} <= {"unshare", "sh", "slurmd", ""}

    def outside(self, number: int, pid: int) -> int:
        """A process of a node by the id that it has there: the id that it has here."""
        for here in self.processes(number):
            with suppress(OSError):
                status = Path(f"/proc/{here}/status").read_text()
                if re.search(rf"^NSpid:.*\t{pid}$", status, flags=re.MULTILINE):
                    return here
        raise LookupError(f"no process {pid} on node {number}")

    def processes(self, number: int) -> list[int]:
        """All on a node, as seen from outside."""
        said = subprocess.run(
            ["ip", "netns", "pids", self.name(number)], check=True, capture_output=True, text=True, timeout=30
        )
        return [int(pid) for pid in said.stdout.split()]

    def _daemon(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._root / f"{name}.out").open("ab") as log:
            daemon = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._daemons.append(daemon)
        return daemon


def name_of(pid: int) -> str:
    """A process's; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def running_slurm(root: Path, count: int) -> Iterator[Slurm]:
    """A cluster; the test is skipped where there can be none."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)} (Debian: slurm-wlm, munge)")
    with running_hosts(count + 1) as hosts:
        slurm = Slurm(root, hosts, count)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()
