"""A contender's decisions: a table of cases, and every interleaving of two and three contenders on a small model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from elastic_runner.launch.rendezvous.election import Connect, Decision, Open, View, Wait, decide, look

PATIENCE = 3.0

SEEN = View(epoch=4, beat="x 1", beat_since=10.0)


@pytest.mark.parametrize(
    ("view", "now", "decision"),
    [
        (View(), 0.0, Open(epoch=1)),
        (View(epoch=4, ended=True), 0.0, Open(epoch=5)),
        (SEEN, 10.0, Connect()),
        (SEEN, 1000.0, Connect()),
        (replace(SEEN, reach="silent"), 10.0, Wait(until=13.0)),
        (replace(SEEN, reach="silent"), 12.9, Wait(until=13.0)),
        (replace(SEEN, reach="silent"), 13.0, Open(epoch=5)),
        (replace(SEEN, reach="refused"), 11.4, Wait(until=11.5)),
        (replace(SEEN, reach="refused"), 11.5, Open(epoch=5)),
        (replace(SEEN, reach="silent", beat=None), 12.9, Wait(until=13.0)),
        (replace(SEEN, reach="silent", beat=None), 13.0, Open(epoch=5)),
    ],
)
def test_cases(view: View, now: float, decision: Decision) -> None:
    assert decide(view, now, patience=PATIENCE) == decision


def test_who_has_resigned_lets_others_go_first() -> None:
    assert decide(View(epoch=4, ended=True), 7.0, patience=PATIENCE, not_before=9.0) == Wait(until=9.0)
    assert decide(View(epoch=4, ended=True), 9.0, patience=PATIENCE, not_before=9.0) == Open(epoch=5)
    assert decide(SEEN, 7.0, patience=PATIENCE, not_before=9.0) == Connect()


def test_a_new_beat_has_its_host_tried_again() -> None:
    tried = replace(SEEN, reach="silent")
    assert look(tried, 12.0, epoch=4, ended=False, beat="x 1") == tried
    assert look(tried, 12.0, epoch=4, ended=False, beat="x 2") == View(epoch=4, beat="x 2", beat_since=12.0)


def test_a_new_epoch_is_looked_at_afresh() -> None:
    tried = replace(SEEN, reach="silent")
    assert look(tried, 12.0, epoch=5, ended=False, beat="x 1") == View(epoch=5, beat="x 1", beat_since=12.0)
    assert look(tried, 12.0, epoch=4, ended=True, beat=None) == View(epoch=4, ended=True)
    assert look(View(), 12.0, epoch=0, ended=False, beat=None) == View()


# The model. A tick is one beat; hosts that are alive beat at each; contenders take their steps whenever they like.


@dataclass(frozen=True)
class Epoch:
    host: int
    ended: bool = False
    beat: int = 0


NOTHING = View()


@dataclass(frozen=True)
class Contender:
    view: View = NOTHING
    looked: float | None = None
    """When it began the look it is going to act on; None: it looks next."""
    member: int = 0
    """The epoch it is in; 0: none."""
    hosts: int = 0
    """The epoch it hosts."""
    dead: bool = False
    cut: bool = False
    """From the other contenders, not from the storage."""
    not_before: float = 0.0


@dataclass(frozen=True)
class Model:
    contenders: tuple[Contender, ...]
    epochs: tuple[Epoch, ...] = ()
    clock: int = 0
    faults: int = 1
    """How many may still happen."""

    def having(self, index: int, contender: Contender) -> Model:
        return replace(self, contenders=(*self.contenders[:index], contender, *self.contenders[index + 1 :]))

    def hosted(self, number: int, epoch: Epoch) -> Model:
        return replace(self, epochs=(*self.epochs[: number - 1], epoch, *self.epochs[number:]))

    def hosting(self, number: int) -> bool:
        """Whether the epoch has a host that is alive and holds on to it."""
        host = self.contenders[self.epochs[number - 1].host]
        return not host.dead and host.hosts == number

    def reaches(self, index: int, number: int) -> bool:
        host = self.epochs[number - 1].host
        me, other = self.contenders[index], self.contenders[host]
        return self.hosting(number) and (host == index or not (me.cut or other.cut))


def tick(model: Model) -> Model:
    """Time passes: hosts beat, and see whether they were replaced."""
    newest = len(model.epochs)
    for index, contender in enumerate(model.contenders):
        number = contender.hosts
        if not number or contender.dead:
            continue
        epoch = model.epochs[number - 1]
        model = model.hosted(number, replace(epoch, beat=epoch.beat + 1, ended=newest > number))
        if newest > number:
            model = model.having(index, replace(contender, hosts=0))
    return replace(model, clock=model.clock + 1)


def step(model: Model, index: int) -> Model | None:
    """A contender's next step; None when it has none."""
    me = model.contenders[index]
    if me.dead:
        return None
    if me.member:
        if model.reaches(index, me.member):
            return None
        return model.having(index, replace(me, member=0, view=View(), looked=None))
    if me.looked is None:
        newest = len(model.epochs)
        epoch = model.epochs[-1] if model.epochs else Epoch(host=0)
        view = look(me.view, model.clock, epoch=newest, ended=epoch.ended, beat=f"{newest} {epoch.beat}")
        return model.having(index, replace(me, view=view, looked=model.clock))
    decision = decide(me.view, me.looked, patience=PATIENCE, not_before=me.not_before)
    me = replace(me, looked=None)
    if isinstance(decision, Connect):
        if model.reaches(index, me.view.epoch):
            return model.having(index, replace(me, member=me.view.epoch))
        return model.having(index, replace(me, view=replace(me.view, reach="silent")))
    if isinstance(decision, Open):
        if decision.epoch == len(model.epochs) + 1:  # exclusive creation
            assert_open_is_right(model, index, decision.epoch)
            model = replace(model, epochs=(*model.epochs, Epoch(host=index)))
            me = replace(me, hosts=decision.epoch)
        else:
            assert decision.epoch <= len(model.epochs), "no epoch is passed over"
    return model.having(index, me)


def assert_open_is_right(model: Model, index: int, number: int) -> None:
    """Nobody deposes a host that is alive, however it is cut off itself."""
    if number > 1:
        assert not model.hosting(number - 1)


def faults(model: Model) -> Iterator[Model]:
    if not model.faults:
        return
    model = replace(model, faults=model.faults - 1)
    for index, contender in enumerate(model.contenders):
        if not contender.dead:
            yield model.having(index, replace(contender, dead=True, hosts=0))
            yield model.having(index, replace(contender, cut=not contender.cut))
        if contender.hosts and not contender.dead:
            resigned = replace(contender, hosts=0, member=0, not_before=model.clock + 2 * PATIENCE)
            number = contender.hosts
            ended = replace(model.epochs[number - 1], ended=True)
            yield model.hosted(number, ended).having(index, resigned)


def settle(model: Model, settled: set[Model]) -> None:
    """From here on nothing fails and everybody is quick: all that are not cut off come together in the newest epoch."""
    healed = tuple(replace(contender, cut=False) for contender in model.contenders)
    model = replace(model, contenders=healed, faults=0)
    passed = []
    for _ in range(16):
        if model in settled:
            break
        passed.append(model)
        for index in range(len(model.contenders)):
            for _ in range(2):
                model = step(model, index) or model
        model = tick(model)
    else:
        assert_together(model)
    settled.update(passed)


def assert_together(model: Model) -> None:
    newest = len(model.epochs)
    living = [contender for contender in model.contenders if not contender.dead]
    assert all(contender.member == newest for contender in living), model
    assert not living or model.hosting(newest)
    assert sum(contender.hosts == newest for contender in living) == (1 if living else 0)


def explore(model: Model, *, until: int) -> int:
    """Every interleaving of steps, ticks and faults up to a time; returns the number of states."""
    seen = {model}
    settled: set[Model] = set()
    todo = deque([model])
    while todo:
        state = todo.popleft()
        settle(state, settled)
        following = [after for index in range(len(state.contenders)) if (after := step(state, index)) is not None]
        following += faults(state)
        if state.clock < until:
            following.append(tick(state))
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen)


def test_every_interleaving_of_two_contenders() -> None:
    contenders = (Contender(), Contender())
    assert explore(Model(contenders, faults=1), until=5) > 5_000


def test_two_faults_among_two_contenders_in_a_running_epoch() -> None:
    running = Model((Contender(member=1, hosts=1), Contender(member=1)), epochs=(Epoch(host=0),), faults=2)
    assert explore(running, until=4) > 1_000


def test_every_interleaving_of_three_contenders_when_one_fails() -> None:
    running = Model(
        (Contender(member=1, hosts=1), Contender(member=1), Contender(member=1)), epochs=(Epoch(host=0),), faults=1
    )
    assert explore(running, until=4) > 3_000


def test_the_model_finds_a_contender_that_judges_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were silence judged when the contender acts instead of when it looked, a host that is alive could be deposed."""
    real = decide

    def late(view: View, now: float, **settings: float) -> Decision:
        return real(view, now + PATIENCE, **settings)

    monkeypatch.setitem(globals(), "decide", late)
    cut = Model((Contender(member=1, hosts=1), Contender(cut=True)), epochs=(Epoch(host=0),), faults=0)
    with pytest.raises(AssertionError):
        explore(cut, until=4)
