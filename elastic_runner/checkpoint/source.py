"""Where a restore gets its bytes from, one class per format. Every file comes to a node once and is checked there."""

from __future__ import annotations

import io
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import LoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from elastic_runner import paths
from elastic_runner.checkpoint.archive import load_plain, only_data
from elastic_runner.checkpoint.frames import data_in
from elastic_runner.checkpoint.full import FILE, FullFile
from elastic_runner.checkpoint.manifest import Manifest, check_file
from elastic_runner.checkpoint.metadata import METADATA, read_metadata
from elastic_runner.checkpoint.relay import Relay
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import Damaged
from elastic_runner.storage import Storage, Written

log = logging.getLogger(__name__)


class Source(Protocol):
    """A committed checkpoint."""

    def head(self) -> tuple[Metadata, dict[str, Any]]:
        """What is in it, and the plain data by key; on rank 0. Raises Damaged, NotData."""
        ...

    def read(self, items: Sequence[ReadItem], metadata: Metadata, planner: LoadPlanner) -> None:
        """Copy what ``items`` ask for to where ``planner`` wants it. Collective; an error is every rank's."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


def open_source(storage: Storage, manifest: Manifest, coordinator: Coordinator, *, node: str, digests: bool) -> Source:
    """The source for a checkpoint's format. ``node``: what ranks that share memory and files have in common."""
    checked = Checked(storage, manifest, digests=digests)
    return (FullSource if manifest.format == "full" else ShardedSource)(checked, coordinator, node)


class Checked:
    """The files of one checkpoint, each compared with the manifest as it is read."""

    def __init__(self, storage: Storage, manifest: Manifest, *, digests: bool) -> None:
        self.storage = storage
        self.directory = paths.data_directory(manifest.step, manifest.attempt)
        self._manifest = manifest
        self._digests = digests
        step = paths.step_directory(manifest.step)
        self._files = {f"{step}/{file.path}": file for file in manifest.files}

    def file(self, name: str) -> Written:
        """The manifest's word on a data file. Raises Damaged when it names none."""
        path = f"{self.directory}/{name}"
        if path not in self._files:
            raise Damaged(f"{path} is asked for by {METADATA} but not named by the manifest")
        return self._files[path]

    def check(self, name: str) -> None:
        """Raise Damaged when a file is not what was written."""
        if reason := check_file(self.storage, self._manifest, self.file(name), digests=self._digests):
            raise Damaged(reason)

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill ``buffer`` with a file. Raises Damaged when it is not what was written."""
        path, expected = f"{self.directory}/{name}", self.file(name)
        found = self.storage.read_into(path, buffer)
        if self._digests and found.digest != expected.digest:
            # Bits can flip on the way, too: what is damaged where it lies is the same a second time.
            again = self.storage.read_into(path, buffer)
            if again.digest != expected.digest:
                raise Damaged(f"{path} has other bytes than were written")
            log.warning("%s came with wrong bytes at first: network, memory or disk are not to be trusted", path)


class ShardedSource:
    """Data files are read in rounds, one by each rank of a node at a time, and shared with the node's other ranks."""

    def __init__(self, checked: Checked, coordinator: Coordinator, node: str) -> None:
        self._checked = checked
        self._coordinator = coordinator
        self._node = node

    def head(self) -> tuple[Metadata, dict[str, Any]]:
        """``.metadata`` through the allow-list, after its digest."""
        self._checked.check(METADATA)
        storage, directory = self._checked.storage, self._checked.directory
        metadata = read_metadata(storage, directory)
        plain: dict[str, Any] = {}
        seen: set[str] = set()
        for index, info in metadata.storage_data.items():
            if not isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                continue
            if info.relative_path not in seen:
                self._checked.check(info.relative_path)
                seen.add(info.relative_path)
            data = storage.read_range(f"{directory}/{info.relative_path}", info.offset, info.length)
            plain[index.fqn] = load_plain(io.BytesIO(data), f"{info.relative_path}: {index.fqn}")
        return metadata, plain

    def read(self, items: Sequence[ReadItem], metadata: Metadata, planner: LoadPlanner) -> None:
        """File by file."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in items:
            by_file[metadata.storage_data[item.storage_index].relative_path].append(item)
        sizes = self._coordinator.agree(
            "restore: needs", lambda: (self._node, {name: self._checked.file(name).size for name in by_file})
        )
        relay = Relay(self._coordinator, sizes, self._checked.read_into)
        copy = _Copy(by_file, metadata, planner)
        relay.run(copy)

    def close(self) -> None:
        """Nothing is held open."""


class _Copy:
    """Copies what this rank needs of a file."""

    def __init__(self, by_file: Mapping[str, list[ReadItem]], metadata: Metadata, planner: LoadPlanner) -> None:
        self._by_file = by_file
        self._metadata = metadata
        self._planner = planner

    def __call__(self, name: str, view: memoryview) -> None:
        for item in self._by_file.get(name, ()):
            info = self._metadata.storage_data[item.storage_index]
            archive = view[info.offset : info.offset + info.length]
            where = f"{name}: {item.storage_index.fqn}"
            with only_data(where):
                place(self._planner, item, self._tensor(archive, item.storage_index, where))

    def _tensor(self, archive: memoryview, index: MetadataIndex, where: str) -> torch.Tensor:
        entry = self._metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata) and index.index is not None and index.index < len(entry.chunks):
            chunk = entry.chunks[index.index]
            tensor = data_in(archive, entry.properties.dtype, tuple(chunk.sizes))
            if tensor is not None and chunk.offsets == index.offset:
                return tensor
        loaded = load_plain(io.BytesIO(archive), where)  # written by another version of torch
        if not isinstance(loaded, torch.Tensor):
            raise Damaged(f"{where} is no tensor")
        return loaded


def place(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    """Copy the part of ``tensor`` that ``item`` asks for to where the planner wants it."""
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(tensor)
    planner.commit_tensor(item, target)


class FullSource:
    """One rank of each node brings the file and checks it; all of them map it."""

    def __init__(self, checked: Checked, coordinator: Coordinator, node: str) -> None:
        self._checked = checked
        self._coordinator = coordinator
        self._node = node
        self._open = ExitStack()
        self._file: FullFile | None = None
        self._local = ""

    def head(self) -> tuple[Metadata, dict[str, Any]]:
        """Metadata made up from the file, and its plain data."""
        file = self._bring()
        return file.metadata(), file.plain

    def _bring(self) -> FullFile:
        if self._file is None:
            self._checked.check(FILE)
            path = f"{self._checked.directory}/{FILE}"
            local = self._open.enter_context(self._checked.storage.local_copy(path))
            self._local = str(local)
            self._file = FullFile(local, path)
        return self._file

    def read(self, items: Sequence[ReadItem], metadata: Metadata, planner: LoadPlanner) -> None:
        """Copy the asked-for parts out of the mapped file."""
        nodes = self._coordinator.gather("restore: nodes", self._node)
        leader = nodes.index(self._node)

        def bring() -> str:
            if leader == self._coordinator.rank:
                self._bring()
            return self._local

        brought = self._coordinator.agree("restore: bring the file", bring)
        self._coordinator.agree("restore: read", lambda: self._copy(brought[leader], items, planner))

    def _copy(self, local: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        file = self._file or FullFile(Path(local), FILE)
        tensors = file.tensors()
        with only_data(FILE):
            for item in items:
                place(planner, item, tensors[item.storage_index.fqn])

    def close(self) -> None:
        """Let go of the file."""
        self._file = None
        self._open.close()


__all__ = ["Checked", "FullSource", "ShardedSource", "Source", "open_source", "place"]
