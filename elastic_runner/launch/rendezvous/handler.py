"""torchrun's rendezvous handler ``elastic``: ``--rdzv-backend=elastic --rdzv-endpoint=<fsspec URL> --rdzv-id=NAME``.

Found by torchrun through the entry-point group ``torchrun.handlers``; read in torch 2.13: ``rendezvous.registry``.

``--rdzv-conf`` takes the seconds of ``settings.Settings`` and, after ``storage.``, options of the endpoint's file
system: ``--rdzv-conf=lease=5,storage.client_kwargs.endpoint_url=https://s3.example``. Secrets are refused there; S3
finds them in ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY`` or ``~/.aws``, like every AWS client.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_runner import paths, verdict
from elastic_runner.errors import ConfigError, StorageError
from elastic_runner.launch.rendezvous import election
from elastic_runner.launch.rendezvous.epochs import Epochs, Record
from elastic_runner.launch.rendezvous.failures import newest
from elastic_runner.launch.rendezvous.host import Host
from elastic_runner.launch.rendezvous.member import Closed, EpochLost, Finished, Member, NoWorld, Place, enter
from elastic_runner.launch.rendezvous.membership import Rules
from elastic_runner.launch.rendezvous.round_store import RoundStore
from elastic_runner.launch.rendezvous.settings import Settings, read_settings, storage_options
from elastic_runner.launch.rendezvous.wire import listen
from elastic_runner.storage import open_storage

log = logging.getLogger(__name__)

BACKEND = "elastic"
_STORAGE_SECONDS = 30.0
"""Deadline of one operation on the storage, after which it is tried again."""
_FIRST_PAUSE = 0.05
"""Seconds between the first looks at the storage while another node may be opening an epoch."""


class JobEnded(RendezvousClosedError):
    """Another node has ended the job; ``reason``: what it said."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the job has ended: {verdict.in_words(reason)}")
        self.reason = reason


def get_handler() -> Any:
    """What torch's registry calls: it wants a function that makes handlers."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """A handler for torchrun. Raises ConfigError for an endpoint or a setting that cannot work."""
    if not parameters.endpoint:
        raise ConfigError("--rdzv-endpoint must name a directory or fsspec URL that every node sees, such as s3://…")
    name = re.sub(r"[^\w.-]", "_", parameters.run_id)
    settings = read_settings(parameters.config)
    url = paths.join(parameters.endpoint, name)
    storage = open_storage(url, storage_options(parameters.config), seconds=_STORAGE_SECONDS)
    return ElasticRendezvous(
        Epochs(storage),
        settings.rules(min_nodes=parameters.min_nodes, max_nodes=parameters.max_nodes),
        settings,
        run_id=parameters.run_id,
        address=parameters.local_addr,
    )


class ElasticRendezvous(RendezvousHandler):
    """One node's way into the world. No node is needed: whoever hosts the store can be lost."""

    def __init__(
        self, epochs: Epochs, rules: Rules, settings: Settings, *, run_id: str, address: str | None = None
    ) -> None:
        self.node = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._epochs = epochs
        self._rules = rules
        self._settings = settings
        self._run_id = run_id
        self._addresses = own_addresses(address)
        self._host: Host | None = None
        self._member: Member | None = None
        self._place: Place | None = None
        self._told: Callable[[], None] | None = None
        self._epoch = 0
        self._failures: dict[int, str] = {}
        """Of attempts, by their numbers, in all epochs that this node has been in."""
        self._not_before = 0.0
        self._closed = self._gone = False
        # torch's agent does not shut down after a signal; the others are not to wait until this node lapses.
        atexit.register(self.leave, done=False)

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers find each other in the round's store, which no earlier world has used."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a place in the next world. Raises RendezvousClosedError, RendezvousTimeoutError.

        Raises SystemExit(0) when the job is complete before this node got a place in it: torch 2.13 has an exception
        for that (RendezvousGracefulExitError), over which its own launcher fails.
        """
        end = time.monotonic() + self._settings.join_timeout
        self._say_why()
        while True:
            if self._member is None:
                self._member = self._enter(end)
                self._epoch = self._member.epoch
                for attempt, how in newest(self._failures).items():
                    if attempt not in self._member.known:
                        self._member.tell_failure(attempt, how)
                if self._told is not None:
                    self._member.tell(self._told)
            if self._gone:  # meanwhile, by another thread
                self.leave(done=False)
                raise RendezvousClosedError("this node has left")
            try:
                self._place = self._member.join(self._place)
                return self._info(self._member, self._place)
            except EpochLost as lost:
                log.info("epoch %d: %s", self._member.epoch, lost)
                self._leave_epoch()
            except Closed as closed:
                raise JobEnded(str(closed)) from closed
            except Finished:
                log.info("the job is complete; this node was not needed")
                raise SystemExit(0) from None
            except NoWorld as error:
                raise RendezvousTimeoutError(
                    f"{error}; {self._rules.min_nodes} or more must start with this --rdzv-endpoint and --rdzv-id"
                ) from error

    def _say_why(self) -> None:
        """A line for people on why the round before is over, unless this node's own workers have ended, or the job."""
        if self._member is not None and self._member.over is not None and self._member.closed is None:
            log.warning("rendezvous: %s; waiting for a place in the next round", self._member.over)

    def num_nodes_waiting(self) -> int:
        """torch's agent asks whether to go into another rendezvous: 1 when this round is over, for whatever reason."""
        return int(self._member is not None and self._member.over is not None)

    def wait_over(self, seconds: float | None = None) -> str | None:
        """For an agent that waits instead of asking: why this round is over; None when it is not, after so long."""
        return None if self._member is None else self._member.wait_over(seconds)

    def tell(self, told: Callable[[], None]) -> None:
        """Call this when a round is over, from another thread."""
        self._told = told

    @property
    def over(self) -> str | None:
        """Why the present round is over, for people; None while it is not."""
        return None if self._member is None else self._member.over

    @property
    def attempt(self) -> int:
        """How many worlds the job has had: the same on all nodes; 0 before the first."""
        return 0 if self._place is None else self._place.attempt

    def failures(self, end: str) -> list[str]:
        """How the job's attempts have ended on any node, oldest first, the present one by ``end`` unless a node has
        said so already. The others hear of it before the next round."""
        if self._member is not None:
            self._member.tell_failure(self.attempt, end)
            self._failures |= self._member.failures
        else:
            self._failures.setdefault(self.attempt, end)
        return [self._failures[attempt] for attempt in sorted(self._failures)]

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._closed

    def set_closed(self) -> None:
        """End the job for all nodes."""
        self.end_job(f"{self.node} has ended it")

    def end_job(self, reason: str) -> str:
        """End the job for all nodes, and tell them why; returns what they are told, which another node may have said
        first."""
        if not self._closed and self._member is not None:
            reason = self._member.end_job(reason)
        self._closed = True
        return reason

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """torch's agent is done. When it is by an error, the job is over for all nodes; torch does not tell here.

        A node that was signalled does not call this, and only goes.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, (type(None), SystemExit, RendezvousError)):  # without a place it has ended nothing
            self.set_closed()
        self.leave(done=error is None)
        return True

    def leave(self, *, done: bool, unhealthy: bool = False) -> None:
        """Go; the others go on. ``done``: with the work complete; ``unhealthy``: as a node that is lost."""
        self._gone = True
        atexit.unregister(self.leave)
        if self._member is not None:
            self._member.leave(done=done, unhealthy=unhealthy)
            self._member = None
        if self._host is not None:
            self._host.close(wait=done, lost=unhealthy)
            self._host = None

    def _enter(self, end: float) -> Member:
        """Join the newest epoch, or open one. Raises RendezvousClosedError, RendezvousTimeoutError after ``end``."""
        view = election.View()
        trouble: StorageError | None = None
        tries = itertools.count()
        pause = _FIRST_PAUSE
        while time.monotonic() < end:
            if self._gone:
                raise RendezvousClosedError("this node has left")
            try:
                now = time.monotonic()  # before the look: this process may be frozen after it
                record, view = self._look(view)
                decision = election.decide(view, now, patience=self._settings.patience, not_before=self._not_before)
                if isinstance(decision, election.Open):
                    self._open(decision.epoch, record)
                elif isinstance(decision, election.Connect) and record is not None:
                    member, refused = enter(record, self.node, self._settings, first=next(tries))
                    if member is not None:
                        return member
                    view = replace(view, reach="refused" if refused else "silent")
                elif isinstance(decision, election.Wait):
                    time.sleep(max(min(decision.until - time.monotonic(), pause), _FIRST_PAUSE))
                    pause = min(2 * pause, self._settings.beat / 2)
                trouble = None
            except StorageError as error:
                if trouble is None:
                    log.warning("rendezvous: trouble with %s: %s", self._epochs.url, error)
                trouble = error
                time.sleep(self._settings.beat)
        why = f"trouble with the storage: {trouble}" if trouble else "no host could be reached or elected"
        raise RendezvousTimeoutError(f"{why} ({self._epochs.url}, {self._settings.join_timeout:g} s)")

    def _look(self, view: election.View) -> tuple[Record | None, election.View]:
        record, ended = self._epochs.newest()
        epoch = record.epoch if record else 0
        if ended and epoch and epoch == self._epoch:
            closed = self._epochs.closed(epoch)
            if closed is not None:
                raise JobEnded(closed)
        beat = None if ended else self._epochs.beat(epoch)
        return record, election.look(view, time.monotonic(), epoch=epoch, ended=ended, beat=beat)

    def _open(self, epoch: int, former: Record | None) -> None:
        deposed = self._deposed(former)
        listener = listen()
        port = int(listener.getsockname()[1])
        record = Record(epoch=epoch, node=self.node, addresses=self._addresses, port=port, token=uuid.uuid4().hex)
        if not self._epochs.open(record):
            listener.close()
            return
        log.info("this node hosts epoch %d of %s", epoch, self._epochs.url)
        if self._host is not None:
            self._host.close()
        self._host = Host(self._epochs, record, listener, self._rules, self._settings, deposed)
        self._epochs.forget(epoch)

    def _deposed(self, former: Record | None) -> str | None:
        """The former epoch's host, if it was lost. Who opens the next one after its own was not: its peers were."""
        if former is None or former.node in ("", self.node) or not self._epochs.lost(former.epoch):
            return None
        return former.node

    def _leave_epoch(self) -> None:
        if self._member is not None:
            self._failures |= self._member.failures
            if self._place is not None and self._member.host_left:
                self._place = replace(self._place, left=True)
            self._member.close()
            self._member = None
        now = time.monotonic()
        losses = {} if self._place is None else self._place.losses
        if self._host is not None or self._rules.backoff.unsteady(losses, self.node, now):
            # Who has lost most of the others is more likely cut off than they: let them go first.
            self._not_before = now + 2 * self._settings.patience
        if self._host is not None:
            self._host.close(lost=not self._gone)
            self._host = None

    def _info(self, member: Member, place: Place) -> RendezvousInfo:
        log.info("epoch %d, round %d: node %d of %d", member.epoch, place.round, place.rank, place.nodes)
        bootstrap = RendezvousStoreInfo(member.address, place.port)
        return RendezvousInfo(RoundStore(member, place), place.rank, place.nodes, bootstrap)


def own_addresses(given: str | None) -> tuple[str, ...]:
    """Under what others may find this machine, the likeliest first."""
    if given:
        return (given,)
    names = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks the routing table which address would be used
        names.append(probe.getsockname()[0])
    names += [socket.getfqdn(), socket.gethostname()]
    if all(_only_here(name) for name in names):
        names.append("127.0.0.1")
    return tuple(dict.fromkeys(names))


def _only_here(name: str) -> bool:
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return True
