"""A console handler for programs that have not set up logging themselves."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s {who} %(levelname).1s %(message)s"


def ensure_logging(who: str) -> None:
    """Print this package's log lines (INFO and up) to stderr, each with ``who``, unless logging is set up already."""
    logger = logging.getLogger("elastic_runner")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(who=who), datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
