"""RunPaths: every name inside a run directory, in one place. Names are relative, with '/' on any storage."""

from __future__ import annotations

import re

SUMMARY = "summary.json"
SAMPLE = "sample.txt"
ATTEMPTS = "attempts"
LEDGER = "ledger"
CHECKPOINTS = "checkpoints"

_ATTEMPT = re.compile(r"^(\d{6})\.json$")
_STEP = re.compile(r"^step-(\d+)$")
_MANIFEST = re.compile(r"^manifest-(\d{6})\.json$")


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


def ledger_segment(attempt: int, segment: int) -> str:
    """One append-only piece of an attempt's ledger."""
    return f"{LEDGER}/{attempt:06d}-{segment:06d}.jsonl"


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


def data_directory(step: int, attempt: int) -> str:
    """Where one attempt puts the data files of one checkpoint."""
    return f"{step_directory(step)}/data-{attempt:06d}"
