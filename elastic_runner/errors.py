"""The error tree. Each class fixes the exit code and whether a restart can cure it.

::

    ElasticRunnerError                 1  restartable
    ├── ConfigError                    2  not restartable   the command line, a file or an argument is wrong
    ├── ProgramError                   3  not restartable   the training program must be changed
    │   ├── ModelError                                      DDP/FSDP options do not fit the model
    │   ├── LoopError                                       the step protocol was not followed
    │   ├── NonFiniteError                                  the loss or the gradient is not finite
    │   ├── ReplayDiverged                                  a step done again came to something else
    │   └── StateError                                      a state cannot be saved as data
    ├── SubmitError                    1  restartable       a scheduler did not take the job
    ├── SetupError                     1  restartable       the process group did not come up
    ├── PeerLost                       1  restartable       a peer left in the middle of a collective
    ├── PhaseTimeout                   1  restartable       a named phase passed its deadline
    ├── ReplicasDiffer                 1  restartable       ranks have other parameters than their replicas
    ├── StorageError                   1  restartable
    │   ├── NotFound
    │   ├── AlreadyExists
    │   ├── AccessDenied               3  not restartable
    │   ├── StorageFull                1  not restartable   by us; a scheduler may find room later
    │   └── StorageTimeout
    ├── CheckpointError                1  restartable
    │   ├── SaveFailed                                      a rank could not write; every rank raises the same
    │   ├── Damaged                                         bytes are not those that were written
    │   ├── NotData                    3  not restartable   a file would run code when loaded; refused
    │   ├── Mismatch                   3  not restartable   the state does not fit the model; names the keys
    │   ├── Fenced                 3  not restartable   a newer attempt has taken over this run
    │   └── NoUsableCheckpoint         3  not restartable   checkpoints exist and none can be used
    └── Interrupted                   75  not restartable   by us: asked to stop; saved; start me again
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum

_PEER_GONE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Connection refused")


class ExitCode(IntEnum):
    """What the command line exits with; schedulers may act on it."""

    FINISHED = 0
    """The run reached its target."""
    FAILED = 1
    """An error that a restart may cure outlived the restart budget."""
    USAGE = 2
    """The command line or the configuration is wrong; nothing was started."""
    DO_NOT_RETRY = 3
    """The program, its model or its checkpoints must be changed first."""
    UNHEALTHY_NODE = 69
    """This node needs attention (EX_UNAVAILABLE): start the same command on another one."""
    INTERRUPTED = 75
    """Asked to stop (EX_TEMPFAIL): saved where there was time; start the same command again."""


class ElasticRunnerError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ExitCode = ExitCode.FAILED
    restartable: bool = True


class ConfigError(ElasticRunnerError):
    """The configuration cannot work; the message says which field to change."""

    exit_code = ExitCode.USAGE
    restartable = False


class ProgramError(ElasticRunnerError):
    """The training program must be changed; a restart would fail the same way."""

    exit_code = ExitCode.DO_NOT_RETRY
    restartable = False


class ModelError(ProgramError):
    """A DDP or FSDP option does not fit the model."""


class LoopError(ProgramError):
    """The protocol of ``worker.steps`` was not followed."""


class NonFiniteError(ProgramError):
    """The loss or the gradient is not finite."""


class ReplayDiverged(ProgramError):
    """A step that was done again after a fault came to something else (``training.replay`` = "stop")."""


class StateError(ProgramError):
    """A state holds something that is not plain data."""


class SubmitError(ElasticRunnerError):
    """A scheduler did not take the job; the message is its own."""


class SetupError(ElasticRunnerError):
    """The process group did not come up."""


class PeerLost(ElasticRunnerError):
    """A peer went away, so the collective named in the message cannot end."""


class PhaseTimeout(ElasticRunnerError):
    """A named phase passed its deadline."""


class ReplicasDiffer(ElasticRunnerError):
    """Parameters are not what they are on the ranks with the same ones; the run goes back to where they were."""


class StorageError(ElasticRunnerError):
    """A storage operation failed."""


class NotFound(StorageError):
    """No such object."""


class AlreadyExists(StorageError):
    """An exclusive create found the object there."""


class AccessDenied(StorageError):
    """The storage refuses access; credentials or permissions must change."""

    exit_code = ExitCode.DO_NOT_RETRY
    restartable = False


class StorageFull(StorageError):
    """No space, quota or file-size limit is left."""

    restartable = False


class StorageTimeout(StorageError):
    """The storage did not answer within ``timeouts.storage``."""


class CheckpointError(ElasticRunnerError):
    """Saving, selecting or loading a checkpoint failed."""


class SaveFailed(CheckpointError):
    """At least one rank could not write; raised alike on every rank."""


class Damaged(CheckpointError):
    """A file is missing, short, or has other bytes than were written."""


class NotData(CheckpointError):
    """Loading the file would run code from it; it was refused, not loaded."""

    exit_code = ExitCode.DO_NOT_RETRY
    restartable = False


class Mismatch(CheckpointError):
    """The checkpoint does not fit the state.

    Attributes: ``missing`` (wanted, not saved), ``extra`` (saved, not wanted), ``misshapen`` (described).
    """

    exit_code = ExitCode.DO_NOT_RETRY
    restartable = False

    def __init__(
        self,
        message: str,
        missing: Iterable[str] = (),
        extra: Iterable[str] = (),
        misshapen: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.extra = tuple(extra)
        self.misshapen = tuple(misshapen)

    def __reduce__(self) -> tuple[type[Mismatch], tuple[object, ...]]:
        return type(self), (str(self), self.missing, self.extra, self.misshapen)


class Fenced(CheckpointError):
    """A newer attempt owns the run; this process must not commit, nor take the run back by a restart."""

    exit_code = ExitCode.DO_NOT_RETRY
    restartable = False


class NoUsableCheckpoint(CheckpointError):
    """Committed checkpoints exist, but none can be used."""

    exit_code = ExitCode.DO_NOT_RETRY
    restartable = False


class Interrupted(ElasticRunnerError):
    """The run was asked to stop, saved its state and can be started again."""

    exit_code = ExitCode.INTERRUPTED
    restartable = False


def names(kind: type[ElasticRunnerError]) -> Iterator[str]:
    """The name of a class of errors, and of those below it."""
    yield kind.__name__
    for below in kind.__subclasses__():
        yield from names(below)


def is_consequence(error: BaseException) -> bool:
    """Whether the error only says that a peer is gone or does not come."""
    return isinstance(error, (PeerLost, PhaseTimeout)) or (
        isinstance(error, RuntimeError) and _PEER_GONE.search(text_of(error)) is not None
    )


def text_of(error: BaseException) -> str:
    """What the error says; nothing where it fails at that, too."""
    try:
        return str(error)
    except Exception:
        return ""
