"""Where a restore gets its bytes from, one class per format. Every file comes to a node once and is checked there."""

from __future__ import annotations

import io
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint import LoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from elastic_runner import paths
from elastic_runner.checkpoint.archive import load_plain
from elastic_runner.checkpoint.frames import Frame, data_in, frame
from elastic_runner.checkpoint.full import FILE, FullFile
from elastic_runner.checkpoint.layout import data_file
from elastic_runner.checkpoint.manifest import Manifest
from elastic_runner.checkpoint.metadata import METADATA, parse_metadata, plain_in
from elastic_runner.checkpoint.peer_memory import PeerFile
from elastic_runner.checkpoint.plain import check_plain
from elastic_runner.checkpoint.reading import BUFFERS, Reading
from elastic_runner.checkpoint.relay import Relay
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import Damaged
from elastic_runner.storage import Storage, Written
from elastic_runner.storage.faults import mapped
from elastic_runner.storage.protocol import digest_of

log = logging.getLogger(__name__)

T = TypeVar("T")


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
    checked = Checked(storage, manifest, digests=digests, moved=coordinator.moved)
    return (FullSource if manifest.format == "full" else ShardedSource)(checked, coordinator, node)


class Checked:
    """The files of one checkpoint, each compared with the manifest as it is read: what is used is what was checked.

    ``moved``: called as bytes come that the storage does not see.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, *, digests: bool = True, moved: Callable[[], None] = lambda: None
    ) -> None:
        self._storage = storage
        self._moved = moved
        self._directory = paths.data_directory(manifest.step, manifest.attempt)
        self._digests = digests
        self._files = {file.path.rpartition("/")[2]: file for file in manifest.files}
        self._world_size = manifest.world_size

    def path(self, name: str) -> str:
        """Where a data file is."""
        return f"{self._directory}/{name}"

    def file(self, name: str) -> Written:
        """The manifest's word on a data file. Raises Damaged when it names none."""
        if name not in self._files:
            raise Damaged(f"{self.path(name)} is not named by the manifest")
        return self._files[name]

    def largest(self) -> int:
        """Bytes of the largest file."""
        return max(file.size for file in self._files.values())

    def likely_needed(self, rank: int, world_size: int) -> Iterator[str]:
        """Data files that a rank will most likely need some of, and no other rank: those that it wrote."""
        if world_size == self._world_size:
            names = (data_file(rank, number) for number in itertools.count(1))
            yield from itertools.takewhile(lambda name: name in self._files, names)

    def sharded_head(self) -> tuple[Metadata, dict[str, Any]]:
        """What ``.metadata`` says, and the plain data. Raises Damaged, NotData."""
        metadata = parse_metadata(self.read(METADATA), self.path(METADATA), self._files)
        plain: dict[str, Any] = {}
        for name, places in plain_in(metadata).items():
            data = self.read(name)
            plain.update({key: load_plain(io.BytesIO(data[place]), f"{name}: {key}") for key, place in places.items()})
        check_plain(plain, metadata.state_dict_metadata, self.path(METADATA))
        return metadata, plain

    def read(self, name: str) -> bytes:
        """A small file. Raises Damaged when it is not what was written."""
        data = self._right(name, lambda: self._storage.read(self.path(name)), xxhash.xxh3_128_hexdigest)
        if len(data) != (size := self.file(name).size):
            raise Damaged(f"{self.path(name)} has {len(data)} bytes instead of {size}")
        return data

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill ``buffer`` with a file. Raises Damaged when it is not what was written."""
        self._right(name, lambda: self._storage.read_into(self.path(name), buffer), lambda found: found.digest)

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """A file as a local one. Raises Damaged when it is not what was written."""
        with ExitStack() as stack:

            def bring() -> Path:
                stack.close()  # not room for two
                return stack.enter_context(self._storage.local_copy(self.path(name)))

            def digest(local: Path) -> str:
                with mapped(f"read {self.path(name)}"):
                    return digest_of(local, moved=self._moved)

            yield self._right(name, bring, digest)

    def _right(self, name: str, bring: Callable[[], T], digest: Callable[[T], str]) -> T:
        expected = self.file(name).digest
        found = bring()
        if self._digests and digest(found) != expected:
            # Bits can flip on the way, too: what is damaged where it lies is the same a second time.
            found = bring()
            if digest(found) != expected:
                raise Damaged(f"{self.path(name)} has other bytes than were written")
            log.warning(
                "%s came with wrong bytes at first: network, memory or disk are not to be trusted", self.path(name)
            )
        return found


class ShardedSource:
    """Data files are read in rounds, one by each rank of a node at a time, and shared with the node's other ranks."""

    def __init__(self, checked: Checked, coordinator: Coordinator, node: str) -> None:
        self._checked = checked
        self._reading = Reading(checked.read_into, checked.largest())
        self._relay = Relay(coordinator, node, self._reading)
        # The disk need not wait until the ranks have agreed on what they need.
        for name in itertools.islice(checked.likely_needed(coordinator.rank, coordinator.world_size), BUFFERS):
            self._reading.begin(name, checked.file(name).size)

    def head(self) -> tuple[Metadata, dict[str, Any]]:
        """``.metadata``, and what it says is plain data."""
        return self._checked.sharded_head()

    def read(self, items: Sequence[ReadItem], metadata: Metadata, planner: LoadPlanner) -> None:
        """File by file."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in items:
            by_file[metadata.storage_data[item.storage_index].relative_path].append(item)
        copy = _Copy(by_file, metadata, planner)
        self._relay.run(lambda: {name: self._checked.file(name).size for name in by_file}, copy)

    def close(self) -> None:
        """Wait for reads in progress, and let go of the memory."""
        self._reading.close()


class _Copy:
    """Copies what this rank needs of a file."""

    def __init__(self, by_file: Mapping[str, list[ReadItem]], metadata: Metadata, planner: LoadPlanner) -> None:
        self._by_file = by_file
        self._metadata = metadata
        self._planner = planner

    def __call__(self, name: str, file: memoryview | PeerFile) -> None:
        for item in self._by_file.get(name, ()):
            info = self._metadata.storage_data[item.storage_index]
            where = f"{name}: {item.storage_index.fqn}"
            if isinstance(file, memoryview):
                archive = file[info.offset : info.offset + info.length]
                place(self._planner, item, self._tensor(archive, item, where))
            elif not self._fetch(item, file, info):
                place(self._planner, item, self._tensor(file.part(info.offset, info.length), item, where))

    def _fetch(self, item: ReadItem, file: PeerFile, info: _StorageInfo) -> bool:
        """Copy from another process only what is wanted, and straight to its place where that is possible.

        False when that takes the whole archive: of a number, or of another kind than is written here.
        """
        sizes, dtype = self._chunk(item)
        made = self._frame(item, info.length) if sizes else None
        if made is None or file.part(info.offset, len(made.head)) != made.head:
            return False
        row = made.hole // sizes[0]
        start = info.offset + len(made.head) + item.storage_offsets[0] * row
        target = self._planner.resolve_tensor(item).detach()
        if target.shape[1:] == sizes[1:] and target.dtype == dtype and _is_plain(target):
            file.fill(start, target)
            self._planner.commit_tensor(item, target)
            return True
        rows = item.lengths[0]
        found = torch.frombuffer(file.part(start, rows * row), dtype=torch.uint8).view(dtype).view(rows, *sizes[1:])
        narrowed = replace(item, storage_offsets=torch.Size([0, *item.storage_offsets[1:]]))
        place(self._planner, narrowed, found)
        return True

    def _chunk(self, item: ReadItem) -> tuple[torch.Size, torch.dtype]:
        index = item.storage_index
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata) and index.index is not None, "the planner asks for chunks"
        return entry.chunks[index.index].sizes, entry.properties.dtype

    def _frame(self, item: ReadItem, length: int) -> Frame | None:
        """What an archive of ``length`` bytes looks like that holds the chunk as saved here; None for another kind."""
        sizes, dtype = self._chunk(item)
        nbytes = sizes.numel() * dtype.itemsize
        made = frame(dtype, tuple(sizes)) if 0 < nbytes <= length else None
        return made if made is not None and made.size == length else None

    def _tensor(self, archive: memoryview, item: ReadItem, where: str) -> torch.Tensor:
        sizes, dtype = self._chunk(item)
        if sizes.numel() * dtype.itemsize <= len(archive):
            tensor = data_in(archive, dtype, tuple(sizes))
            if tensor is not None:
                return tensor
        return _expect(load_plain(io.BytesIO(archive), where), sizes, dtype, where)  # by another version of torch


def _is_plain(target: torch.Tensor) -> bool:
    """Whether its data is this process's memory, in one piece."""
    return type(target) is torch.Tensor and target.device.type == "cpu" and target.is_contiguous()


def _expect(found: Any, sizes: torch.Size, dtype: torch.dtype, where: str) -> torch.Tensor:
    if not isinstance(found, torch.Tensor):
        raise Damaged(f"{where} is no tensor")
    if found.shape != sizes or found.dtype != dtype or found.layout != torch.strided:
        raise Damaged(f"{where} holds {list(found.shape)} {found.dtype}, not what its metadata says")
    return found


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
        metadata = file.metadata()
        check_plain(file.plain, metadata.state_dict_metadata, self._checked.path(FILE))
        return metadata, file.plain

    def _bring(self) -> FullFile:
        if self._file is None:
            local = self._open.enter_context(self._checked.local_copy(FILE))
            self._local = str(local)
            self._file = FullFile(local, self._checked.path(FILE))
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
        self._coordinator.agree("restore: read", lambda: self._copy(brought[leader], items, metadata, planner))

    def _copy(self, local: str, items: Sequence[ReadItem], metadata: Metadata, planner: LoadPlanner) -> None:
        where = self._checked.path(FILE)
        file = self._file or FullFile(Path(local), where)
        tensors = file.tensors()
        for item in items:
            key = item.storage_index.fqn
            entry = metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            # Another node's copy may, without digests, be another.
            tensor = _expect(tensors.get(key), entry.size, entry.properties.dtype, f"{where}: {key}")
            place(planner, item, tensor)
            self._coordinator.moved()  # the file is read as it is copied

    def close(self) -> None:
        """Let go of the file."""
        self._file = None
        self._open.close()


__all__ = ["Checked", "FullSource", "ShardedSource", "Source", "open_source", "place"]
