"""Foreign exceptions mapped to ours, in one place; what is transient is tried again until the deadline."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import tenacity

from elastic_runner.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    StorageError,
    StorageFull,
    StorageTimeout,
)

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FINAL = (AccessDenied, AlreadyExists, NotFound, StorageFull)


def map_error(error: BaseException, what: str) -> StorageError:
    """The StorageError that stands for ``error`` met while doing ``what``."""
    if isinstance(error, StorageError):
        return error
    text = f"{what}: {type(error).__name__}: {error}"
    code = error.errno if isinstance(error, OSError) else None
    # boto-style errors carry the server's answer.
    answer = getattr(error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    if (
        isinstance(error, FileExistsError)
        or status == 412
        or "PreconditionFailed" in text
        or "pre-condition" in text.lower()
    ):
        return AlreadyExists(text)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404:
        return NotFound(text)
    if code in _FULL:
        return StorageFull(text)
    if isinstance(error, PermissionError) or code in _DENIED or status in (401, 403):
        return AccessDenied(text)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return StorageTimeout(text)
    return StorageError(text)


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """Map whatever the block raises."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError):
            raise
        raise map_error(error, what) from error


def bounded(action: Callable[[], T], what: str, seconds: float) -> T:
    """Run ``action`` in a thread and give up waiting after ``seconds``.

    A hung network call cannot be cancelled; the daemon thread is left behind and the caller learns of it.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"storage {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise StorageTimeout(f"{what}: no answer within {seconds:g} s (timeouts.storage)")
    if failure:
        raise map_error(failure[0], what) from failure[0]
    return result[0]


def retried(action: Callable[[], T], what: str, seconds: float) -> T:
    """``bounded``, tried again with back-off and jitter while the error may pass and time is left."""
    retrying: Any = tenacity.Retrying(
        stop=tenacity.stop_after_delay(seconds) | tenacity.stop_after_attempt(6),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
        retry=tenacity.retry_if_exception(
            lambda e: isinstance(e, StorageError) and not isinstance(e, (*_FINAL, StorageTimeout))
        ),
        reraise=True,
    )
    return retrying(bounded, action, what, seconds)
