"""Keeps PyTorch training going: see README.md.

A public name, or a module, is imported when it is first used: torch takes seconds, and a launcher has to hear signals
before.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_runner import config as config
    from elastic_runner import errors as errors
    from elastic_runner.checkpoint.checkpointer import Checkpointer
    from elastic_runner.config import RunConfig, load_config
    from elastic_runner.data.loader import ElasticLoader
    from elastic_runner.data.sampler import ElasticSampler
    from elastic_runner.data.streams import ShardedStreams
    from elastic_runner.errors import ElasticRunnerError, ExitCode
    from elastic_runner.train.state import TrainState
    from elastic_runner.worker.worker import Worker
else:  # hidden from type checkers, to whom any name would be one of ours
    _HOMES = {
        "Checkpointer": "checkpoint.checkpointer",
        "ElasticLoader": "data.loader",
        "ElasticRunnerError": "errors",
        "ElasticSampler": "data.sampler",
        "ExitCode": "errors",
        "RunConfig": "config",
        "ShardedStreams": "data.streams",
        "TrainState": "train.state",
        "Worker": "worker.worker",
        "load_config": "config",
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module  # here, so as not to be one of our names

        if name in _HOMES:
            value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
            return value
        module = f"{__name__}.{name}"
        try:
            if not name.startswith("_"):
                return import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


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
