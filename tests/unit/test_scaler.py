"""Dynamic loss scaling."""

from __future__ import annotations

from elastic_runner.train.scaler import LossScaler


def test_halves_after_an_overflow_and_never_below_one() -> None:
    scaler = LossScaler()
    start = scaler.scale
    scaler.update(finite=False)
    assert scaler.scale == start / 2
    for _ in range(100):
        scaler.update(finite=False)
    assert scaler.scale == 1


def test_doubles_after_2000_good_steps_in_a_row() -> None:
    scaler = LossScaler()
    start = scaler.scale
    for _ in range(1999):
        scaler.update(finite=True)
    assert scaler.scale == start
    scaler.update(finite=True)
    assert scaler.scale == 2 * start


def test_an_overflow_starts_the_count_anew() -> None:
    scaler = LossScaler()
    start = scaler.scale
    for _ in range(1999):
        scaler.update(finite=True)
    scaler.update(finite=False)
    scaler.update(finite=True)
    assert scaler.scale == start / 2


def test_state_continues_where_it_stood() -> None:
    scaler, again = LossScaler(), LossScaler()
    scaler.update(finite=False)
    for _ in range(1999):
        scaler.update(finite=True)
    again.load_state_dict(scaler.state_dict())
    again.update(finite=True)
    assert again.scale == 2 * scaler.scale
