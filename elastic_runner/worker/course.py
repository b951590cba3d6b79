"""How this attempt has come along: what it started from, where it stands, and what of it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_runner import paths
from elastic_runner.data.source import Span
from elastic_runner.history import End
from elastic_runner.train.state import TrainState
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
    restored: str | None = None
    """Path of the manifest that it started from; None: from step 0."""
    in_memory: bool = False
    """Whether it went on from a snapshot in memory; ``restored`` is then the checkpoint behind that."""
    saved_step: int | None = None
    """Step of the newest checkpoint that it committed."""

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

    def position(self) -> tuple[int, int]:
        """Attempt and last finished step, as a heartbeat has them: -1 before the loop began."""
        return self.attempt, -1 if self.done is None else self.done

    def place(self, url: str, options: dict[str, str]) -> RunPlace:
        """For the launcher. ``url``, ``options``: of the run directory."""
        return RunPlace(url=url, options=options, attempt=self.attempt, restored=self.restored, saved=self.saved_path)

    def end(self, *, kind: str, rank: int, message: str) -> End:
        """Of the attempt, if it fails now. ``kind``: type of the error; ``rank``: whose it is."""
        return End(
            attempt=self.attempt,
            kind=kind,
            step=None if self.done is None else self.done + 1,
            restored=self.restored,
            saved=self.saved_path,
            rank=rank,
            message=message,
            samples=self._samples(),
            in_memory=self.in_memory,
        )

    def _samples(self) -> str:
        span = self.span
        return "" if span is None else f"epoch {span.epoch}, positions {span.first} to {span.last - 1}"
