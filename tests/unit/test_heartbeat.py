"""The heartbeat's record: whole or not at all, wherever a write is cut."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner import heartbeat
from elastic_runner.heartbeat import SIZE, Beat, Figures, Heart, Lane, open_page, read

Said = tuple[str, float, float, int, int]
said = st.tuples(
    st.text(max_size=60),
    st.floats(0, 1e9),
    st.floats(0, 1e6),
    st.integers(0, 2**40),
    st.integers(-1, 2**40),
)


class Cut(bytearray):
    """A page whose next write ends after so many bytes."""

    keep: int | None = None

    def __setitem__(self, where, data) -> None:  # type: ignore[no-untyped-def, override]
        if self.keep is not None:
            data = data[: self.keep] + self[where][self.keep :]
        super().__setitem__(where, data)


def write(heart: Heart, position: list[int], one: Said) -> None:
    phase, since, limit, progress, step = one
    position[1] = step
    heart.beat(phase, since=since, limit=limit, progress=progress)


def timeless(beat: Beat | None) -> Beat | None:
    """Without when it was written."""
    return beat and replace(beat, at=0.0)


@given(st.lists(said, min_size=1, max_size=4), said, st.data())
def test_a_write_cut_at_any_byte_leaves_the_old_record_or_the_new(before: list[Said], last: Said, data: st.DataObject):
    page, position = Cut(SIZE), [7, -1]
    heart = Heart(page, Lane.TRAINING, rank=3, position=lambda: (position[0], position[1]))
    for one in before:
        write(heart, position, one)
    old = read(page, Lane.TRAINING)
    whole = Cut(page)
    second = Heart(whole, Lane.TRAINING, rank=3, position=lambda: (position[0], position[1]))
    second._number = heart._number
    write(second, position, last)
    new = read(whole, Lane.TRAINING)
    assert old is not None and new is not None and new.number == old.number + 1
    page.keep = data.draw(st.integers(0, heartbeat._COPY))
    write(heart, position, last)
    assert timeless(read(page, Lane.TRAINING)) in (timeless(old), timeless(new))
    page.keep = None
    write(heart, position, last)
    after = read(page, Lane.TRAINING)
    assert after is not None and after.number == new.number + 1, "a writer that goes on is read again"


def test_every_cut_of_the_first_record_is_nothing_or_all() -> None:
    whole = bytearray(SIZE)
    figures = Figures(steps=3, samples=24, last_rate=7.5, saved_at=9.0)
    heart = Heart(whole, Lane.SAVING, rank=0, position=lambda: (1, 41), figures=figures)
    heart.beat("save", since=2.5, limit=30)
    length = len(bytes(whole).rstrip(b"\0"))
    start = next(i for i, byte in enumerate(whole) if byte)
    found = []
    for cut in range(start, length + 1):
        torn = bytearray(whole[:cut]) + bytearray(SIZE - cut)
        found.append(read(torn, Lane.SAVING))
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] is not None and 0 < time.monotonic() - found[-1].at < 60
    assert timeless(found[-1]) == Beat(
        number=1, pid=os.getpid(), rank=0, attempt=1, step=41, progress=0, since=2.5, limit=30.0, learned=False,
        phase="save", figures=figures,
    )  # fmt: skip


@given(st.integers(0, 2 * heartbeat._COPY - 1), st.integers(1, 255))
def test_a_changed_byte_is_no_record_or_changes_nothing(at: int, flip: int) -> None:
    page = bytearray(SIZE)
    Heart(page, Lane.TRAINING, rank=1, position=lambda: (1, 2)).beat("step", since=3, limit=4)
    whole = read(page, Lane.TRAINING)
    page[at] ^= flip
    assert read(page, Lane.TRAINING) in (None, whole)
    assert whole is not None


def test_lanes_do_not_touch_each_other() -> None:
    page = bytearray(SIZE)
    hearts = [Heart(page, lane, rank=1, position=lambda: (1, 5)) for lane in Lane]
    for turn in range(5):
        for heart, phase in zip(hearts, ("step", "save"), strict=True):
            heart.beat(phase, since=turn, limit=1)
    beats = [read(page, lane) for lane in Lane]
    assert [(beat.phase, beat.since, beat.number) for beat in beats if beat] == [("step", 4, 5), ("save", 4, 5)]


def test_what_others_wrote_is_forgotten_and_what_the_new_one_has_begun_to_write_is_kept() -> None:
    page = bytearray(SIZE)
    old = Heart(page, Lane.TRAINING, rank=0, position=lambda: (1, 100))
    old._pid = os.getpid() + 1
    for _ in range(9):
        old.beat("step", since=1, limit=1)
    Heart(page, Lane.TRAINING, rank=0, position=lambda: (2, -1)).beat("setup", since=50, limit=180)
    heartbeat.forget_others(page, os.getpid())
    found = read(page, Lane.TRAINING)
    assert found is not None and (found.phase, found.number) == ("setup", 1)


def test_a_page_is_shared_by_its_path(tmp_path) -> None:  # type: ignore[no-untyped-def]
    handle = os.memfd_create("test")
    os.ftruncate(handle, SIZE)
    with open_page(f"/proc/{os.getpid()}/fd/{handle}") as mine, open_page(f"/proc/self/fd/{handle}") as other:
        Heart(mine, Lane.TRAINING, rank=2, position=lambda: (3, 4)).beat("load", since=1, limit=2)
        found = read(other, Lane.TRAINING)
    os.close(handle)
    assert found is not None and (found.rank, found.attempt, found.step, found.phase) == (2, 3, 4, "load")
    (tmp_path / "empty").touch()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises((OSError, ValueError)):
            open_page(str(path))
