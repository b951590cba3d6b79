"""Settings of the rendezvous, from torchrun's flags and ``--rdzv-conf``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from elastic_runner.errors import ConfigError
from elastic_runner.launch.rendezvous.backoff import Backoff
from elastic_runner.launch.rendezvous.membership import Rules
from elastic_runner.storage import SECRET


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Seconds, each of them a key of ``--rdzv-conf``."""

    last_call: float = 5.0
    """How long the first round waits for more nodes once the smallest world is there."""
    rejoin: float = 60.0
    """How long later rounds wait for members that are alive but busy ending their workers."""
    lease: float = 3.0
    """How long a node may be silent before it is lost."""
    beat: float = 0.5
    """How often the host gives a sign of life on the storage."""
    patience: float = 2.0
    """How long a host that cannot be reached may give none before another one takes over; several beats."""
    connect: float = 2.0
    """How long connecting to a host may take."""
    join_timeout: float = 600.0
    """How long to wait for a world."""
    backoff: float = 30.0
    """How long a node that was lost twice in a row waits for a place, doubled with each further one; 0: nobody does."""
    backoff_most: float = 1800.0
    """How long it waits at most; so long after its wait, its losses are forgotten."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 or (field.name == "backoff" and value == 0)):
                raise ConfigError(f"--rdzv-conf {field.name}={value}: must be more than 0 seconds")
        if self.patience < 2 * self.beat:
            raise ConfigError(
                f"--rdzv-conf patience={self.patience:g}: must be at least twice beat={self.beat:g}, "
                "or a host that is alive is taken for dead"
            )

    def rules(self, *, min_nodes: int, max_nodes: int) -> Rules:
        """The host's part of them."""
        return Rules(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            last_call=self.last_call,
            rejoin=self.rejoin,
            lease=self.lease,
            backoff=Backoff(first=self.backoff, most=self.backoff_most),
        )


_STORAGE = "storage."


def storage_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Options of the endpoint's file system, from keys such as ``storage.client_kwargs.endpoint_url``.

    Raises ConfigError for a secret: command lines are seen by everybody on the machine, and torch logs this one.
    """
    options = {name[len(_STORAGE) :]: str(value) for name, value in given.items() if name.startswith(_STORAGE)}
    secrets = sorted(name for name in options if SECRET.search(name))
    if secrets:
        raise ConfigError(
            f"--rdzv-conf {_STORAGE}{secrets[0]}: a secret has no place on a command line; set it where the file "
            "system's own client looks for it, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws"
        )
    return options


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from ``--rdzv-conf``; keys of torch's own that mean nothing here are passed over. Raises ConfigError."""
    known = {field.name for field in fields(Settings)}
    given = {name: value for name, value in given.items() if not name.startswith(_STORAGE)}
    unknown = sorted(set(given) - known - _TORCHS_OWN)
    if unknown:
        raise ConfigError(
            f"--rdzv-conf has no {', '.join(unknown)} with the elastic backend; it has {', '.join(sorted(known))}"
        )
    try:
        return Settings(**{name: float(value) for name, value in given.items() if name in known})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--rdzv-conf: {error}") from None


_TORCHS_OWN = {
    "timeout",
    "rank",
    "is_host",
    "store_type",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
}
