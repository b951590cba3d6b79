"""How the attempts of a job have ended, as its nodes tell each other: by the attempts' numbers, opaque texts."""

from __future__ import annotations

from collections.abc import Mapping

KEPT = 64
"""What whoever comes later is told of; whoever has been there knows more."""


def newest(failures: Mapping[int, str]) -> dict[int, str]:
    """Those of the latest attempts, oldest first."""
    return {attempt: failures[attempt] for attempt in sorted(failures)[-KEPT:]}
