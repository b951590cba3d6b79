"""One run, asked over HTTP before, while and after it trains, and around the loss of a worker."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_runner.chaos.driver import ObservedRun, launch_command
from elastic_runner.launch.health import WATCHING

RECIPE = ("-m", "elastic_runner.recipes.digits", "--training.max-steps", "60", "--checkpoint.every", "15")


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def values(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(ask(f"{url}/metrics")[1])
    return {"".join([s.name, *s.labels.values()]).removeprefix("elastic_runner_"): s.value for f in families
            for s in f.samples}  # fmt: skip


def where(run: ObservedRun) -> str:
    end = time.monotonic() + 60
    while not (
        said := re.search(r"health at (http://127\.0\.0\.1:\d+)/live, /ready and /metrics", run.log.read_text())
    ):
        assert run.process.poll() is None and time.monotonic() < end, run.log.read_text()
        time.sleep(0.05)
    return said.group(1)


def test_health_while_it_trains_and_after_a_worker_is_lost(tmp_path: Path) -> None:
    with ObservedRun(tmp_path / "run", launch_command(2, "--health=0", *RECIPE)) as run:
        url = where(run)
        assert (ask(f"{url}/live")[0], ask(f"{url}/ready")[0]) == (200, 503)
        seen = {}
        for record in run.records():
            if record["event"] == "step" and record["step"] in (25, 50):
                assert ask(f"{url}/live") == (200, f"{WATCHING}\n")
                assert ask(f"{url}/ready") == (200, "2 workers in their loop\n")
                seen[record["step"]] = values(url)
                if record["step"] == 25:
                    run.kill(1)
        assert run.process.wait() == 0, run.log.read_text()
    before, after = seen[25], seen[50]
    assert before["restarts_totalcrash"] == 0 and after["restarts_totalcrash"] == 1
    assert sum(value for name, value in after.items() if name.startswith("restarts_total")) == 1
    assert 25 <= before["step"] < 50 <= after["step"] <= 60
    assert (before["attempt"], after["attempt"], after["world_size"], after["ready"]) == (1, 2, 2, 1)
    assert after["steps_total"] >= 50 and after["samples_total"] == 64 * after["steps_total"]
    assert after["samples_per_second"] > 0 and 0 < after["goodput"] < 1
    assert {name for name in after if name.startswith("heartbeat_age")} == {
        f"heartbeat_age_seconds{rank}" for rank in range(2)
    }
    assert before["saves_total"] == 1 and after["saves_total"] >= 2 and after["saves_failed_total"] == 0
    assert 0 < after["save_duration_seconds"] < 60 and 0 < after["save_stall_seconds_total"] < 60
    assert 0 <= after["checkpoint_age_seconds"] < 60
    with pytest.raises(OSError):
        ask(f"{url}/live")
