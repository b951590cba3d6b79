"""What a worker tells the launcher on its node, through files in the launcher's private scratch directory.

The exit code alone does not say whose failure came first, nor whether a restart can cure it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How an attempt ended, by the first worker that knew."""

    code: int
    """The documented exit code."""
    message: str
    """Why, in one line."""
    final: bool
    """Whether starting the workers again would be of no use."""


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where the run is, for the launcher to say what a killed worker could not."""

    url: str
    """The run directory."""
    options: dict[str, str]
    """Options of its filesystem."""


def tell(directory: str | None, verdict: Verdict) -> None:
    """Give the verdict, unless another worker of this attempt was first or there is no launcher of ours."""
    if directory is not None:
        with suppress(OSError), Path(directory, "verdict.json").open("x") as file:
            json.dump(asdict(verdict), file)


def read(directory: str) -> Verdict | None:
    """The verdict on the attempt that has ended; None when every worker was killed before it could say."""
    with suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads(Path(directory, "verdict.json").read_text()))
    return None


def clear(directory: str) -> None:
    """Before the next attempt."""
    Path(directory, "verdict.json").unlink(missing_ok=True)


def place(directory: str | None, run: RunPlace) -> None:
    """Say where the run is."""
    if directory is not None:
        Path(directory, "run.json").write_text(json.dumps(asdict(run)))


def read_place(directory: str) -> RunPlace | None:
    """Where the run is; None when no worker got so far."""
    with suppress(OSError, ValueError, TypeError):
        return RunPlace(**json.loads(Path(directory, "run.json").read_text()))
    return None
