"""What a node tells Prometheus: the names of its metrics, what they mean, and how they are written down. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "NodeMetrics", "expose"]


@dataclass(frozen=True, kw_only=True)
class NodeMetrics:
    """One node at one moment. Counts are since its launcher started, over all attempts."""

    ready: bool
    """Whether all workers of the node are in their loop."""
    attempt: int
    """Number of the attempt, alike on all nodes; 0 before the first."""
    world_size: int
    """Ranks in the world; 0 while there is none."""
    restarts: Mapping[str, int]
    """Restarts by cause."""
    step: int | None
    """The last finished step; None before the loop began."""
    steps: int
    """Steps done, those done again included."""
    samples: int
    """Samples of the global batches of these steps."""
    samples_per_second: float
    """Of the last step, its saves left out."""
    goodput: float
    """Part of the time since the launcher started that went into steps which no earlier attempt had done; an
    attempt's first step pays for its set-up and counts for nothing."""
    heartbeat_ages: Mapping[int, float]
    """Seconds since each worker's last sign of life, by rank."""
    checkpoint_age: float | None
    """Seconds since the newest checkpoint was durable; None: none while this launcher lives."""
    saves: int
    """Checkpoints made durable."""
    saves_failed: int
    """Saves that failed while training went on."""
    saves_skipped: int
    """Saves left out because the one before was still going on."""
    save_seconds: float
    """Duration of the last save, beside training; 0 before the first."""
    save_stall: float
    """Seconds in all that training stood still for saves."""


def expose(node: NodeMetrics) -> bytes:
    """The node's metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Once(node))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, node: NodeMetrics) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Each metric with its value."""
        node = self._node
        yield _gauge("ready", "Whether all workers of this node are in their loop.", float(node.ready))
        yield _gauge("attempt", "Number of the attempt, alike on all nodes.", node.attempt)
        yield _gauge("world_size", "Ranks in the world; 0: there is none now.", node.world_size)
        restarts = CounterMetricFamily(
            "elastic_runner_restarts", "Restarts of this node's workers, by what ended the attempt.", labels=["cause"]
        )
        for cause, count in node.restarts.items():
            restarts.add_metric([cause], count)
        yield restarts
        yield _gauge("step", "The last finished optimizer step.", node.step)
        yield _count("steps", "Optimizer steps, those done again after a restart included.", node.steps)
        yield _count("samples", "Samples of the global batches of these steps.", node.samples)
        yield _gauge("samples_per_second", "Of the last step, its saves left out.", node.samples_per_second)
        yield _gauge(
            "goodput", "Part of the time since the launcher started spent in steps that are done for the first time.",
            node.goodput,
        )  # fmt: skip
        ages = GaugeMetricFamily(
            "elastic_runner_heartbeat_age_seconds", "Since a worker's last sign of life.", labels=["rank"]
        )
        for rank, age in node.heartbeat_ages.items():
            ages.add_metric([str(rank)], age)
        yield ages
        yield _gauge(
            "checkpoint_age_seconds", "Since the newest checkpoint was durable; absent until one is.",
            node.checkpoint_age,
        )  # fmt: skip
        yield _count("saves", "Checkpoints made durable.", node.saves)
        yield _count("saves_failed", "Saves that failed while training went on.", node.saves_failed)
        yield _count("saves_skipped", "Saves left out while another one went on.", node.saves_skipped)
        yield _gauge("save_duration_seconds", "Of the last save, written beside training.", node.save_seconds)
        yield _count("save_stall_seconds", "How long training stood still for saves.", node.save_stall)


def _gauge(name: str, meaning: str, value: float | None) -> Metric:
    """``value`` None: no sample."""
    family = GaugeMetricFamily(f"elastic_runner_{name}", meaning)
    if value is not None:
        family.add_metric([], value)
    return family


def _count(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"elastic_runner_{name}", meaning, value=value)
