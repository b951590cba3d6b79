"""Finding what a URL means: a committed checkpoint, or a file or directory exported or from elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from elastic_runner import paths
from elastic_runner.checkpoint.archive import load_plain
from elastic_runner.checkpoint.full import FILE
from elastic_runner.checkpoint.manifest import Manifest, check_file, list_checkpoints
from elastic_runner.checkpoint.marks import reading
from elastic_runner.checkpoint.metadata import METADATA, parse_metadata, plain_in
from elastic_runner.checkpoint.plain import check_plain
from elastic_runner.checkpoint.source import Checked
from elastic_runner.checkpoint.tools.contents import ALIASES, Contents, full_contents, open_full, sharded_contents
from elastic_runner.checkpoint.tools.foreign import foreign_dcp, foreign_torch, without_wrappers
from elastic_runner.checkpoint.tools.overview import find, open_checkpoints
from elastic_runner.checkpoint.tools.safetensors import SUFFIX, read_safetensors
from elastic_runner.checkpoint.tools.stored import RangeFile, load_outline
from elastic_runner.checkpoint.tools.written import Bar
from elastic_runner.checkpoint.trust import describe_non_finite
from elastic_runner.errors import Damaged, NotFound
from elastic_runner.storage import Storage, open_storage

Kind = Literal["sharded", "full", "safetensors", "torch", "dcp"]

_FILES = (SUFFIX, ".pt", ".pth", ".bin", ".ckpt")
_AT_STEP = re.compile(r"^(.+)@(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Something that holds a state, with its contents at hand and its tensors not read."""

    contents: Contents
    """What it holds."""
    kind: Kind
    """sharded, full: committed checkpoints; the others: files of their own."""
    where: str
    """For people."""
    storage: Storage
    """Where its files are."""
    directory: str = ""
    """The directory of its data files there."""
    step: int | None = None
    """The step of its state, where it says so."""
    manifest: Manifest | None = None
    """Of a committed checkpoint."""
    notes: tuple[str, ...] = ()
    """What people should know."""

    def verify(self, bar: Bar) -> None:
        """Compare every file of a committed checkpoint with its digest. Raises Damaged, naming all that differ."""
        if self.manifest is None:
            return
        reasons: list[str] = []
        with bar("verifying", self.manifest.size) as tick:
            for file in self.manifest.files:
                if reason := check_file(self.storage, self.manifest, file, digests=True):
                    reasons.append(reason)
                tick(file.size)
        if reasons:
            raise Damaged(f"{self.where} is damaged: {'; '.join(reasons)}")


@contextmanager
def opened(
    url: str, options: dict[str, str], *, step: int | None = None, lease: bool = True, keep_names: bool = False
) -> Iterator[Opened]:
    """What ``url`` (``URL@STEP`` as well) holds: the newest checkpoint below it, that of ``step``, or a file.

    ``lease``: keep others from pruning the checkpoint meanwhile. Raises NotFound, Damaged, NotData, ConfigError.
    """
    if step is None and (match := _AT_STEP.match(url)):
        url, step = match[1], int(match[2])
    head, _, tail = url.rstrip("/").rpartition("/")
    if step is None and head and paths.step_number(tail) is not None:
        url, step = head, paths.step_number(tail)
    storage = open_storage(url, options)
    # To list what is a file would be to download it from a web server.
    names = [] if tail.endswith(_FILES) and _is_file(url, options) else storage.list("")
    if step is None and METADATA in names:
        yield _open_directory(storage, keep_names)
        return
    if step is None and not names:
        yield _open_file(url, options, keep_names)
        return
    storage = open_checkpoints(url, options)
    manifest = _newest(storage) if step is None else find(storage, step).manifest
    with reading(storage, manifest) if lease else nullcontext():
        yield _open_checkpoint(storage, manifest)


def _newest(storage: Storage) -> Manifest:
    listing = list_checkpoints(storage)
    if not listing.manifests:
        why = f": {'; '.join(one.reason for one in listing.rejected)}" if listing.rejected else ""
        raise NotFound(f"no checkpoint below {storage.url}{why}")
    return listing.manifests[0]


def _open_checkpoint(storage: Storage, manifest: Manifest) -> Opened:
    directory = paths.data_directory(manifest.step, manifest.attempt)
    if manifest.format == "full":
        contents = open_full(storage, f"{directory}/{FILE}")
        check_plain(contents.plain, contents.tensors, f"{directory}/{FILE}")
    else:
        contents = sharded_contents(storage, directory, *Checked(storage, manifest).sharded_head())
    return Opened(
        contents=contents,
        kind=manifest.format,
        where=f"step {manifest.step} of {storage.url}",
        storage=storage,
        directory=directory,
        step=manifest.step,
        manifest=manifest,
        notes=(describe_non_finite(manifest),) if manifest.non_finite else (),
    )


def _open_directory(storage: Storage, keep_names: bool) -> Opened:
    metadata = parse_metadata(storage.read(METADATA), METADATA)
    plain = {
        key: load_plain(io.BytesIO(storage.read_range(name, at.start, at.stop - at.start)), f"{name}: {key}")
        for name, places in plain_in(metadata).items()
        for key, at in places.items()
    }
    contents = sharded_contents(storage, "", metadata, plain)
    found = Opened(contents=contents, kind="dcp", where=storage.url, storage=storage)
    if ALIASES in contents.plain:
        return _ours(found)
    contents, notes = foreign_dcp(contents)
    return _clean(replace(found, contents=contents, notes=tuple(notes)), keep_names)


def _open_file(url: str, options: dict[str, str], keep_names: bool) -> Opened:
    storage, name = beside(url, options)
    try:
        file = RangeFile(storage, name)
    except NotFound:
        raise NotFound(f"{url}: there is no such file, nor a checkpoint below it") from None
    start = bytes(file.read_at(0, min(file.size, 9)))
    is_zip = start.startswith(b"PK")
    if name.endswith(SUFFIX) or (start[8:] == b"{" and not is_zip):
        read = read_safetensors(file)
        found = Opened(contents=read.contents, kind="safetensors", where=url, storage=storage, step=read.step)
        return _ours(found) if read.ours else _clean(found, keep_names)
    # torch.save's old format can only be read as a whole.
    tree = load_outline(file, name) if is_zip else load_plain(io.BytesIO(storage.read(name)), name)
    if isinstance(tree, dict) and isinstance(tree.get("plain"), dict) and ALIASES in tree["plain"]:
        return _ours(Opened(contents=full_contents(file, tree), kind="torch", where=url, storage=storage))
    contents, notes = foreign_torch(file, tree)
    return _clean(Opened(contents=contents, kind="torch", where=url, storage=storage, notes=tuple(notes)), keep_names)


def _is_file(url: str, options: dict[str, str]) -> bool:
    storage, name = beside(url, options)
    try:
        storage.size(name)
    except NotFound:
        return False
    return True


def _ours(found: Opened) -> Opened:
    """Written by this package: checked, with the step that the trainer's state tells. Raises Damaged."""
    check_plain(found.contents.plain, found.contents.tensors, found.where)
    trainer = found.contents.plain.get("state.trainer")
    step = trainer.get("step") if isinstance(trainer, dict) else None
    return replace(found, step=step) if isinstance(step, int) else found


def _clean(found: Opened, keep_names: bool) -> Opened:
    """A foreign model's names without wrappers'."""
    if keep_names:
        return found
    contents, notes = without_wrappers(found.contents)
    return replace(found, contents=contents, notes=(*found.notes, *notes))


def beside(url: str, options: dict[str, str]) -> tuple[Storage, str]:
    """The storage that a file is in, and its name there. Raises NotFound for a URL that names no file."""
    head, slash, name = url.rpartition("/")
    if not name:
        raise NotFound(f"{url} does not name a file")
    if not slash:
        head = "."
    return open_storage(head or "/", options), name
