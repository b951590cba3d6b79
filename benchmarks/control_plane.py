"""The control-plane benchmark: many nodes of the rendezvous in one process, over real sockets."""

from __future__ import annotations

import math
import resource
import socket
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import annotated_types
import tyro

from benchmarks.trials import Figures, machine, print_table, write_json
from elastic_runner.launch.rendezvous.epochs import Epochs, Record
from elastic_runner.launch.rendezvous.host import Host
from elastic_runner.launch.rendezvous.member import Member, Place, enter
from elastic_runner.launch.rendezvous.membership import Rules
from elastic_runner.launch.rendezvous.settings import Settings
from elastic_runner.launch.rendezvous.wire import encode, listen
from elastic_runner.storage import LocalStorage

SIZES = (100, 300, 1000)
SETTINGS = Settings(connect=30.0)
"""All by default but for connecting: N nodes that start at once on two cores have to wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The rendezvous with N = 100, 300 and 1,000 simulated nodes: the protocol only, no workers and no torch agent.

    One process holds the host and all nodes: each a real Member with its connection and its thread, so that what is
    measured is N times more work than a node of a real world has to do. One node is a bare connection, which can fall
    silent.

    form_s_N: from the first node's connecting, all starting at once, until all N have been told their rank. The epoch's
    host is up and listening; no last call is waited for, since N is the maximum.

    lose_s_N: one node falls silent for good. From its last sign of life until the other N-1 have all been told their
    ranks in the next round, less the lease (3 s) that a silent node is given: noticing, telling everybody that the
    round is over, everybody's coming back at once, and the next round.

    drop_s_N: the same for a node whose connection closes, as a killed one's does: nothing is subtracted.

    messages_per_node_N: messages that the host received and sent until the world was formed, over N.

    form_slope: exponent of the growth of form_s with N, by least squares over the three sizes: 1 is linear.
    messages_slope: the same of messages. Medians over the trials.
    """

    json: Path | None = None
    """Write the figures to this file, one flat object."""
    trials: Annotated[int, annotated_types.Ge(1)] = 3
    """Trials of each size."""
    sizes: tuple[int, ...] = SIZES
    """How many nodes."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one world showed."""

    form: float
    lose: float
    drop: float
    messages: int


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    wanted = tyro.cli(Arguments, prog="scripts/bench control-plane", args=list(argv))
    _allow_files(4 * max(wanted.sizes) + 500)
    threading.stack_size(1 << 18)
    trials = {size: [_trial(size) for _ in range(wanted.trials)] for size in wanted.sizes}
    figures: Figures = {}
    for size, each in trials.items():
        figures[f"form_s_{size}"] = round(statistics.median(trial.form for trial in each), 3)
        figures[f"lose_s_{size}"] = round(statistics.median(trial.lose for trial in each), 3)
        figures[f"drop_s_{size}"] = round(statistics.median(trial.drop for trial in each), 3)
        figures[f"messages_per_node_{size}"] = round(statistics.median(trial.messages for trial in each) / size, 2)
    if len(wanted.sizes) > 1:
        figures["form_slope"] = _slope({n: statistics.median(t.form for t in each) for n, each in trials.items()})
        figures["messages_slope"] = _slope(
            {n: statistics.median(t.messages for t in each) for n, each in trials.items()}
        )
    columns = ("nodes", "form s", "lose s (less the lease)", "drop s", "messages per node")
    names = ("form_s", "lose_s", "drop_s", "messages_per_node")
    print_table("rendezvous", columns, [(str(n), *(str(figures[f"{name}_{n}"]) for name in names)) for n in trials])
    print(*(f"{name}: {value}" for name, value in figures.items() if name.endswith("slope")), sep="\n")
    if wanted.json is not None:
        write_json(wanted.json, {**figures, "trials": wanted.trials, **machine()})
    return 0


def _trial(size: int) -> Trial:
    with tempfile.TemporaryDirectory(prefix="elastic-runner-bench-") as directory:
        listener = listen()
        port = int(listener.getsockname()[1])
        record = Record(epoch=1, addresses=("127.0.0.1",), port=port, token=uuid.uuid4().hex)
        epochs = Epochs(LocalStorage(directory))
        epochs.open(record)
        rules = SETTINGS.rules(min_nodes=max(size - 2, 1), max_nodes=size)
        host = Host(epochs, record, listener, rules, SETTINGS)
        try:
            return _measure(size, host, record, rules)
        finally:
            host.close()


def _measure(size: int, host: Host, record: Record, rules: Rules) -> Trial:
    with ThreadPoolExecutor(size) as pool:
        members: list[Member] = []

        def start(number: int) -> Place:
            member, _ = enter(record, f"node-{number}", SETTINGS)
            if member is None:
                raise RuntimeError("the host does not answer")
            members.append(member)
            return member.join(None)

        def again(member: Member) -> Place:
            member.wait_over(None)
            return member.join(member.place)

        begun = time.perf_counter()
        places = [pool.submit(start, number) for number in range(size - 1)]
        silent, alive = _bare(record)
        _all(places, 1)
        form = time.perf_counter() - begun
        messages = host.received + host.sent
        places = [pool.submit(again, member) for member in members]
        alive.set()  # its last sign of life is the one that follows
        silent.sendall(encode({"alive": True}))
        begun = time.perf_counter()
        _all(places, 2)
        lose = time.perf_counter() - begun - rules.lease
        silent.close()
        gone = members.pop()
        places = [pool.submit(again, member) for member in members]
        begun = time.perf_counter()
        gone.close()
        _all(places, 3)
        drop = time.perf_counter() - begun
        list(pool.map(Member.close, members))
    return Trial(form=form, lose=lose, drop=drop, messages=messages)


def _all(places: Sequence[object], number: int) -> None:
    for place in places:
        found = place.result(60)  # type: ignore[attr-defined]
        if found.round != number:
            raise RuntimeError(f"round {found.round} instead of {number}: the machine is too busy for this benchmark")


def _bare(record: Record) -> tuple[socket.socket, threading.Event]:
    """A node without a thread of its own: it gives signs of life until the event is set."""
    connection = socket.create_connection(("127.0.0.1", record.port), timeout=30)
    connection.sendall(encode({"hello": record.token, "node": "silent"}) + encode({"join": None, "nodes": None}))
    over = threading.Event()

    def live() -> None:
        while not over.wait(SETTINGS.lease / 3):
            connection.sendall(encode({"alive": True}))

    threading.Thread(target=live, daemon=True).start()
    return connection, over


def _slope(values: dict[int, float]) -> float:
    """The exponent b of value = a * n ** b."""
    xs = [math.log(n) for n in values]
    ys = [math.log(value) for value in values.values()]
    x, y = statistics.mean(xs), statistics.mean(ys)
    return round(sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs), 2)


def _allow_files(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
