"""Uploads in parts that were begun and never ended, on S3: they cost as much as objects, and nobody sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from elastic_runner.storage.calls import Call
from elastic_runner.storage.faults import is_transient, map_error

log = logging.getLogger(__name__)


class Leftovers:
    """What uploads to ``filesystem`` may have left; ``url`` is for people. Trouble in here never fails an upload."""

    def __init__(self, filesystem: Any, url: str, secrets: Sequence[str] = ()) -> None:
        self._fs = filesystem
        self._url = url
        self._secrets = secrets
        self._left: set[str] = set()
        self._may_look = True

    def add(self, at: str) -> None:
        """An upload to ``at`` has failed."""
        self._left.add(at)

    def clear(self, call: Call) -> None:
        """Abort what failed uploads have left; where the server does not answer, the next time."""
        for at in sorted(self._left):
            if not self.abort(call, at):
                return

    def abort(self, call: Call, at: str) -> bool:
        """Abort the uploads to ``at`` that are in progress; False when it cannot be told whether there are any."""
        done = self._abort(call, at, lambda key, upload: upload["Key"] == key)
        if done:
            self._left.discard(at)
        return done

    def abort_older(self, call: Call, directory: str, seconds: float) -> None:
        """Abort the uploads below ``directory`` that were begun so long ago: by a process that was killed."""
        before = datetime.now(timezone.utc) - timedelta(seconds=seconds)
        self._abort(call, directory.rstrip("/") + "/", lambda _, upload: upload["Initiated"] < before)

    def _abort(self, call: Call, prefix: str, chosen: Callable[[str, dict[str, Any]], bool]) -> bool:
        if not self._may_look:
            return False
        bucket, key, _ = self._fs.split_path(prefix)
        more: dict[str, str] | None = {}
        try:
            while more is not None:
                answer = call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key, **more)
                for each in answer.get("Uploads", []):
                    if chosen(key, each):
                        call("abort_mpu", bucket, each["Key"], each["UploadId"])
                more = _next_page(answer)
        except Exception as error:
            trouble = map_error(error, f"look for unfinished uploads to {prefix}", self._secrets)
            if not is_transient(trouble):
                self._give_up(trouble)
            return False
        return True

    def _give_up(self, trouble: Exception) -> None:
        self._may_look = False
        self._left.clear()
        log.warning(
            "unfinished uploads to %s are not looked for, and may stay; a lifecycle rule of the bucket can abort them "
            "(s3:ListBucketMultipartUploads and s3:AbortMultipartUpload let us do it): %s",
            self._url,
            trouble,
        )


def _next_page(answer: dict[str, Any]) -> dict[str, str] | None:
    if not answer.get("IsTruncated") or not answer.get("NextKeyMarker"):
        return None
    return {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer.get("NextUploadIdMarker", "")}
