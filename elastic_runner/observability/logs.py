"""A console handler for programs that have not set up logging themselves."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_FORMAT = "%(asctime)s {who} %(levelname).1s %(message)s"


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at the time: a progress bar puts itself there to keep below the lines."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Set by the base class once; the present one is looked up instead."""


def ensure_logging(who: str) -> None:
    """Print this package's log lines (INFO and up) to stderr, each with ``who``, unless logging is set up already."""
    logger = logging.getLogger("elastic_runner")
    if logger.hasHandlers():
        return
    handler = _Stderr()
    handler.setFormatter(logging.Formatter(_FORMAT.format(who=who), datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
