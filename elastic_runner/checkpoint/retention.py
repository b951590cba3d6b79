"""Which checkpoints stay: small policies, each of which may keep some, and what no policy can give away. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from elastic_runner.checkpoint.manifest import Checkpoint, Manifest
from elastic_runner.checkpoint.trust import Health, describe_non_finite, health
from elastic_runner.config import CheckpointConfig


class Policy(Protocol):
    """Keeps some of the healthy checkpoints; one stays when any policy keeps it."""

    def choose(self, healthy: Sequence[Manifest]) -> Iterator[tuple[Manifest, str]]:
        """Those that stay of ``healthy`` (one a step, newest first), each with the reason in words."""
        ...


@dataclass(frozen=True)
class Newest:
    """The newest ``count``."""

    count: int

    def choose(self, healthy: Sequence[Manifest]) -> Iterator[tuple[Manifest, str]]:
        """The first ones."""
        for manifest in healthy[: max(0, self.count)]:
            yield manifest, f"one of the newest {self.count}" if self.count > 1 else "the newest"


@dataclass(frozen=True)
class EverySteps:
    """The first at or after each multiple of ``steps``: saves need not fall on the multiples."""

    steps: int

    def choose(self, healthy: Sequence[Manifest]) -> Iterator[tuple[Manifest, str]]:
        """The oldest of each interval but the one before the first multiple."""
        done = 0
        for manifest in reversed(healthy):
            interval = manifest.step // self.steps
            if interval > done:
                done = interval
                yield manifest, f"the first from step {interval * self.steps} on"


@dataclass(frozen=True)
class EveryHours:
    """The first, and then the first that is ``hours`` younger than the last one kept."""

    hours: float

    def choose(self, healthy: Sequence[Manifest]) -> Iterator[tuple[Manifest, str]]:
        """By the writers' clocks, in the order of steps."""
        last: float | None = None
        for manifest in reversed(healthy):
            # A clock that was set back counts as well: else nothing would be kept until it has caught up.
            if last is None or abs(manifest.created - last) >= self.hours * 3600:
                last = manifest.created
                yield manifest, f"one every {self.hours:g} h"


@dataclass(frozen=True)
class Best:
    """The best ``count`` by ``metric``, of those saved with it; of equal ones the newer."""

    count: int
    metric: str
    mode: Literal["min", "max"]

    def choose(self, healthy: Sequence[Manifest]) -> Iterator[tuple[Manifest, str]]:
        """What the manifests say, so that no restart forgets the best score."""
        sign = 1 if self.mode == "min" else -1
        scored = sorted(
            (m for m in healthy if self.metric in m.metrics), key=lambda m: (sign * m.metrics[self.metric], -m.step)
        )
        for place, manifest in enumerate(scored[: max(0, self.count)], 1):
            yield manifest, f"number {place} by {self.metric} ({manifest.metrics[self.metric]:g})"


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What stays."""

    policies: tuple[Policy, ...]
    """Choose among the healthy ones."""
    unhealthy: int
    """Others stay, for people to look at, while fewer healthy ones than this are newer; non-finite ones, of which a
    run can make any number, only the newest so many."""


def retention_of(config: CheckpointConfig) -> Retention:
    """What the configuration asks for."""
    policies: list[Policy] = [Newest(config.keep)]
    if config.keep_every is not None:
        policies.append(EverySteps(config.keep_every))
    if config.keep_hours is not None:
        policies.append(EveryHours(config.keep_hours))
    if config.keep_best:
        policies.append(Best(config.keep_best, config.best_metric, config.best_mode))
    return Retention(policies=tuple(policies), unhealthy=config.keep)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to become of each checkpoint."""

    delete: dict[str, str]
    """Paths of the manifests that go, oldest first, each with the reason in words."""
    keep: dict[str, str]
    """Paths of the manifests that stay, newest first, each with the reasons in words."""


def decide(
    checkpoints: Sequence[Checkpoint],
    retention: Retention,
    *,
    newest: Manifest,
    unusable: Collection[str] = (),
    now: float,
) -> Decision:
    """Judge ``checkpoints`` (newest first) after ``newest`` was committed.

    Whatever the policies say, these stay: ``newest``, the newest healthy one, what is pinned or being read at ``now``,
    and what comes after ``newest``, which this run did not continue from (it is distrusted, or somebody wants it).
    ``unusable`` holds paths of manifests found damaged. Those, suspects and non-finite ones take no healthy one's
    place.
    """
    past = [c for c in checkpoints if _place(c.manifest) <= _place(newest)]
    healthy = _one_a_step([c.manifest for c in past if health(c, unusable) == Health.HEALTHY])
    whys: dict[str, list[str]] = {c.manifest.path: list(_untouchable(c, newest, now)) for c in checkpoints}
    for policy in retention.policies:
        for manifest, why in policy.choose(healthy):
            whys[manifest.path].append(why)
    if healthy and not whys[healthy[0].path]:
        whys[healthy[0].path].append("the newest healthy one")
    chosen, delete, non_finite = {m.path for m in healthy}, {}, 0
    for checkpoint in past:
        manifest = checkpoint.manifest
        if manifest.path in chosen:
            condition = ""
        else:
            condition = _condition(checkpoint, unusable)
            non_finite += bool(manifest.non_finite)
            newer = sum(_place(m) > _place(manifest) for m in healthy)
            crowded = bool(manifest.non_finite) and non_finite > retention.unhealthy
            if newer < retention.unhealthy and not crowded:
                whys[manifest.path].append(f"{condition}; left to be looked at")
        if _place(manifest) == _place(newest) and not whys[manifest.path]:
            whys[manifest.path].append("the latest")
        if not whys[manifest.path]:
            delete[manifest.path] = f"{condition}, and newer ones are there" if condition else "no policy keeps it"
    return Decision(
        delete=dict(reversed(delete.items())), keep={path: "; ".join(why) for path, why in whys.items() if why}
    )


def _place(manifest: Manifest) -> tuple[int, int]:
    return manifest.step, manifest.attempt


def _one_a_step(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The newest attempt's of each step."""
    first: dict[int, Manifest] = {}
    for manifest in manifests:
        first.setdefault(manifest.step, manifest)
    return list(first.values())


def _untouchable(checkpoint: Checkpoint, newest: Manifest, now: float) -> Iterator[str]:
    if _place(checkpoint.manifest) > _place(newest):
        yield f"newer than step {newest.step}, from which the run goes on"
    if checkpoint.marks.pinned:
        yield "pinned"
    if checkpoint.marks.being_read(now):
        yield "being read"


def _condition(checkpoint: Checkpoint, unusable: Collection[str]) -> str:
    """Why the policies could not choose it, in words."""
    if checkpoint.manifest.non_finite:
        return describe_non_finite(checkpoint.manifest)
    if checkpoint.manifest.path in unusable:
        return "damaged"
    if checkpoint.marks.suspect:
        return "suspect"
    return "the step was saved again by a later attempt"
