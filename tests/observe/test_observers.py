"""Those who watch a run, and what becomes of one that fails."""

import threading
import time

import pytest

from sparkdml.observe.observers import Calls, Observers, watched
from sparkdml.training.run import PARTS, StepClock


class Records:
    def __init__(self, fails_at=None):
        self.events, self.fails_at, self.closed = [], fails_at, 0

    def handle(self, rank, event):
        if event["kind"] == self.fails_at:
            raise OSError("no more disk")
        self.events.append((rank, event))

    def close(self):
        self.closed += 1
        if self.fails_at == "close":
            raise OSError("no more disk")


def kinds(observer):
    return [event["kind"] for _, event in observer.events]


def test_a_run_is_told_from_start_to_end():
    seen = Records()
    with watched({"name": "fit"}, [seen], lambda: {"stragglers": []}) as tell:
        tell(1, {"kind": "rank", "time": 5.0})
    assert kinds(seen) == ["run-start", "rank", "run-end"]
    assert {event["run"] for _, event in seen.events} == {seen.events[0][1]["run"]}
    assert seen.events[1] == (1, {"kind": "rank", "time": 5.0, "run": seen.events[0][1]["run"]})
    end = seen.events[2][1]
    assert (end["outcome"], end["cause"], end["stragglers"]) == ("finished", None, [])
    assert seen.closed == 1


@pytest.mark.parametrize(
    ("error", "outcome"), [(ValueError("x\ny"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_how_it_ended(error, outcome):
    def end_by(tell):
        raise error

    seen = Records()
    with pytest.raises(type(error)), watched({}, [seen]) as tell:
        end_by(tell)
    end = seen.events[-1][1]
    assert end["outcome"] == outcome
    assert end["cause"] == ("x" if outcome == "failed" else "KeyboardInterrupt")


@pytest.mark.parametrize("fails_at", ["steps", "close"])
def test_one_that_fails_is_switched_off_and_harms_no_other(fails_at):
    bad, good = Records(fails_at), Records()
    observers = Observers([bad, good])

    def run():
        for kind in ("steps", "steps", "epoch"):
            observers.handle(0, {"kind": kind})
        observers.close()

    with pytest.warns(UserWarning, match=r"observer Records failed.*no more disk") as caught:
        run()
    assert len(caught) == 1
    assert kinds(good) == ["steps", "steps", "epoch"]
    assert good.closed == 1


class Hangs:
    """As a terminal that was stopped, or a server that never answers."""

    def __init__(self):
        self.over = threading.Event()

    def handle(self, rank, event):
        self.over.wait()

    def close(self):
        self.over.wait()


def test_one_that_never_returns_delays_no_other(monkeypatch):
    monkeypatch.setattr("sparkdml.observe.observers.MAX_WAITING", 5)
    hangs = Hangs()
    observers = Observers([hangs], close_seconds=0.2)
    began = time.monotonic()
    for _ in range(1000):
        observers.handle(0, {"kind": "steps"})
    assert time.monotonic() - began < 1
    with pytest.warns(UserWarning, match=r"Hangs has been blocked for 0.2 s: [45] events"):
        observers.close()
    hangs.over.set()


def test_events_that_were_too_many_are_counted(monkeypatch):
    monkeypatch.setattr("sparkdml.observe.observers.MAX_WAITING", 5)
    hangs, seen = Hangs(), Records()
    observers = Observers([hangs, seen])
    for _ in range(10):
        observers.handle(0, {"kind": "steps"})
    hangs.over.set()
    with pytest.warns(UserWarning, match=r"could not keep up: [45] run events were dropped"):
        observers.close()
    assert len(seen.events) in (5, 6)


def test_a_function_of_the_users_own_is_an_observer():
    heard = []
    with Observers([Calls(lambda rank, event: heard.append((rank, event)))]) as observers:
        observers.handle(1, {"kind": "log"})
    assert heard == [(1, {"kind": "log"})]


def test_the_clock_gives_each_lap_to_one_part(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 3.5, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = StepClock()
    clock.lap("data")
    clock.lap("compute")
    clock.lap("data")
    assert clock.take() == {**dict.fromkeys(PARTS, 0.0), "data": 1.5, "compute": 2.0}
    clock.lap("communication")
    assert clock.take()["communication"] == 6.5
