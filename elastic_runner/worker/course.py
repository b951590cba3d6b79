"""How this attempt has come along: what it started from, where it stands, and what of it is kept."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from elastic_runner import paths
from elastic_runner.data.source import Span
from elastic_runner.heartbeat import Figures
from elastic_runner.history import DOUBTFUL, End
from elastic_runner.train.state import TrainState
from elastic_runner.train.step import Step
from elastic_runner.verdict import RunPlace


@dataclass(kw_only=True)
class Course:
    """The worker renews it as it goes; what is said of the attempt comes from here."""

    attempt: int = 0
    """The attempt's number; 0 until it has one."""
    state: TrainState | None = None
    """What is trained; None before the loop began."""
    span: Span | None = None
    """The samples of the step under way."""
    number: int = 0
    """The step that these are of."""
    restored: str | None = None
    """Path of the manifest that it started from; None: from step 0."""
    in_memory: bool = False
    """Whether it went on from a snapshot in memory; ``restored`` is then the checkpoint behind that."""
    saved_step: int | None = None
    """Step of the newest checkpoint that it committed."""
    figures: Figures = field(default_factory=Figures)
    """Counts and durations, for the launcher's metrics."""

    @property
    def done(self) -> int | None:
        """The last finished step; None before the loop began."""
        return self.state.step if self.state else None

    @property
    def step(self) -> int:
        """The last finished step; 0 before the loop began."""
        return self.done or 0

    @property
    def saved_path(self) -> str | None:
        """Path of the newest manifest that it committed."""
        return None if self.saved_step is None else paths.manifest(self.saved_step, self.attempt)

    @property
    def in_memory_only(self) -> bool:
        """Whether the state that it began with is nowhere else yet."""
        return self.in_memory and self.saved_step is None

    @property
    def kept(self) -> bool:
        """Whether nothing is lost by leaving now: the state is saved, or as it was found."""
        unchanged = self.state is None or self.state.step == self.state.begun_at
        return self.saved_step == self.step or (unchanged and not self.in_memory_only)

    def early(self, why: str, target: int) -> str:
        """What is said of leaving before ``target``, for the reason ``why``; nothing where that is reached."""
        kept = "saved" if self.kept else "NOT saved (call checkpointer.maybe_save)"
        return "" if self.step >= target else f"{why}; {kept} at step {self.step} of {target}"

    def follow(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Hand the steps on, and know of each what it trains on."""
        for step in steps:
            self.span, self.number = step.span, step.number
            yield step
            self.figures.steps += 1
            self.figures.samples += step.span.last - step.span.first

    def took(self, phase: str, seconds: float) -> None:
        """The program has left a phase."""
        if phase == "save":
            self.figures.save_stall += seconds
        elif phase == "step" and self.span is not None and seconds > 0:
            self.figures.step_seconds += seconds
            self.figures.last_rate = (self.span.last - self.span.first) / seconds

    def wrote(self, seconds: float) -> None:
        """A save has ended beside training."""
        self.figures.save_seconds = seconds

    def saved(self, step: int) -> None:
        """A checkpoint is durable."""
        self.saved_step = step
        self.figures.saves += 1
        self.figures.saved_at = time.monotonic()

    def not_saved(self, *, skipped: bool) -> None:
        """A save was skipped or has failed."""
        if skipped:
            self.figures.saves_skipped += 1
        else:
            self.figures.saves_failed += 1

    def position(self) -> tuple[int, int]:
        """Attempt and last finished step, as a heartbeat has them: -1 before the loop began."""
        return self.attempt, -1 if self.done is None else self.done

    def place(self, url: str, options: dict[str, str]) -> RunPlace:
        """For the launcher. ``url``, ``options``: of the run directory."""
        return RunPlace(url=url, options=options, attempt=self.attempt, restored=self.restored, saved=self.saved_path)

    def end(self, *, kind: str, rank: int, message: str) -> End:
        """Of the attempt, if it fails now. ``kind``: type of the error; ``rank``: whose it is."""
        agreed = self.state.agreed_at if self.state else None
        under_way = None if self.done is None else self.done + 1
        span = self.span if self.number == under_way else None  # else it failed between two steps
        doubtful = kind in DOUBTFUL and (self.saved_step or 0) > (agreed or 0)
        return End(
            attempt=self.attempt,
            kind=kind,
            step=under_way,
            restored=self.restored,
            saved=None if doubtful else self.saved_path,
            rank=rank,
            message=message,
            epoch=None if span is None else span.epoch,
            first=None if span is None else span.first,
            last=None if span is None else span.last,
            in_memory=self.in_memory,
            agreed=agreed,
        )
