"""The command line of ``elastic-runner launch``: torchrun's, with a few flags and defaults of ours."""

from __future__ import annotations

import argparse
import importlib.util
import re
import signal
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.machinery import PathFinder
from pathlib import Path

import torch.distributed.run as torchrun

from elastic_runner.environment import other_python
from elastic_runner.errors import ConfigError
from elastic_runner.launch.notice import can_be_asked
from elastic_runner.launch.restart import Budgets

MAX_RESTARTS = 5

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Forwarded to the workers, which drain."""

DRAIN_SECONDS = 600
"""Given to workers to finish a step and a save after a signal, before they are killed; torchrun's is 30."""

ONE_NODE = ("1", "1:1")

_LOOPBACK = "127.0.0.1"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """torchrun's options, and those of ours that its group below names."""
    parser = torchrun.get_args_parser()
    parser.prog = "elastic-runner launch"
    ours = parser.add_argument_group("elastic-runner")
    ours.add_argument(
        "--start-by", choices=["fork", "exec"], default="fork",
        help="fork: workers come from a process that has imported torch already. exec: a new interpreter each.",
    )  # fmt: skip
    ours.add_argument(
        "--preload", action="append", default=[], metavar="MODULE",
        help="Import this, too, before workers are forked. It must start no thread and not touch CUDA.",
    )  # fmt: skip
    ours.add_argument(
        "--standby", action="store_true",
        help="Once all workers of the node are in er.Worker's loop, have the next ones ready, forked and their devices "
        "open. That takes the memory of another CUDA context, about 0.5 GB on each GPU. What CUDA and its allocator "
        "read from the environment must be set outside of the script.",
    )  # fmt: skip
    ours.add_argument(
        "--budget", action="append", default=[], metavar="CAUSE=N",
        help="Restarts in a row without progress, by cause "
        f"({', '.join(field.name for field in fields(Budgets))}); --max-restarts is the default of each.",
    )  # fmt: skip
    ours.add_argument(
        "--notice-file", type=Path, metavar="FILE", help="Stop and save, as by SIGUSR1, when this file appears."
    )
    ours.add_argument("--notice-url", metavar="URL", help="The same when this URL, asked every 5 s, answers with 200.")
    ours.add_argument(
        "--health", type=address, metavar="[HOST:]PORT",
        help="Answer GET /live, /ready and /metrics (Prometheus) there; without HOST on this machine alone. Port 0: "
        "one that the system chooses.",
    )  # fmt: skip
    known = vars(parser.parse_args(["script"]))
    defaults = {"max_restarts": MAX_RESTARTS, "signals_to_handle": _signals(), "shutdown_timeout": DRAIN_SECONDS}
    parser.set_defaults(**{name: value for name, value in defaults.items() if name in known})
    options = parser.parse_args(list(arguments))
    if options.run_path:  # a script in a process that is forked: so are workers started here
        options.run_path = options.no_python = options.module = False
    return options


def _signals() -> str:
    """Torch would handle SIGHUP under nohup as well, and the job end with the terminal that it was started from."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return SIGNALS.replace("SIGHUP,", "") if ignored else SIGNALS


def address(text: str) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; an IPv6 address is in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 0xFFFF:
        raise ValueError
    return host.removeprefix("[").removesuffix("]") or _LOOPBACK, int(port)


def budgets(options: argparse.Namespace) -> Budgets:
    """Restarts by cause. Raises ConfigError."""
    known = {field.name for field in fields(Budgets)}
    allowed = {name: options.max_restarts for name in known - {"peer"}}
    for given in options.budget:
        cause, _, number = given.partition("=")
        if cause not in known or not number.isdigit():
            raise ConfigError(f"--budget {given}: it is CAUSE=N, with a cause of {', '.join(sorted(known))}")
        allowed[cause] = int(number)
    return Budgets(**allowed)


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError for what can be seen not to work before anything is started."""
    _check_counts(options)
    _check_standby(options)
    _check_script(options)
    if options.notice_url is not None and not can_be_asked(options.notice_url):
        raise ConfigError(f"--notice-url {options.notice_url}: it is http://HOST/… or https://HOST/…")


def _check_counts(options: argparse.Namespace) -> None:
    """Torch only asserts them, and takes a range that its rendezvous has no use for."""
    nodes = re.fullmatch(r"(\d+)(?::(\d+))?", options.nnodes)
    fewest, most = (int(nodes[1]), int(nodes[2] or nodes[1])) if nodes else (0, 0)
    if not 0 < fewest <= most:
        raise ConfigError(f"--nnodes {options.nnodes}: it is N or MIN:MAX, from 1 node")
    if fewest < most and options.rdzv_backend == "static" and not options.standalone:
        raise ConfigError(
            f"--nnodes {options.nnodes}: torch's static rendezvous waits until all {most} nodes are there; a job "
            "whose nodes come and go needs --rdzv-backend=elastic with an --rdzv-endpoint that every node sees"
        )
    workers = options.nproc_per_node
    if re.fullmatch(r"[+-]?\d+", workers) and int(workers) < 1:
        raise ConfigError(f"--nproc-per-node {workers}: a node has at least 1 worker")
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts}: 0 is the least; there is no restart then")


def _check_standby(options: argparse.Namespace) -> None:
    """There is something to stand by: only forked workers can."""
    if options.standby and (options.start_by != "fork" or options.no_python):
        how = "--no-python" if options.start_by == "fork" else f"--start-by {options.start_by}"
        raise ConfigError(f"--standby is for workers that are started by fork, not with {how}")


def _check_script(options: argparse.Namespace) -> None:
    """It is there. Of a module only the first name: what is below it may come to be when that is imported."""
    script = options.training_script
    if options.no_python or other_python():
        return
    if options.module:
        if not _is_found(script.partition(".")[0]):
            raise ConfigError(f"-m {script}: there is no such module, neither here nor where Python is installed")
        return
    try:
        Path(script).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{script}: there is no such script on {socket.gethostname()}") from None
    except OSError:
        return  # such as a file server's, which may pass


def _is_found(module: str) -> bool:
    """As by ``python -m``, which looks into the working directory first; nothing is imported."""
    with suppress(ValueError):  # one that cannot be looked for is no business of ours
        return bool(PathFinder.find_spec(module, [""]) or importlib.util.find_spec(module))
    return True


def check_port(options: argparse.Namespace) -> None:
    """Raise ConfigError where the port that this node is to host torchrun's static rendezvous at is taken."""
    hosts = options.rdzv_backend == "static" and not options.rdzv_endpoint and str(options.node_rank) == "0"
    if not hosts or options.master_port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(options.master_port)))
        except OSError as error:
            raise ConfigError(
                f"--master-port {options.master_port} of {options.master_addr}: {error.strerror}; choose another one"
            ) from None


def by_itself(options: argparse.Namespace, directory: Path) -> None:
    """Where one node is all there is, and no rendezvous was asked for, have it meet itself in its own directory."""
    default = options.rdzv_backend == "static" and not options.rdzv_endpoint and options.nnodes in ONE_NODE
    if options.standalone or (default and str(options.node_rank) == "0"):
        options.standalone = False
        options.rdzv_backend, options.rdzv_endpoint = "elastic", str(directory / "rendezvous")
        options.rdzv_id, options.local_addr = uuid.uuid4().hex, _LOOPBACK


def logs_within(options: argparse.Namespace, directory: Path) -> None:
    """Where workers write to no files of torch's, it makes a directory for them all the same: have it go with ours."""
    if options.log_dir is None and options.logs_specs is None and options.redirects == options.tee == "0":
        options.log_dir = str(directory / "logs")
