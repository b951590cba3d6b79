"""RunPaths: every name inside a run directory, in one place. Names are relative, with '/' on any storage."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

SUMMARY = "summary.json"
SAMPLE = "sample.txt"
ATTEMPTS = "attempts"
LEDGER = "ledger"
CHECKPOINTS = "checkpoints"
EVIDENCE = "evidence"
RUN = "run.json"
TRACKERS = "trackers"
TENSORBOARD = "tensorboard"

_ATTEMPT = re.compile(r"^(\d{6})\.json$")
_STEP = re.compile(r"^step-(\d+)$")
_MANIFEST = re.compile(r"^manifest-(\d{6})\.json$")
_DATA = re.compile(r"^data-(\d{6})$")
_MARK = re.compile(r"^(pinned|suspect|reading)-(\d{6})(?:-(\d+)(?:-\w+)?)?\.json$")
_EPOCH = re.compile(r"^(\d{6})\.json$")
_END = re.compile(r"^(\d{6})-end\.json$")


def join(url: str, *names: str) -> str:
    """Join below a URL or path without touching its scheme (``s3://`` stays ``s3://``)."""
    return "/".join([url.rstrip("/") or "/", *names])


def attempt_record(attempt: int) -> str:
    """The record that an attempt creates, exclusively, to own its number."""
    return f"{ATTEMPTS}/{attempt:06d}.json"


def attempt_number(name: str) -> int | None:
    """The attempt that a file name in ``attempts/`` stands for."""
    match = _ATTEMPT.match(name)
    return int(match.group(1)) if match else None


def attempt_end(attempt: int) -> str:
    """How an attempt ended, when it failed: written by the first rank that had the error."""
    return f"{ATTEMPTS}/{attempt:06d}-end.json"


def ended_attempt(name: str) -> int | None:
    """The attempt whose end a file name in ``attempts/`` stands for."""
    match = _END.match(name)
    return int(match.group(1)) if match else None


def evidence(attempt: int, node: str) -> str:
    """The directory of what a node gathered of a hang; attempt 0: before the number was known."""
    return f"{EVIDENCE}/{attempt:06d}/{node}"


def ledger_segment(attempt: int, segment: int) -> str:
    """One append-only piece of an attempt's ledger."""
    return f"{LEDGER}/{attempt:06d}-{segment:06d}.jsonl"


def tracker(name: str) -> str:
    """What a tracker has been told, for the next attempt."""
    return f"{TRACKERS}/{name}.json"


def events_of(attempt: int) -> str:
    """How the names of an attempt's event files begin, below ``tensorboard/``."""
    return f"events.out.tfevents.{attempt:010d}-"


def events(attempt: int, segment: int) -> str:
    """One of TensorBoard's event files; it looks for "tfevents" in the name, and reads them in order of names."""
    return f"{TENSORBOARD}/{events_of(attempt)}{segment:06d}"


def step_directory(step: int) -> str:
    """The directory of a checkpoint, below the checkpoint URL. Zero-padding is for people; code reads the number."""
    return f"step-{step:010d}"


def step_number(name: str) -> int | None:
    """The step that a directory name stands for, at any padding; None for foreign names."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def manifest(step: int, attempt: int) -> str:
    """The manifest that commits a checkpoint."""
    return f"{step_directory(step)}/manifest-{attempt:06d}.json"


def manifest_attempt(name: str) -> int | None:
    """The attempt that wrote a manifest of this name; None for other files."""
    match = _MANIFEST.match(name)
    return int(match.group(1)) if match else None


def committed(path: str) -> tuple[int, int] | None:
    """Step and attempt of the checkpoint whose ``manifest`` this is; None for another path."""
    directory, _, name = path.partition("/")
    step, attempt = step_number(directory), manifest_attempt(name)
    return None if step is None or attempt is None else (step, attempt)


def data_directory(step: int, attempt: int) -> str:
    """Where one attempt puts the data files of one checkpoint."""
    return f"{step_directory(step)}/data-{attempt:06d}"


def data_attempt(name: str) -> int | None:
    """The attempt that a data directory of this name belongs to; None for other names."""
    match = _DATA.match(name)
    return int(match.group(1)) if match else None


def import_claim(step: int) -> str:
    """What an import creates, exclusively, while it writes the checkpoint of a step."""
    return f"{step_directory(step)}/importing.json"


def pin(step: int, attempt: int) -> str:
    """Says that a checkpoint is to stay."""
    return f"{step_directory(step)}/pinned-{attempt:06d}.json"


def suspicion(step: int, attempt: int, by: int) -> str:
    """Says why attempt ``by`` distrusts a checkpoint."""
    return f"{step_directory(step)}/suspect-{attempt:06d}-{by:06d}.json"


def lease(step: int, attempt: int, taken: float, token: str) -> str:
    """Says that somebody has been reading a checkpoint since ``taken`` (seconds since the epoch)."""
    return f"{step_directory(step)}/reading-{attempt:06d}-{int(taken):010d}-{token}.json"


class MarkName(NamedTuple):
    """What the name of a mark says."""

    kind: Literal["pinned", "suspect", "reading"]
    """What is said of the checkpoint."""
    attempt: int
    """The attempt that wrote the checkpoint."""
    number: int
    """suspect: the attempt that says so; reading: since when, seconds since the epoch."""


def mark(name: str) -> MarkName | None:
    """The mark that a file name in a step directory stands for; None for other files."""
    match = _MARK.match(name)
    if match is None or (match.group(1) == "pinned") != (match.group(3) is None):
        return None
    return MarkName(match.group(1), int(match.group(2)), int(match.group(3) or 0))  # type: ignore[arg-type]


def epoch_record(epoch: int) -> str:
    """The record that a node creates, exclusively, to host an epoch's store; below the rendezvous directory."""
    return f"{epoch:06d}.json"


def epoch_number(name: str) -> int | None:
    """The epoch that a file name in a rendezvous directory stands for."""
    match = _EPOCH.match(name)
    return int(match.group(1)) if match else None


def epoch_beat(epoch: int) -> str:
    """The host's sign of life."""
    return f"{epoch:06d}.beat"


def epoch_end(epoch: int) -> str:
    """Says that the host has ended the epoch."""
    return f"{epoch:06d}.end"
