"""What a worker counts and measures for its launcher's metrics, and that a beat carries it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from elastic_runner.config import TimeoutConfig
from elastic_runner.data.source import Span
from elastic_runner.environment import Environment
from elastic_runner.heartbeat import SIZE, Figures, Lane, read
from elastic_runner.worker.course import Course
from elastic_runner.worker.watches import watches


def test_steps_and_saves_are_counted() -> None:
    course = Course()
    spans = [Span(epoch=0, first=first, last=first + 8) for first in (0, 8, 16)]
    steps: Any = [SimpleNamespace(number=number, span=span) for number, span in enumerate(spans, start=1)]
    for step in course.follow(steps):
        assert course.span is step.span
        if step is steps[2]:
            break  # in the middle of it: not done
    assert (course.figures.steps, course.figures.samples) == (2, 16)
    before = time.monotonic()
    course.saved(2)
    course.not_saved(skipped=True)
    course.not_saved(skipped=False)
    course.not_saved(skipped=False)
    figures = course.figures
    assert (course.saved_step, figures.saves, figures.saves_skipped, figures.saves_failed) == (2, 1, 1, 2)
    assert before <= figures.saved_at <= time.monotonic()


def test_a_beat_tells_how_long_steps_and_saves_took() -> None:
    handle = os.memfd_create("test")
    os.ftruncate(handle, SIZE)
    place = Environment(heartbeats=(f"/proc/self/fd/{handle}",))
    course = Course(span=Span(epoch=0, first=0, last=30))
    training, saving = watches(TimeoutConfig(), place, training=str, saving=str, course=course)
    with training.phase("first_step"):
        time.sleep(0.01)
    before = time.monotonic()
    with training.phase("step"):
        with training.phase("save"):
            time.sleep(0.05)
        time.sleep(0.02)
    whole = time.monotonic() - before
    with saving.phase("save"):
        time.sleep(0.03)
    with training.phase("load"):
        beat = read(bytearray(os.pread(handle, SIZE, 0)), Lane.TRAINING)
    training.close()
    saving.close()
    os.close(handle)
    assert beat is not None
    told: Figures = beat.figures
    assert told == course.figures
    assert told.step_seconds >= 0.02 and told.save_stall >= 0.05
    assert told.step_seconds + told.save_stall <= whole, "a save within a step is no part of it"
    assert told.save_seconds >= 0.03
    assert told.last_rate == 30 / told.step_seconds
