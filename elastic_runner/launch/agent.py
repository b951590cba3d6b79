"""torch's agent, but for one thing: it does not start workers again when one of them said that it is of no use.

Private names of torch, read in 2.13: ``launcher.api.launch_agent`` builds the agent from the name
``LocalElasticAgent`` in its module; ``SimpleElasticAgent._restart_workers`` is called for every restart.
tests/unit/test_torch_private.py fails when they change.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.launcher.api as api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from elastic_runner import verdict
from elastic_runner.verdict import Verdict


class EndOfJob(Exception):
    """The workers are not to be started again."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


@contextmanager
def heeding_verdicts(directory: str) -> Iterator[None]:
    """Within, torchrun's agent raises EndOfJob instead of restarting after a final verdict in ``directory``."""

    class Agent(LocalElasticAgent):
        def _restart_workers(self, worker_group: Any) -> None:
            given = verdict.read(directory)
            if given is not None and given.final:
                raise EndOfJob(given)
            verdict.clear(directory)
            # By SIGTERM, workers would take it for a preemption, agree with peers that go on to stop, and end the job.
            self._shutdown(signal.SIGKILL)
            super()._restart_workers(worker_group)

    original = api.LocalElasticAgent
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        yield
    finally:
        api.LocalElasticAgent = original  # type: ignore[misc]
