"""Foreign exceptions mapped to ours, in one place; what is transient is tried again until the deadline."""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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

log = logging.getLogger(__name__)

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FINAL = (AccessDenied, AlreadyExists, NotFound, StorageFull)
# A mistake in the call: it will be the same mistake next time.
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
_TRY_AGAIN = {408, 409, 425, 429}
_USER_INFO = re.compile(r"//[^/@\s]*@")


def hide(text: str, secrets: Sequence[str] = ()) -> str:
    """``text`` without user names and passwords in URLs, and without ``secrets``."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return _USER_INFO.sub("//***@", text)


def map_error(error: BaseException, what: str, secrets: Sequence[str] = ()) -> StorageError:
    """The StorageError that stands for ``error`` met while doing ``what``."""
    if isinstance(error, StorageError):
        return error
    said = str(error)
    text = hide(f"{what}: {type(error).__name__}: {said}", secrets)
    code = error.errno if isinstance(error, OSError) else None
    status = _status(error)
    lost_race = status == 412 or "PreconditionFailed" in said or "pre-condition" in said.lower()
    if isinstance(error, FileExistsError) or lost_race:
        return AlreadyExists(text)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404:
        return NotFound(text)
    if code in _FULL:
        return StorageFull(text)
    denied = isinstance(error, PermissionError) or code in _DENIED or status in (401, 403)
    if denied or "Credentials" in type(error).__name__:
        return AccessDenied(text)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return StorageTimeout(text)
    return StorageError(text)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of a boto-style error, or of the one that s3fs has translated it from."""
    for each in (error, getattr(error, "__cause__", None)):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict) and "ResponseMetadata" in answer:
            return answer["ResponseMetadata"].get("HTTPStatusCode")
    return None


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """Map whatever the block raises."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError):
            raise
        raise map_error(error, what) from error


def bounded(action: Callable[[], T], what: str, seconds: float, secrets: Sequence[str] = ()) -> T:
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
        raise StorageTimeout(hide(f"{what}: no answer within {seconds:.3g} s (timeouts.storage)", secrets))
    if failure:
        error = failure[0]
        if isinstance(error, StorageError):
            raise error
        # A chained error is printed too, so one that tells a secret is cut off.
        told = "".join(traceback.format_exception(error))
        raise map_error(error, what, secrets) from (error if hide(told, secrets) == told else None)
    return result[0]


def retried(action: Callable[[], T], what: str, seconds: float, secrets: Sequence[str] = ()) -> T:
    """``bounded``, tried again with back-off and jitter while the error may pass and time is left."""
    end = time.monotonic() + seconds
    back_off = tenacity.wait_random_exponential(multiplier=0.2, max=10)

    def left() -> float:
        return end - time.monotonic()

    retrying: Any = tenacity.Retrying(
        # What is left after half the back-off must still be enough for another try.
        stop=lambda _: left() <= 0.05,
        wait=lambda state: min(back_off(state), left() / 2),
        retry=tenacity.retry_if_exception(is_transient),
        before_sleep=lambda state: log.warning("trying again: %s", state.outcome and state.outcome.exception()),
        reraise=True,
    )
    return retrying(lambda: bounded(action, what, max(left(), 0.01), secrets))


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if not isinstance(error, StorageError) or isinstance(error, _FINAL):
        return False
    cause = error.__cause__
    if isinstance(cause, _MISTAKES) or "Validation" in type(cause).__name__:
        return False
    status = _status(cause)
    return status is None or status >= 500 or status in _TRY_AGAIN
