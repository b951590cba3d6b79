"""Frames: the bytes that torch.save would write, with the data put in afterwards."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from elastic_runner.checkpoint.frames import Frame, _Sink, data_in, frame


def saves(dtype: torch.dtype) -> bool:
    """Whether torch.save knows the type; not so those of less than a byte. Quantized tensors are refused elsewhere."""
    if str(dtype).startswith("torch.q"):
        return False
    try:
        torch.save(torch.empty(1, dtype=dtype), io.BytesIO())
    except (RuntimeError, KeyError):
        return False
    return True


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # of ComplexHalf
    DTYPES = sorted(
        {value for value in vars(torch).values() if isinstance(value, torch.dtype) and saves(value)}, key=str
    )
SHAPES = [(), (0,), (7,), (3, 0, 2), (33, 65)]
KINDS = {torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn}


def tensor(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Of random bytes: NaN payloads and all."""
    raw = torch.empty(sizes, dtype=dtype)
    flat = raw.view(-1).view(torch.uint8)
    flat.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, flat.shape, dtype=torch.uint8))
    return raw


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def archive(value: torch.Tensor) -> bytearray:
    made = frame(value.dtype, tuple(value.shape))
    return bytearray(made.head + bits(value) + made.tail)


def test_the_list_of_types_has_the_unusual_ones() -> None:
    assert {torch.bfloat16, torch.float8_e5m2fnuz, torch.complex32, torch.complex128, torch.uint64} <= set(DTYPES)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_what_is_framed(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    value = tensor(dtype, sizes)
    whole = archive(value)
    loaded = torch.load(io.BytesIO(whole), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, value.shape, value.stride())
    assert bits(loaded) == bits(value)
    seen = data_in(memoryview(whole), dtype, sizes)
    assert seen is not None and (seen.dtype, seen.shape, bits(seen)) == (dtype, value.shape, bits(value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_frame_is_what_torch_writes_but_for_checksums(dtype: torch.dtype) -> None:
    """Fails when ``skip_data`` or the archive change with a version of torch."""
    value = tensor(dtype, (5, 3))
    stream = io.BytesIO()
    torch.save(value, stream)
    made, stock = frame(dtype, (5, 3)), stream.getvalue()
    assert (made.size, made.hole) == (len(stock), value.nbytes)
    assert stock[: len(made.head) + made.hole] == made.head + bits(value)
    ours, theirs = (zipfile.ZipFile(io.BytesIO(data)) for data in (archive(value), stock))
    assert [e.header_offset for e in ours.infolist()] == [e.header_offset for e in theirs.infolist()]
    # The id is a digest of the checksums.
    same = [name for name in ours.namelist() if not name.endswith(("/data/0", "/serialization_id"))]
    assert {name: ours.read(name) for name in same} == {name: theirs.read(name) for name in same}
    assert ours.namelist() == theirs.namelist() and len(same) == len(ours.namelist()) - 2
    seen = data_in(memoryview(bytearray(stock)), dtype, (5, 3))
    assert seen is not None and bits(seen) == bits(value)


def test_the_data_is_aligned_and_not_copied() -> None:
    value = tensor(torch.float32, (4, 4))
    made = frame(torch.float32, (4, 4))
    whole = archive(value)
    assert len(made.head) % 64 == 0
    seen = data_in(memoryview(whole), torch.float32, (4, 4))
    assert seen is not None
    whole[len(made.head) : len(made.head) + made.hole] = bytes(made.hole)
    assert not seen.any()


@pytest.mark.parametrize("sizes", [(2**32 + 5,), (3, 2**31)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16], ids=str)
def test_more_than_4_gib(dtype: torch.dtype, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """In a sparse file, whose pages nobody touches."""
    made = frame(dtype, sizes)
    elements = torch.Size(sizes).numel()
    assert made.hole == elements * dtype.itemsize
    assert len(made.head) + len(made.tail) < 4096
    file = tmp_path / "sparse"
    with file.open("wb") as stream:
        stream.write(made.head)
        stream.seek(made.hole, io.SEEK_CUR)
        stream.write(made.tail)
    assert file.stat().st_size == made.size
    loaded = torch.load(file, weights_only=True, mmap=True)
    assert (loaded.dtype, tuple(loaded.shape), loaded.is_contiguous()) == (dtype, sizes, True)
    assert loaded.flatten()[-1].item() == 0


def shortened(whole: bytearray, made: Frame) -> bytearray:
    return whole[:-1]


def lengthened(whole: bytearray, made: Frame) -> bytearray:
    return whole + b"x"


def other_head(whole: bytearray, made: Frame) -> bytearray:
    whole[len(made.head) // 2] ^= 1
    return whole


def torn_head(whole: bytearray, made: Frame) -> bytearray:
    whole[: len(made.head)] = bytes(len(made.head))
    return whole


def shifted(whole: bytearray, made: Frame) -> bytearray:
    return bytearray(b"\0") + whole[:-1]


def nothing(whole: bytearray, made: Frame) -> bytearray:
    return bytearray()


@pytest.mark.parametrize("spoil", [shortened, lengthened, other_head, torn_head, shifted, nothing])
@pytest.mark.parametrize("dtype", sorted(KINDS, key=str), ids=str)
def test_what_is_no_frame_is_not_looked_into(dtype: torch.dtype, spoil: object) -> None:
    made = frame(dtype, (3, 5))
    assert callable(spoil)
    assert data_in(memoryview(spoil(archive(tensor(dtype, (3, 5))), made)), dtype, (3, 5)) is None


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.float32, (5, 3)), (torch.float32, (15,)), (torch.int32, (3, 5)), (torch.float16, (3, 5))],
)
def test_a_frame_of_another_tensor_is_not_taken_for_it(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    assert data_in(memoryview(archive(tensor(dtype, sizes))), torch.float32, (3, 5)) is None


def test_an_archive_laid_out_otherwise_is_not_taken_for_a_frame() -> None:
    """A view's storage holds more than the view: torch.load reads it, we look away."""
    stream = io.BytesIO()
    torch.save(torch.arange(30, dtype=torch.float32).view(6, 5)[::2], stream)
    assert data_in(memoryview(bytearray(stream.getvalue())), torch.float32, (3, 5)) is None


def test_a_second_skip_is_refused() -> None:
    sink = _Sink()
    sink.write(b"head")
    sink.seek(10, io.SEEK_CUR)
    sink.write(b"tail")
    with pytest.raises(io.UnsupportedOperation):
        sink.seek(10, io.SEEK_CUR)
    with pytest.raises(io.UnsupportedOperation):
        _Sink().seek(10)
    assert (bytes(sink.head), sink.hole, bytes(sink.tail)) == (b"head", 10, b"tail")
