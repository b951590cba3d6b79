"""Which tracker a name means."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Final

from elastic_runner.errors import ConfigError
from elastic_runner.tracking.protocol import Opener

_KNOWN: Final = ("mlflow", "tensorboard", "wandb")
"""Each a module here, and the package that it needs."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError for a tracker that cannot be had here. Nothing is imported but a user's own."""
    for name in names:
        if name not in _KNOWN:
            opener(name)
        elif importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.trackers: {name!r} needs its package: pip install 'elastic-runner[{name}]', on all nodes"
            )


def opener(name: str) -> Opener:
    """Import what opens the tracker ``name``: a known one, or "module:attribute". Raises ConfigError."""
    module, _, attribute = (f"{__package__}.{name}:OPENER" if name in _KNOWN else name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a package of another version than it needs may raise anything
        known = ", ".join(_KNOWN)
        raise ConfigError(f"tracking.trackers: {name!r}: {error}; there are {known}, and module:attribute") from error
    if not isinstance(found, Opener):
        raise ConfigError(f"tracking.trackers: {name!r} is no elastic_runner.tracking.protocol.Opener but {found!r}")
    return found
