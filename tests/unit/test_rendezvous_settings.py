"""What --rdzv-conf takes."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from elastic_runner.errors import ConfigError
from elastic_runner.launch.rendezvous.backoff import Backoff
from elastic_runner.launch.rendezvous.settings import Settings, read_settings, storage_options


def test_seconds_and_storage_options_through_torchs_own_parser() -> None:
    given = _parse_rendezvous_config("lease=5,storage.client_kwargs.endpoint_url=http://s3:9000/?a=b,timeout=60")
    assert read_settings(given) == Settings(lease=5.0)
    assert storage_options(given) == {"client_kwargs.endpoint_url": "http://s3:9000/?a=b"}


def test_the_back_off_is_as_asked_for() -> None:
    rules = read_settings({"backoff": "5", "backoff_most": "60"}).rules(min_nodes=1, max_nodes=2)
    assert rules.backoff == Backoff(first=5.0, most=60.0)
    assert read_settings({"backoff": "0"}).backoff == 0.0  # nobody waits


@pytest.mark.parametrize("name", ["storage.key", "storage.secret", "storage.token", "storage.client_kwargs.Password"])
def test_secrets_are_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        storage_options({name: "hunter2"})
    assert "hunter2" not in str(raised.value) and "AWS_SECRET_ACCESS_KEY" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"leese": "5"}, "no leese"),
        ({"lease": "soon"}, "soon"),
        ({"lease": "0"}, "more than 0"),
        ({"lease": "nan"}, "more than 0"),
        ({"backoff": "-1"}, "more than 0"),
        ({"patience": "1", "beat": "1"}, "twice beat"),
    ],
)
def test_what_cannot_work_is_said(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(given)
