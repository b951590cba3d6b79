"""Foreign exceptions mapped to ours, in one place; what is transient is tried again until the deadline."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

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

LOCAL_TRIES = 5
"""Of an operation on a local or mounted directory: some seconds, unless a call takes its time to fail."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# What the operating system will say of the same call next time as well.
_LASTING = {
    *(errno.EINVAL, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP, errno.ENOSYS, errno.EOPNOTSUPP),
    *(errno.EMSGSIZE, errno.EXDEV, errno.ENODEV, errno.EBADF),
}
_FINAL = (AccessDenied, AlreadyExists, NotFound, StorageFull)
# A mistake in the call: it will be the same mistake next time.
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError, AssertionError)

_STATUS_PASSES = {408, 409, 425, 429}
_STATUS_LASTS = {501, 505}
# Codes that say more than their HTTP status.
_CODE_PASSES = {
    # Bytes were changed or lost on the way.
    *("BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "IncompleteBody"),
    # The upload or a part of it is gone: an answer was lost, or somebody swept. A new upload is another one.
    *("NoSuchUpload", "InvalidPart"),
    *("RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded"),
}
_CODE_DENIED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed"}
_CODE_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
# Of botocore's own errors, by name since it is not imported here; all others say that something is set up wrong.
_BOTO_PASSES = {
    *("HTTPClientError", "ConnectionError", "IncompleteReadError", "ChecksumError", "FlexibleChecksumError"),
    *("CredentialRetrievalError", "TokenRetrievalError", "MetadataRetrievalError", "CapacityNotAvailableError"),
}
_BOTO_DENIED = {
    *("NoCredentialsError", "PartialCredentialsError", "UnknownCredentialError", "NoAuthTokenError"),
    *("SSOError", "LoginError", "RefreshWithMFAUnsupportedError"),
}
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
    ours = _kind(error)(hide(f"{what}: {type(error).__name__}: {error}", secrets))
    # Decided now: the cause may have to be cut off, for a secret that it tells.
    vars(ours)["transient"] = not isinstance(ours, _FINAL) and _may_pass(error)
    return ours


def _kind(error: BaseException) -> type[StorageError]:
    status, code = _answer(error)
    number = error.errno if isinstance(error, OSError) else None
    names = _names(error)
    if code in _CODE_PASSES:
        return StorageTimeout if code == "RequestTimeout" else StorageError
    if isinstance(error, FileExistsError) or status == 412 or (number == errno.EINVAL and _lost_race(str(error))):
        return AlreadyExists
    if number in _FULL or status == 507 or code in _CODE_FULL:
        return StorageFull
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404:
        return NotFound
    denied = isinstance(error, PermissionError) or number in _DENIED or status in (401, 403)
    if denied or code in _CODE_DENIED or names & _BOTO_DENIED:
        return AccessDenied
    if isinstance(error, TimeoutError) or any("Timeout" in name for name in names):
        return StorageTimeout
    return StorageError


def _may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later; what nobody knows may."""
    status, code = _answer(error)
    if code in _CODE_PASSES:
        return True
    if status is not None:
        return status in _STATUS_PASSES or (status >= 500 and status not in _STATUS_LASTS)
    names = _names(error)
    if "BotoCoreError" in names:
        return bool(names & _BOTO_PASSES)
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.errno not in _LASTING and not isinstance(error, ValueError)
    return not isinstance(error, _MISTAKES)


def _lost_race(said: str) -> bool:
    # s3fs makes nothing more of a lost exclusive create on some servers.
    return "PreconditionFailed" in said or "pre-condition" in said.lower()


def _answer(error: BaseException) -> tuple[int | None, str | None]:
    """HTTP status and error code of a boto-style error, or of the one that s3fs has translated it from."""
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict) and "ResponseMetadata" in answer:
            return answer["ResponseMetadata"].get("HTTPStatusCode"), answer.get("Error", {}).get("Code")
        status = getattr(each, "status", None)  # aiohttp, for fsspec's http
        if isinstance(status, int) and status >= 300:
            return status, None
    return None, None


def _names(error: BaseException) -> set[str]:
    return {each.__name__ for each in type(error).__mro__}


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """Map whatever the block raises."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError):
            raise
        raise map_error(error, what) from error


class Deadline:
    """When an operation must be over. Getting further than any try before puts it off, so that a large file may take
    its time over a slow link, but not one whose transfer breaks again and again."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._furthest = 0
        self._patience = seconds
        self._end = self._try_end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the operation must be over."""
        return self._end - time.monotonic()

    def begin_try(self, patience: float) -> None:
        """From now on, this try may be silent for ``patience`` seconds at most."""
        self._patience = patience
        self._try_end = time.monotonic() + patience

    def try_left(self) -> float:
        """Seconds until the try must be over."""
        return min(self._end, self._try_end) - time.monotonic()

    def progress(self, done: int) -> None:
        """So much of this try is done."""
        now = time.monotonic()
        self._try_end = now + self._patience
        if done > self._furthest:
            self._furthest = done
            self._end = now + self.seconds


def bounded(
    action: Callable[[], T],
    what: str,
    deadline: Deadline,
    secrets: Sequence[str] = (),
    give_up: Callable[[], object] | None = None,
) -> T:
    """Run ``action`` in a thread and give up waiting when its time is over.

    A hung call that ``give_up`` does not end is left behind in its daemon thread, and the caller learns of it.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:
            failure.append(error)

    start = time.monotonic()
    thread = threading.Thread(target=run, name=f"storage {what}", daemon=True)
    thread.start()
    while thread.is_alive() and (left := deadline.try_left()) > 0:
        thread.join(left)
    if thread.is_alive():
        waited = time.monotonic() - start
        if give_up is not None and give_up():
            thread.join(1)
        raise StorageTimeout(
            hide(f"{what}: no answer within {waited:.3g} s (timeouts.storage: {deadline.seconds:.3g} s)", secrets)
        )
    if failure:
        error = failure[0]
        if isinstance(error, StorageError):
            raise error
        # A chained error is printed too, so one that tells a secret is cut off.
        told = "".join(traceback.format_exception(error))
        raise map_error(error, what, secrets) from (error if hide(told, secrets) == told else None)
    return result[0]


def retried(
    action: Callable[[], T],
    what: str,
    seconds: float | Deadline,
    secrets: Sequence[str] = (),
    give_up: Callable[[], object] | None = None,
) -> T:
    """``bounded``, tried again with back-off and jitter while the error may pass and time is left."""
    deadline = seconds if isinstance(seconds, Deadline) else Deadline(seconds)
    tries = itertools.count()

    def attempt() -> T:
        # A connection can hang where others would not. A slow one that shows no progress has its chance after that.
        deadline.begin_try(deadline.seconds / 3 if next(tries) == 0 else deadline.seconds)
        return bounded(action, what, deadline, secrets, give_up)

    return _retrying(deadline)(attempt)


def repeated(action: Callable[[], T], what: str, seconds: float) -> T:
    """``action`` in this thread, tried again a few times while the error may pass and time is left.

    For calls of the operating system, which nobody can give up: one that hangs, hangs.
    """

    def attempt() -> T:
        with mapped(what):
            return action()

    return _retrying(Deadline(seconds), LOCAL_TRIES)(attempt)


def _retrying(deadline: Deadline, tries: float = math.inf) -> tenacity.Retrying:
    back_off = tenacity.wait_random_exponential(multiplier=0.2, max=10)
    return tenacity.Retrying(
        # What is left after half the back-off must still be enough for another try.
        stop=lambda state: state.attempt_number >= tries or deadline.left() <= 0.05,
        wait=lambda state: max(0.0, min(back_off(state), deadline.left() / 2)),
        retry=tenacity.retry_if_exception(is_transient),
        before_sleep=lambda state: log.warning("trying again: %s", state.outcome and state.outcome.exception()),
        reraise=True,
    )


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if not isinstance(error, StorageError) or isinstance(error, _FINAL):
        return False
    return bool(vars(error).get("transient", True))
