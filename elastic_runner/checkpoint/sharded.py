"""The sharded format: torch's DCP layout (``__<rank>_<n>.distcp`` and ``.metadata``), over our storage.

Stock DCP reads what is written here. Its own writer is not used: it swallows a writer thread's error, keeps the step
waiting while it plans, and writes at half the speed of the disk.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from elastic_runner.checkpoint.capture import Captured
from elastic_runner.checkpoint.image import FileImage
from elastic_runner.checkpoint.layout import DataFile, Piece, data_file, lay_out, pieces_of
from elastic_runner.checkpoint.metadata import METADATA, make_metadata
from elastic_runner.checkpoint.plain import plain_file
from elastic_runner.checkpoint.saver import Part, box, non_finite
from elastic_runner.coordination import Coordinator
from elastic_runner.storage import Storage, Written


class ShardedSaver:
    """Every rank keeps images of its own files; rank 0 adds the plain data and ``.metadata``.

    ``shared``: in memory that is also a file, for a storage that uploads from one.
    """

    def __init__(self, device: torch.device, *, shared: bool) -> None:
        self._device = device
        self._shared = shared
        self._signature: tuple[Any, ...] | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._held: list[Piece] = []
        self._images: list[FileImage] = []
        self._all_files: list[DataFile] = []
        self._captured = Captured()
        self._main = True

    def fits(self, captured: Captured) -> bool:
        """Whether the images were made for tensors of these names, types and shapes."""
        self._signature = captured.signature()
        if self._signature == self._made_for:
            return True
        self._held = pieces_of(captured.tensors)
        return False

    def allocate(self, coordinator: Coordinator) -> None:
        """Agree on who writes what, and make the images."""
        for image in self._images:  # first, so that there is never memory for two
            image.close()
        self._images, self._made_for = [], None
        self._main = coordinator.is_main

        def decide(held: list[list[Piece]]) -> list[list[DataFile]]:
            files = lay_out(held)
            self._all_files = [file for of_rank in files for file in of_rank]
            return files

        mine = coordinator.decide("save: layout", self._held, decide)
        coordinator.agree("save: buffers", lambda: self._make_images(mine))
        self._made_for = self._signature

    def _make_images(self, files: list[DataFile]) -> None:
        self._images = [FileImage(file, shared=self._shared) for file in files]
        if self._device.type == "cuda":
            for image in self._images:
                image.pin()

    def begin(self, captured: Captured) -> None:
        """The images wait for new data."""
        self._captured = Captured(plain=captured.plain, trained=captured.trained)
        for image in self._images:
            image.expect()

    def copy(self, captured: Captured) -> None:
        """Each piece to its place in its file."""
        with torch.no_grad():
            for image in self._images:
                for piece, target in image.targets:
                    target.copy_(box(captured.tensors[piece.key], piece), non_blocking=True)
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                image.filled()

    def abandon(self) -> None:
        """No more data will come."""
        for image in self._images:
            image.filled(failed=True)

    def write(self, storage: Storage, directory: str) -> Part:
        """This rank's files, each as its data comes, and rank 0's small ones beside them."""
        captured = self._captured
        with ThreadPoolExecutor(2, thread_name_prefix="save") as pool:
            checked = pool.submit(lambda: non_finite(self._tensors(), captured.trained))
            head = partial(write_head, storage, f"{directory}/", self._all_files, captured.plain)
            small = pool.submit(lambda: head() if self._main else [])
            large = [storage.write_bulk(f"{directory}/{image.file.name}", image) for image in self._images]
            return Part(files=(*small.result(), *large), non_finite=checked.result())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for image in self._images:
            image.wait()
            for piece, target in image.targets:
                yield piece.key, target


def write_head(storage: Storage, below: str, files: Iterable[DataFile], plain: Mapping[str, Any]) -> list[Written]:
    """The plain data, and ``.metadata``, which knows where everything lies or will lie. ``below``: prefix of paths."""
    name = data_file(0, 0)
    data, where = plain_file(plain, name)
    written = []
    for path, content in ((below + name, data), (below + METADATA, pickle.dumps(make_metadata(files, where)))):
        with storage.writer(path) as stream:
            stream.write(content)
        written.append(stream.written(path))
    return written
