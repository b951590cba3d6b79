"""The manifest: the last file of a checkpoint. What has no valid manifest does not exist."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import pydantic
import torch
import xxhash

from elastic_runner import paths
from elastic_runner.checkpoint.marks import Marks, marks_in
from elastic_runner.config import STRICT, NotNegative, Positive
from elastic_runner.errors import Damaged, Fenced, NotFound, StorageError
from elastic_runner.storage import Storage, Written
from elastic_runner.storage.faults import mapped
from elastic_runner.storage.protocol import digest_of

FORMAT_VERSION = 1
_CUT = re.compile(r'\s*|"[^"\n]*|[.eE]?[+-]?')
"""What JSON can have after its last whole token where it is cut."""


class Torn(Damaged):
    """A manifest that was never written to its end, so that its checkpoint was never committed.

    That happens by a kill where a file cannot be made whole at once (no hard links). Nothing else counts as torn.
    """


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is and which bytes make it up."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    step: NotNegative
    """Optimizer steps that the state has taken."""
    attempt: NotNegative
    """The attempt that wrote it: the fence."""
    world_size: Positive
    """Ranks that wrote it; of interest to people only."""
    format: Literal["sharded", "full"]
    """Layout of the data files."""
    files: tuple[Written, ...]
    """Every data file, its path relative to the step directory."""
    versions: dict[str, str] = field(default_factory=lambda: {"torch": torch.__version__})
    """Versions of the writing packages."""
    created: float = field(default_factory=time.time)
    """Seconds since the epoch, by the writer's clock; of interest to people and to ``keep_hours``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Results of an evaluation of this state, given at save; those that are not finite are left out."""
    non_finite: tuple[str, ...] = ()
    """Names of parameters or moments that hold NaN or infinity; empty: the state is healthy."""

    def __post_init__(self) -> None:
        finite = {name: float(value) for name, value in self.metrics.items() if math.isfinite(value)}
        object.__setattr__(self, "metrics", finite)

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files)

    @property
    def path(self) -> str:
        """Where it is kept, below the checkpoint URL."""
        return paths.manifest(self.step, self.attempt)


def encode(manifest: Manifest) -> bytes:
    """JSON with a digest of itself."""
    body = {"version": FORMAT_VERSION, **asdict(manifest)}
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()


def decode(data: bytes, where: str) -> Manifest:
    """Parse and check. Raises Damaged with the reason in words."""
    try:
        body: dict[str, Any] = json.loads(data)
        digest = body.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        if _is_cut(data):
            raise Torn(f"{where} is torn: not a complete manifest, so it was never committed") from None
        raise Damaged(f"{where} is not a manifest") from None
    if digest != _digest(body):
        raise Damaged(f"{where} was changed after it was written")
    version = body.pop("version", None)
    if version != FORMAT_VERSION:
        raise Damaged(f"{where} has format version {version}, this package reads {FORMAT_VERSION}")
    try:
        manifest = _PARSED.validate_json(json.dumps(body), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise Damaged(f"{where} is not as a manifest is: {place}: {first['msg']}") from None
    own = paths.data_directory(manifest.step, manifest.attempt).rpartition("/")[2]
    for file in manifest.files:
        directory, _, name = file.path.partition("/")
        if directory != own or name in ("", ".", "..") or "/" in name or "\0" in name or file.size < 0:
            raise Damaged(f"{where} names {file.path!r} ({file.size} bytes), which is no file of its checkpoint")
    return manifest


_PARSED = pydantic.TypeAdapter(Manifest)


def _is_cut(data: bytes) -> bool:
    """Whether it is the beginning of a manifest; a file may have its length before its bytes."""
    try:
        text = data.rstrip(b"\0").decode("ascii")
        json.loads(text)
    except json.JSONDecodeError as error:
        return not text or (text.startswith("{") and _CUT.fullmatch(text, error.pos) is not None)
    except (ValueError, RecursionError):
        return False
    return False


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint and what has been said of it since."""

    manifest: Manifest
    """What it is."""
    marks: Marks = field(default_factory=Marks)
    """What was said of it."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A manifest that does not count."""

    path: str
    """Where it is kept."""
    error: Damaged | StorageError = field(compare=False)
    """Torn: it was never committed. Damaged: it was, and is not what was written. StorageError: it cannot be read."""
    reason: str = field(init=False)
    """In words."""

    def __post_init__(self) -> None:
        unread = "" if isinstance(self.error, Damaged) else f"{self.path} cannot be read: "
        object.__setattr__(self, "reason", f"{unread}{self.error}")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What lies under a checkpoint URL."""

    checkpoints: tuple[Checkpoint, ...]
    """Newest first: by step, then by attempt, both read from inside."""
    rejected: tuple[Rejected, ...]
    """Manifests that do not count."""
    directories: dict[str, tuple[str, ...]]
    """Names in each step directory, committed or not."""

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Newest first."""
        return tuple(checkpoint.manifest for checkpoint in self.checkpoints)


def list_checkpoints(storage: Storage) -> Listing:
    """All committed checkpoints. Foreign names are passed over; order is by step, never by name or time."""
    found: list[Checkpoint] = []
    rejected: list[Rejected] = []
    directories = {name: tuple(storage.list(name)) for name in storage.list("") if paths.step_number(name) is not None}
    for directory, names in directories.items():
        for name in names:
            attempt = paths.manifest_attempt(name)
            if attempt is None:
                continue
            where = f"{directory}/{name}"
            try:
                manifest = decode(storage.read(where), where)
                if manifest.path != where:
                    raise Damaged(f"{where} is the manifest of another checkpoint (step {manifest.step})")
            except (Damaged, StorageError) as error:
                rejected.append(Rejected(path=where, error=error))
            else:
                found.append(Checkpoint(manifest=manifest, marks=marks_in(directory, names, attempt)))
    found.sort(key=lambda c: (c.manifest.step, c.manifest.attempt), reverse=True)
    return Listing(checkpoints=tuple(found), rejected=tuple(rejected), directories=directories)


def create_fenced(storage: Storage, manifest: Manifest, check_fence: Callable[[], None]) -> None:
    """Write the manifest, unless a newer attempt has begun; ``check_fence`` raises Fenced then."""
    check_fence()
    storage.create(manifest.path, encode(manifest))
    try:
        check_fence()
    except (Fenced, StorageError):
        # A newer attempt has begun meanwhile, or may have, and may not have seen it. What fails is not there.
        storage.delete(manifest.path)
        raise


def check_file(storage: Storage, manifest: Manifest, file: Written, *, digests: bool) -> str | None:
    """Why a data file is not what the manifest says, in words; None when it is."""
    path = f"{paths.step_directory(manifest.step)}/{file.path}"
    try:
        size = storage.size(path)
        if size != file.size:
            return f"{path} has {size} bytes instead of {file.size}"
        if digests:
            with storage.local_copy(path) as local, mapped(f"read {path}"):
                if digest_of(local) != file.digest:
                    return f"{path} has other bytes than were written"
    except NotFound:
        return f"{path} is missing"
    return None
