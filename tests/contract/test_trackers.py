"""Each tracker, by its real library: a crash at 17, the next attempt from 10, read back by the tool's own reader."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import tenacity

from elastic_runner.errors import ConfigError, StorageError
from elastic_runner.storage import Storage, open_storage
from elastic_runner.tracking import feed
from elastic_runner.tracking.feed import History
from elastic_runner.tracking.opening import check_trackers, opener
from elastic_runner.tracking.protocol import TrackedRun
from elastic_runner.tracking.trackers import Trackers
from tests.support.checkpointing import CheckpointingPlace
from tests.support.waiting import eventually


class Point(NamedTuple):
    step: int
    value: float


Read = Callable[[Path, str], list[Point]]


def tensorboard(where: Path, name: str) -> list[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(where / "run" / "tensorboard"))
    events.Reload()
    return [Point(event.step, round(event.value, 4)) for event in events.Scalars(name)]


def mlflow(where: Path, name: str) -> list[Point]:
    import mlflow as library

    (run,) = library.search_runs(output_format="list", search_all_experiments=True)
    assert run.info.run_name == "a run" and run.data.params["data.shards"] == "8"
    assert run.info.status == "FINISHED"
    found = library.MlflowClient().get_metric_history(run.info.run_id, name)
    # A file store, unlike a server's database, keeps what is told twice twice.
    once = dict.fromkeys((point.step, point.timestamp, point.value) for point in found)
    return [Point(number, round(value, 4)) for number, _, value in once]


def wandb(where: Path, name: str) -> list[Point]:
    """Its server takes each step once, the first time; offline, that is for us to do."""
    from wandb.proto.wandb_internal_pb2 import Record

    result: dict[int, float] = {}
    ids = set()
    for file in sorted((where / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in log_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if name in values:
                result.setdefault(record.history.step.num, round(float(values[name]), 4))
    assert ids == {"r1"}
    return [Point(*pair) for pair in result.items()]


def log_records(data: bytes) -> Iterator[bytes]:
    """Of a file in LevelDB's log format, with 7 bytes of a header of wandb's in its first block."""
    at, found = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        found += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield found
            found = b""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield
    import wandb as library

    library.teardown()  # its own process


def line(number: int, attempt: int) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "attempt": attempt, "loss": number + attempt / 10, "lr": 0.1, "epoch": 0,
        "world": 2, "time": 1e9 + 100 * attempt + number,
    }  # fmt: skip


def begin(name: str, storage: Storage, attempt: int, course: list[dict[str, Any]], everything: Any) -> Trackers:
    run = TrackedRun(
        id="r1", name="a run", project=None, attempt=attempt, settings={"data": {"shards": 8}}, storage=storage
    )
    trackers = Trackers({name: opener(name)}, run, limit=120)
    trackers.begin(History(lambda: course, lambda: everything))
    return trackers


@pytest.mark.parametrize(("name", "read", "rewinds"), [
    ("tensorboard", tensorboard, True), ("mlflow", mlflow, False), ("wandb", wandb, False),
])  # fmt: skip
@pytest.mark.usefixtures("offline")
def test_the_tool_has_each_step_once_and_in_order(tmp_path: Path, name: str, read: Read, rewinds: bool) -> None:
    """Cases c66, c67."""
    storage = open_storage(str(tmp_path / "run"))
    first, second = [line(number, 1) for number in range(1, 18)], [line(number, 2) for number in range(11, 21)]
    trackers = begin(name, storage, 1, [], [])
    for record in first:
        trackers.tell(record)
        if record["step"] == 10:
            trackers.saved()
    trackers.end("failed")
    trackers = begin(name, storage, 2, first[:10], first)
    for record in second:
        trackers.tell(record)
    evaluated = {"event": "evaluation", "step": 20, "attempt": 2, "metrics": {"loss": 0.5}, "time": 1e9 + 300}
    trackers.tell(evaluated)
    trackers.end("finished")
    points = read(tmp_path, "train/loss")
    assert [point.step for point in points] == list(range(1, 21))
    owners = [round((value - number) * 10) for number, value in points]
    assert owners == ([1] * 10 + [2] * 10 if rewinds else [1] * 17 + [2] * 3)
    assert read(tmp_path, "validation/loss") == [Point(20, 0.5)]


def test_mlflow_has_one_run_and_no_step_twice_whatever_was_lost(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store had not got lines 11 to 17 of an attempt that was killed; and opening fails once."""
    monkeypatch.setattr(feed, "_RETRY", tenacity.wait_fixed(0.001))
    storage = open_storage(str(tmp_path / "run"))
    put, failing = storage.put, iter([True])

    def once(path: str, data: bytes) -> None:
        if path.startswith("trackers") and next(failing, False):
            raise StorageError("away for a moment")
        put(path, data)

    storage.put = once  # type: ignore[method-assign]
    first, second = [line(number, 1) for number in range(1, 18)], [line(number, 2) for number in range(11, 21)]
    trackers = begin("mlflow", storage, 1, [], [])
    for record in first:
        trackers.tell({**record, "metrics": {"acc@1": 0.5}})
    eventually(lambda: storage.list("trackers"), "the run is opened")  # an end would cut the tries short
    trackers.end("failed")
    storage.delete("trackers")  # it was killed before it could write down anything
    trackers = begin("mlflow", storage, 2, first[:10], first[:10])
    for record in second:
        trackers.tell(record)
    trackers.end("finished")
    points = mlflow(tmp_path, "train/loss")
    assert [point.step for point in points] == list(range(1, 21))
    assert [point.step for point in mlflow(tmp_path, "train/acc_1")] == list(range(1, 18))


def test_a_service_of_wandb_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """Its own hook at exit would wait for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import wandb
from elastic_runner.storage import open_storage
from tests.contract.test_trackers import begin, line
trackers = begin("wandb", open_storage({str(tmp_path / "run")!r}), 1, [], [])
while wandb.run is None:
    pass
os.kill(wandb.setup()._connection._proc._process.pid, signal.SIGSTOP)
trackers.tell(line(1, 1))
trackers._limit = 0.5
trackers.end("finished")
print("ended")
"""
    )
    variables = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, timeout=100)
    assert "ended" in done.stdout and "does not come to an end" in done.stderr, done.stderr


class Server:
    """Of Weights & Biases: its client may be killed before it has sent all, and it takes no step twice."""

    def __init__(self) -> None:
        self.history: dict[int, float] = {}
        self.given: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []

    def init(self, **given: Any) -> Any:
        self.given.append(given)
        sys.excepthook = sys.exit = replaced = lambda *_: None
        replaced.__module__ = "wandb.sdk.lib.exit_hooks"
        start = max(self.history, default=-1) + 1
        return SimpleNamespace(
            id=given["id"], resumed=bool(self.history), starting_step=start, finish=self.finish, log=self.log,
            mark_preempting=lambda: None,
        )  # fmt: skip

    def log(self, values: dict[str, float], *, step: int) -> None:
        assert step >= max(self.history, default=0), "it would only warn, and drop this"
        self.history[step] = values["train/loss"]

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_wandb_is_told_what_its_server_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case c66: one run; what a killed process has not sent comes again, and nothing is told that would be dropped."""
    server, hooks = Server(), (sys.excepthook, sys.exit)
    stub = SimpleNamespace(init=server.init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.delitem(sys.modules, "elastic_runner.tracking.wandb", raising=False)
    storage = open_storage(str(tmp_path / "run"))
    first, second = [line(number, 1) for number in range(1, 18)], [line(number, 2) for number in range(11, 21)]
    trackers = begin("wandb", storage, 1, [], [])
    for record in first:
        trackers.tell(record)
        if record["step"] == 10:
            trackers.saved()
    trackers.end("failed")
    for unsent in range(8, 18):
        del server.history[unsent]
    trackers = begin("wandb", storage, 2, first[:10], first)
    for record in second:
        trackers.tell(record)
    trackers.end("finished")
    assert list(server.history) == list(range(1, 21))
    assert [given["id"] for given in server.given] == ["r1", "r1"]
    assert all(given["resume"] == "allow" for given in server.given)
    assert server.exit_codes == [1, 0] and (sys.excepthook, sys.exit) == hooks


def test_tensorboard_files_on_any_storage(place: CheckpointingPlace, tmp_path: Path) -> None:
    """An object store cannot append: it has a file per flush, and they are read in the order of their names."""
    storage = open_storage(place.run_url, place.storage_options)
    first, second = [line(number, 1) for number in range(1, 18)], [line(number, 2) for number in range(11, 21)]
    trackers = begin("tensorboard", storage, 1, [], [])
    for record in first:
        trackers.tell(record)
        if record["step"] in (5, 10):
            trackers.saved()
    trackers.end("failed")
    trackers = begin("tensorboard", storage, 2, first[:10], first)
    for record in second:
        trackers.tell(record)
    trackers.end("finished")
    names = storage.list("tensorboard")
    assert len(names) == (2 if storage.append("x", b"") else 4)
    copy = open_storage(str(tmp_path / "copy" / "run"))
    for file in names:
        copy.put(f"tensorboard/{file}", storage.read(f"tensorboard/{file}"))
    points = tensorboard(tmp_path / "copy", "train/loss")
    assert points == [Point(n, n + (0.1 if n <= 10 else 0.2)) for n in range(1, 21)]


def test_a_torn_event_file_is_left_behind(tmp_path: Path) -> None:
    """What an error leaves of a record would hide from readers all that follows it in the file."""
    storage = open_storage(str(tmp_path / "run"))
    append, torn = storage.append, iter([False] * 5 + [True])

    def failing(path: str, data: bytes) -> bool:
        if next(torn, False):
            append(path, data[: len(data) // 2])
            raise StorageError("no space left")
        return append(path, data)

    storage.append = failing  # type: ignore[method-assign]
    tool = opener("tensorboard").open(
        TrackedRun(id="r1", name="r", project=None, attempt=1, settings={}, storage=storage), None, 0
    )
    for number in range(1, 9):
        try:
            tool.log(number, {"train/loss": number}, 0.0)
        except StorageError:
            tool.log(number, {"train/loss": number}, 0.0)
    assert tensorboard(tmp_path, "train/loss") == [Point(n, n) for n in range(1, 9)]


@pytest.mark.parametrize(("name", "words"), [
    ("tensorbord", "there are mlflow, tensorboard, wandb, and module:attribute"),
    ("elastic_runner.nowhere:x", "No module named 'elastic_runner.nowhere'"),
    ("json:dumps", "is no elastic_runner.tracking.protocol.Opener"),
])  # fmt: skip
def test_a_tracker_that_is_none_is_a_configuration_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_trackers([name])


def test_a_tracker_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'elastic-runner\[wandb\]'"):
        check_trackers(["wandb"])
