"""The command line of ``elastic-runner launch``: torchrun's, with a few flags and defaults of ours."""

from __future__ import annotations

import argparse
import signal
import socket
import uuid
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch.distributed.run as torchrun

from elastic_runner.errors import ConfigError
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


def check_standby(options: argparse.Namespace) -> None:
    """Raise ConfigError where there is nothing to stand by: only forked workers can."""
    if options.standby and (options.start_by != "fork" or options.no_python):
        how = "--no-python" if options.start_by == "fork" else f"--start-by {options.start_by}"
        raise ConfigError(f"--standby is for workers that are started by fork, not with {how}")


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
