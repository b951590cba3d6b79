"""A worker's two clocks: for what the program does, and for the save that goes on beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from mmap import mmap

from elastic_runner.config import TimeoutConfig
from elastic_runner.environment import Environment
from elastic_runner.heartbeat import Heart, Lane, Moved, open_page
from elastic_runner.worker.course import Course
from elastic_runner.worker.deadline import PhaseWatch
from elastic_runner.worker.limits import deadlines, learners

log = logging.getLogger(__name__)


def watches(
    timeouts: TimeoutConfig,
    environment: Environment,
    *,
    training: Callable[[], str],
    saving: Callable[[], str],
    course: Course,
) -> tuple[PhaseWatch, PhaseWatch]:
    """The watch of the program and the one of the save.

    ``training``, ``saving``: describe this process in messages. ``course``: what heartbeats tell, and durations go to.
    """
    limits, page = deadlines(timeouts), _page(environment)
    moved = Moved(page)

    def heart(lane: Lane) -> Heart | None:
        if page is None:
            return None
        return Heart(page, lane, rank=environment.rank, position=course.position, figures=course.figures)

    return (
        PhaseWatch(
            limits, training, learned=learners(timeouts), heart=heart(Lane.TRAINING), took=course.took, moved=moved
        ),
        PhaseWatch(
            limits, saving, heart=heart(Lane.SAVING), took=lambda _, seconds: course.wrote(seconds), moved=moved
        ),
    )


def _page(environment: Environment) -> mmap | None:
    if environment.local_rank >= len(environment.heartbeats):
        return None
    try:
        return open_page(environment.heartbeats[environment.local_rank])
    except (OSError, ValueError) as error:
        log.warning("no heartbeat, deadlines are judged in this process: %s", error)
        return None
