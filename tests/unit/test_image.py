"""Buffers: shared while they live, given back when they go; images: whole files that only lack their data."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_runner.checkpoint import image as image_module
from elastic_runner.checkpoint.image import FileImage, SharedBuffer
from elastic_runner.checkpoint.layout import files_of, pieces_of
from elastic_runner.errors import SaveFailed


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:elastic_runner")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    gc.collect()
    before = handles(), mappings()
    yield
    gc.collect()
    assert (handles(), mappings()) == before


def image(state: dict[str, torch.Tensor]) -> FileImage:
    (file,) = files_of(0, pieces_of(state))
    return FileImage(file, shared=True)


STATE = {
    "matrix": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "flags": torch.tensor([True, False, True]),
    "half": torch.ones(5, dtype=torch.bfloat16),
}


def fill(made: FileImage, state: dict[str, torch.Tensor]) -> None:
    for piece, target in made.targets:
        target.copy_(state[piece.key])
    made.filled()


def test_others_see_the_same_bytes() -> None:
    buffer = SharedBuffer(10_000)
    buffer.view[5] = 77
    with buffer.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as seen:
        assert len(seen) == 10_000 and seen[5] == 77
        seen[6] = 78
    assert buffer.view[6] == 78
    buffer.close()


def test_close_gives_the_memory_back_and_can_be_repeated() -> None:
    before = handles()
    buffer = SharedBuffer(10_000)
    assert handles() > before and mappings() == 1
    path = buffer.path
    for _ in range(2):
        buffer.close()
    assert (handles(), mappings(), len(buffer.view)) == (before, 0, 0)
    assert not path.exists() or path.stat().st_size != 10_000


def test_a_buffer_that_is_forgotten_gives_its_memory_back() -> None:
    SharedBuffer(10_000)
    assert mappings() == 0


def test_what_looks_into_a_closed_buffer_stays_valid() -> None:
    buffer = SharedBuffer(8192)
    seen = torch.frombuffer(buffer.view, dtype=torch.uint8)
    seen.fill_(9)
    buffer.close()
    del buffer
    gc.collect()
    assert mappings() == 1 and (seen == 9).all()
    del seen


@pytest.mark.parametrize("broken", ["memfd_create", "ftruncate"])
def test_a_buffer_that_cannot_be_had_leaves_nothing(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, refuse)
        with pytest.raises(OSError, match="too many"):
            SharedBuffer(100)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_said_when_such_a_buffer_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", lambda *arguments: (_ for _ in ()).throw(OSError("none left")))
    with pytest.raises(OSError, match="none left"):
        SharedBuffer(100)
    gc.collect()


def test_the_path_is_a_whole_file_that_torch_reads() -> None:
    made = image(STATE)
    fill(made, STATE)
    assert made.path.stat().st_size == made.file.size
    whole = made.path.read_bytes()
    assert b"".join(bytes(block) for block in made.blocks()) == whole
    for placed in made.file.pieces:
        with made.path.open("rb") as file:
            file.seek(placed.offset)
            archive = file.read(placed.length)
        path = Path(f"/dev/shm/h5_{os.getpid()}")
        path.write_bytes(archive)
        try:
            loaded = torch.load(path, weights_only=True)
        finally:
            path.unlink()
        assert torch.equal(loaded, STATE[placed.piece.key]) and loaded.dtype == STATE[placed.piece.key].dtype


def test_an_image_is_filled_anew_for_each_save() -> None:
    made = image(STATE)
    fill(made, STATE)
    first = b"".join(bytes(block) for block in made.blocks())
    made.expect()
    fill(
        made, {key: tensor.logical_not() if tensor.dtype == torch.bool else tensor + 1 for key, tensor in STATE.items()}
    )
    second = b"".join(bytes(block) for block in made.blocks())
    made.expect()
    fill(made, STATE)
    assert b"".join(bytes(block) for block in made.blocks()) == first != second


def test_blocks_wait_for_the_data() -> None:
    made = image(STATE)
    taken: list[bytes] = []
    reader = threading.Thread(target=lambda: taken.extend(bytes(block) for block in made.blocks()))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive() and not taken
    fill(made, STATE)
    reader.join(60)
    assert b"".join(taken) == made.path.read_bytes()


def test_data_that_will_not_come_fails_the_writer_and_not_the_save_after() -> None:
    made = image(STATE)
    made.filled(failed=True)
    with pytest.raises(SaveFailed, match="could not be copied"):
        list(made.blocks())
    made.expect()
    fill(made, STATE)
    assert list(made.blocks())


def test_blocks_are_page_aligned_and_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "BLOCK_BYTES", 4096)
    made = image({"t": torch.zeros(5000)})
    made.filled()
    blocks = list(made.blocks())
    assert [len(block) for block in blocks[:-1]] == [4096] * (len(blocks) - 1)
    assert sum(len(block) for block in blocks) == made.file.size
    assert all(torch.frombuffer(block, dtype=torch.uint8).data_ptr() % 4096 == 0 for block in blocks)


def test_images_leave_no_handle_behind() -> None:
    images = [image(STATE) for _ in range(20)]
    targets = [target for made in images for _, target in made.targets]
    del images
    gc.collect()
    assert mappings() == 20, "a copy may still be going on into them"
    del targets
    gc.collect()
    assert mappings() == 0
