"""What a stack says of the process that printed it."""

from __future__ import annotations

import pytest

from elastic_runner.launch.dumps import main_stack, place, waits_for

PYTHON, PACKAGES = "/usr/lib/python3.11", "/venv/lib/python3.11/site-packages"
PROGRAM = "/home/me/train.py"


def dump(*files: str, thread: str = "Current thread") -> str:
    frames = "".join(f'  File "{file}", line {10 + i} in f{i}\n' for i, file in enumerate(files))
    return f"{thread} 0x00007f00 (most recent call first):\n{frames}"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ((PROGRAM,), ""),
        ((f"{PYTHON}/socket.py", PROGRAM), ""),
        ((f"{PACKAGES}/torch/nn/modules/linear.py", PROGRAM), ""),
        ((f"{PACKAGES}/torch/distributed/distributed_c10d.py", PROGRAM), "peers"),
        ((f"{PACKAGES}/torch/autograd/graph.py", f"{PACKAGES}/torch/_tensor.py", PROGRAM), "peers"),
        ((f"{PYTHON}/threading.py", "/work/elastic_runner/coordination.py", PROGRAM), "peers"),
        ((f"{PYTHON}/multiprocessing/queues.py", f"{PACKAGES}/torch/utils/data/dataloader.py"), "loader processes"),
        ((f"{PYTHON}/selectors.py", f"{PACKAGES}/torch/utils/data/_utils/worker.py"), "work"),
        ((PROGRAM, f"{PACKAGES}/torch/utils/data/_utils/worker.py"), ""),
        (("<frozen importlib._bootstrap>", PROGRAM), ""),
        ((), ""),
    ],
)
def test_what_the_main_thread_waits_for(files: tuple[str, ...], kind: str) -> None:
    other = dump(f"{PACKAGES}/torch/distributed/store.py", thread="Thread")
    assert waits_for(f"{other}\n{dump(*files)}") == kind
    assert waits_for(f"{dump(*files)}\n{other}") == kind


def test_only_the_main_thread_counts() -> None:
    text = dump("/a.py", thread="Thread") + "\n" + dump("/b.py", "/c.py") + "\n" + dump("/d.py", thread="Thread")
    assert [frame.file for frame in main_stack(text)] == ["/b.py", "/c.py"]
    assert main_stack("(no answer within 2 s)") == []
    stopped = "(was stopped)\n" + dump("/a.py", thread="Thread") + "\n" + dump("/b.py", "/c.py", thread="Thread")
    assert [frame.file for frame in main_stack(stopped)] == ["/b.py", "/c.py"], "a thread of gloo's took the signal"


def test_the_place_names_the_call_and_the_programs_own_line() -> None:
    inner = [f"{PACKAGES}/torch/{name}.py" for name in "abcd"]
    assert (
        place(dump(f"{PYTHON}/selectors.py", *inner, PROGRAM)) == "f1 (a.py:11) < f2 (b.py:12) < … < f5 (train.py:15)"
    )
    assert place(dump(PROGRAM)) == "f0 (train.py:10)"
    assert place(dump(f"{PYTHON}/queue.py")) == "f0 (queue.py:10)"
    assert place("(not asked)") == ""
