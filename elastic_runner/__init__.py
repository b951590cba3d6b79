"""Keeps PyTorch training going: see README.md."""

from elastic_runner.checkpoint.checkpointer import Checkpointer
from elastic_runner.config import RunConfig, load_config
from elastic_runner.data.loader import ElasticLoader
from elastic_runner.data.sampler import ElasticSampler
from elastic_runner.data.streams import ShardedStreams
from elastic_runner.errors import ElasticRunnerError, ExitCode
from elastic_runner.train.state import TrainState
from elastic_runner.worker.worker import Worker

__all__ = [
    "Checkpointer",
    "ElasticLoader",
    "ElasticRunnerError",
    "ElasticSampler",
    "ExitCode",
    "RunConfig",
    "ShardedStreams",
    "TrainState",
    "Worker",
    "load_config",
]
