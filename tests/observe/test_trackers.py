"""Numbers on their way to a tracker: in order, once, and never at the cost of the run."""

import pickle
import threading
import time

import pytest

from sparkdml.errors import ParameterError, SetupError, SparkDMLError
from sparkdml.observe import trackers
from sparkdml.observe.observers import Observers
from sparkdml.observe.trackers import (
    MLflow,
    TensorBoard,
    TrackerObserver,
    check_tracker,
    mlflow_name,
)

ROW = {"epoch": 1.0, "loss": 0.25, "rows": 100.0, "steps": 4.0, "rows_per_second": 50.0}


class Mine:
    """A user's own tracker."""

    def __init__(self):
        self.logged, self.num_closes = [], 0

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def close(self):
        self.num_closes += 1


def steps(step, time=0.0, loss=0.5):
    losses = [[step - 1, 9.0], [step, loss]]
    return {"kind": "steps", "epoch": 1, "step": step, "losses": losses, "loss": 7.0, "time": time}


def feed(tracker, *events):
    observer = TrackerObserver(tracker)
    for rank, event in events:
        observer.handle(rank, event)
    observer.close()


def test_what_a_tracker_gets():
    mine = Mine()
    feed(
        mine,
        (0, steps(4, time=10.0)),
        (0, steps(8, time=10.1)),  # too soon after the last
        (0, {"kind": "epoch", "row": ROW}),
        (0, {"kind": "log", "values": {"temperature": 1, "note": "text", "flag": True}}),
        (2, {"kind": "log", "values": {"temperature": 2}}),
        (-1, {"kind": "checkpoint", "id": "x"}),
    )
    assert mine.logged == [
        (4, {"step_loss": 0.5}),
        (8, ROW),
        (8, {"temperature": 1.0}),
        (8, {"rank_2/temperature": 2.0}),
    ]
    assert mine.num_closes == 1


def test_what_is_trained_again_is_logged_once():
    mine = Mine()
    once = [(0, steps(10, 1.0)), (0, {"kind": "epoch", "row": ROW}), (0, steps(20, 2.0))]
    again = [(0, steps(15, 9.0)), (0, {"kind": "epoch", "row": ROW}), (0, steps(25, 10.0))]
    feed(mine, *once, (-1, {"kind": "restart", "from_step": 10}), *again)
    assert [step for step, _ in mine.logged] == [10, 10, 20, 25]


def test_settings_begin_a_run_for_each_fit():
    begun = []

    class Settings:
        def begin(self, run, name, facts):
            begun.append((run, name, facts))
            return Told()

    class Told(Mine):
        def end(self, outcome, cause):
            begun.append((outcome, cause))

    start = {"kind": "run-start", "run": "7f", "name": "fit Net", "workers": 2}
    end = {"kind": "run-end", "outcome": "failed", "cause": "lost"}
    feed(Settings(), (-1, {**start, "plan": {"model": "Net"}}), (-1, end))
    assert begun == [("7f", "fit Net", {"workers": "2", "plan.model": "Net"}), ("failed", "lost")]


def test_settings_without_a_run_begin_nothing():
    class Settings:
        def begin(self, run, name, facts):
            raise AssertionError("there was no run")

    feed(Settings())


def test_an_error_switches_it_off_with_one_warning():
    class Full(Mine):
        def log(self, step, metrics):
            raise OSError("disk full")

    full, other = Full(), Mine()
    observers = Observers([TrackerObserver(full), TrackerObserver(other)], run="7f")

    def run():
        for number in range(1, 50):
            observers.handle(0, steps(number, time=float(number)))
            time.sleep(0.005)
        observers.close()

    with pytest.warns(
        UserWarning, match=r"the tracker Full failed and gets no more numbers"
    ) as warned:
        run()
    assert [str(w.message).count("OSError: disk full") for w in warned] == [1]
    assert len(other.logged) == 49
    assert full.num_closes == 1


def test_an_error_at_the_very_end_is_told():
    class Unclosable(Mine):
        def close(self):
            raise OSError("no")

    observer = TrackerObserver(Unclosable())
    with pytest.raises(SparkDMLError, match="the tracker Unclosable failed and gets no more"):
        observer.close()


def test_a_tracker_that_hangs_delays_no_run(monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    released = threading.Event()

    class Hanging(Mine):
        def log(self, step, metrics):
            released.wait(20)

    observer = TrackerObserver(Hanging())
    began = time.monotonic()
    for number in range(1, 100):
        observer.handle(0, steps(number, time=float(number)))
    assert time.monotonic() - began < 1
    with pytest.warns(UserWarning, match="has been blocked for 0.2 s"):
        observer.close()
    released.set()


def test_a_slow_tracker_loses_the_oldest_and_says_so(monkeypatch):
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    begun, released = threading.Event(), threading.Event()

    class Slow(Mine):
        def log(self, step, metrics):
            begun.set()
            released.wait(20)
            super().log(step, metrics)

    slow = Slow()
    observer = TrackerObserver(slow)
    observer.handle(0, steps(1, time=1.0))
    assert begun.wait(5)
    for number in range(2, 12):
        observer.handle(0, steps(number, time=float(number)))
    released.set()
    with pytest.warns(UserWarning, match="Slow could not keep up: 5 entries were dropped"):
        observer.close()
    assert [step for step, _ in slow.logged] == [1, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("wrong", [object(), "http://localhost:5000", Mine])
def test_what_is_no_tracker(wrong):
    with pytest.raises(ParameterError, match=r"tracker must be dml.MLflow\(…\)"):
        check_tracker(wrong)


@pytest.mark.parametrize(
    ("make", "package"), [(MLflow, "mlflow"), (lambda: TensorBoard("x"), "tensorboard")]
)
def test_an_extra_that_is_missing(monkeypatch, make, package):
    monkeypatch.setattr("sparkdml.observe.trackers.find_spec", lambda name: None)
    with pytest.raises(SetupError, match=rf"pip install 'sparkdml\[{package}\]'"):
        make()


def test_settings_are_plain_values(monkeypatch):
    monkeypatch.setattr("sparkdml.observe.trackers.find_spec", lambda name: object())
    settings = MLflow("http://127.0.0.1:5000", "digits", tags={"team": "x"})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_names_that_mlflow_refuses():
    assert mlflow_name("top@5 (é)") == "top_5 ___"
    assert mlflow_name("rank_1/val_loss") == "rank_1/val_loss"
    assert len(mlflow_name("x" * 999)) == 250


def test_tensorboard_files_have_the_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra sparkdml[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    start = {"kind": "run-start", "run": "7f", "name": "fit: Net/2", "workers": 2}
    events = [(-1, start), (0, steps(4, 1.0)), (0, {"kind": "epoch", "row": ROW})]
    feed(TensorBoard(str(tmp_path)), *events, (-1, {"kind": "run-end", "outcome": "finished"}))
    feed(TensorBoard(str(tmp_path)), (-1, {**start, "run": "80"}))
    folders = sorted(folder.name for folder in tmp_path.iterdir())
    assert [name.split("-", 2)[2] for name in folders] == ["fit-Net-2-7f", "fit-Net-2-80"]
    found = EventAccumulator(str(tmp_path / folders[0])).Reload()
    assert {"step_loss", "loss", "rows_per_second"} <= set(found.Tags()["scalars"])
    assert [(s.step, s.value) for s in found.Scalars("step_loss")] == [(4, 0.5)]
    assert [(s.step, s.value) for s in found.Scalars("loss")] == [(4, 0.25)]
