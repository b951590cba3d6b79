"""What a worker tells the launcher on its node, through files in the launcher's private scratch directory.

The exit code alone does not say whose failure came first, nor whether a restart can cure it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from elastic_runner.errors import ExitCode, text_of

_VERDICT, _FINISHED, _CONSEQUENCE = "verdict.json", "finished.json", "consequence.json"
_PLACE = "run.json"
_PLACE_BEFORE = "run-before.json"
_PROCESS = "process-"
_LONGEST = 500
"""Characters of a message."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How an attempt ended, by the first worker that knew."""

    code: int
    """The documented exit code."""
    message: str
    """Why, in one line."""
    final: bool
    """Whether starting the workers again would be of no use."""
    asked: bool = True
    """An interruption: whether this node was asked to stop. Where only another one was, the others may go on."""
    consequence: bool = False
    """Whether the worker only knows that it has lost a peer, whose reason is the better one."""
    kind: str = ""
    """Type of the error."""
    rank: int | None = None
    """Whose it is."""
    step: int | None = None
    """The last finished step; None before the loop began."""

    @property
    def no_failure(self) -> bool:
        """Whether all is done, or the job was asked to stop. An interruption that is not final is no such thing."""
        return self.final and self.code in (ExitCode.FINISHED, ExitCode.INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where the run is and how far, for the launcher to say what a killed worker could not."""

    url: str
    """The run directory."""
    options: dict[str, str]
    """Options of its filesystem."""
    attempt: int
    """The attempt that is running."""
    restored: str | None = None
    """Path of the manifest that it started from."""
    saved: str | None = None
    """Path of the newest manifest that it committed."""


def message_of(error: BaseException, rank: int) -> str:
    """Whose the error is and what it says, as one line that can be printed anywhere."""
    said = " ".join(f"rank {rank}: {type(error).__name__}: {text_of(error)}".split()).removesuffix(":")[:_LONGEST]
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in said)


def tell(directory: str | None, verdict: Verdict) -> None:
    """Give the verdict, unless another worker of this attempt was first or there is no launcher of ours."""
    if directory is not None:
        finished = _FINISHED if verdict.code == ExitCode.FINISHED else _VERDICT
        name = _CONSEQUENCE if verdict.consequence else finished
        with suppress(OSError), Path(directory, name).open("x") as file:
            json.dump(asdict(verdict), file)


def read(directory: str) -> Verdict | None:
    """The verdict on the attempt that has ended; None when every worker was killed before it could say.

    An error is heard of after the run was finished as well, but there is nothing left to start again for.
    """
    error, finished, consequence = (_read(Path(directory, name)) for name in (_VERDICT, _FINISHED, _CONSEQUENCE))
    if error is not None and finished is not None:
        return replace(error, final=True, message=f"after the run was finished: {error.message}")
    return error or finished or consequence


def _read(path: Path) -> Verdict | None:
    with suppress(OSError):
        return decode(path.read_text())
    return None


def encode(verdict: Verdict) -> str:
    """As one line of text, for other nodes."""
    return json.dumps(asdict(verdict))


def decode(text: str) -> Verdict | None:
    """What ``encode`` made, without what other versions say besides; None for any other text."""
    known = {field.name for field in fields(Verdict)}
    with suppress(ValueError, TypeError):
        return Verdict(**{name: value for name, value in dict(json.loads(text)).items() if name in known})
    return None


def in_words(text: str) -> str:
    """For people: the message of a verdict that ``encode`` made; any other text as it is."""
    given = decode(text)
    return text if given is None else given.message


def clear(directory: str) -> None:
    """Before the next attempt."""
    with suppress(FileNotFoundError):
        Path(directory, _PLACE).replace(Path(directory, _PLACE_BEFORE))
    names = [_VERDICT, _FINISHED, _CONSEQUENCE, *(f"{_PROCESS}{pid}" for pid in processes(directory))]
    for name in names:
        Path(directory, name).unlink(missing_ok=True)


def be_known(directory: str | None) -> None:
    """Let the launcher know of this process, whatever kills it: it may leave something behind."""
    if directory is not None:
        with suppress(OSError):
            Path(directory, f"{_PROCESS}{os.getpid()}").touch()


def processes(directory: str | Path) -> set[int]:
    """Those that were known here."""
    return {int(path.name.removeprefix(_PROCESS)) for path in Path(directory).glob(f"{_PROCESS}*")}


def place(directory: str | None, run: RunPlace) -> None:
    """Say where the run is; by one worker of a node."""
    if directory is not None:
        new = Path(directory, f"{_PLACE}.new")
        new.write_text(json.dumps(asdict(run)))
        new.replace(Path(directory, _PLACE))


def read_place(directory: str) -> RunPlace | None:
    """Where the run is; None when no worker got so far."""
    return _read_place(Path(directory, _PLACE))


def last_place(directory: str) -> RunPlace | None:
    """The same, or else what was known in attempts before: of the newest that a worker got so far in."""
    return read_place(directory) or _read_place(Path(directory, _PLACE_BEFORE))


def _read_place(path: Path) -> RunPlace | None:
    with suppress(OSError, ValueError, TypeError):
        return RunPlace(**json.loads(path.read_text()))
    return None
