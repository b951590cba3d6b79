"""Notices to stop that do not come as a signal: a file that appears, a URL that answers."""

from __future__ import annotations

import threading
import urllib.request
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

_ASK_EVERY = 5.0
"""Seconds between questions to a URL; clouds give notice half a minute ahead or more."""
_ANSWER = 3.0
"""Seconds for its answer."""


class Notices:
    """Looks for them from now on. ``url``: asked in a thread; a notice when it answers with 200, as AWS' instance
    metadata does at ``/latest/meta-data/spot/instance-action``. No answer, and any other, is none.
    """

    def __init__(self, *, file: Path | None = None, url: str | None = None) -> None:
        self._file = file
        self._url = url
        self._answered = threading.Event()
        self._closed = threading.Event()
        if url is not None:
            threading.Thread(target=self._ask, args=(url,), name="notices to stop", daemon=True).start()

    def given(self) -> str | None:
        """What has given notice, in words; None when nothing has."""
        if self._file is not None and self._file.exists():
            return f"{self._file} is there"
        return f"{self._url} has answered" if self._answered.is_set() else None

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _ask(self, url: str) -> None:
        while not self._closed.wait(_ASK_EVERY):
            try:
                with urllib.request.urlopen(url, timeout=_ANSWER) as answer:
                    if answer.status == 200:
                        self._answered.set()
                        return
            except (OSError, ValueError, HTTPException):  # the last where it is no HTTP that is spoken there
                continue


def can_be_asked(url: str) -> bool:
    """Whether it is a URL of HTTP: any other would never answer, and nobody would hear of it."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return named and url.isascii() and url.isprintable() and " " not in url
