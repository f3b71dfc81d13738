"""What an evaluator measured reaches the history, a tracker and the screen."""

from contextlib import closing

from sparkdml.history import History
from sparkdml.observe.observers import Communication, Evaluations
from sparkdml.observe.progress import Progress
from sparkdml.observe.trackers import TrackerObserver


def measured(step, loss):
    fields = {"epoch": 1, "step": step, "clock": step, "seconds": 0.5}
    return {"kind": "evaluation", **fields, "values": {"val_loss": loss}}


def test_what_was_measured_of_steps_that_are_made_again_is_forgotten():
    evaluations = Evaluations()
    for step, loss in ((3, 0.9), (8, 0.5)):
        evaluations.handle(4, measured(step, loss))
    evaluations.handle(-1, {"kind": "submission", "number": 2, "workers": 2, "from_step": 5})
    evaluations.handle(4, measured(7, 0.6))
    assert [(row["step"], row["val_loss"]) for row in evaluations.rows] == [(3, 0.9), (7, 0.6)]
    history = History([{"epoch": 1.0, "loss": 0.4}], evaluations=evaluations.rows)
    assert History.from_dict(history.to_dict()).evaluations == evaluations.rows
    assert history.columns == ["epoch", "loss"]


class Mine:
    def __init__(self):
        self.logged = []

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def close(self):
        pass


def test_a_tracker_gets_it_under_the_step_that_it_belongs_to():
    mine = Mine()
    observer = TrackerObserver(mine)
    observer.handle(4, measured(7, 0.6))
    observer.close()
    assert mine.logged == [(7, {"evaluator/val_loss": 0.6})]


def test_details_have_it(capsys):
    for verbose in (1, 2):
        with closing(Progress(1, verbose)) as progress:
            progress.handle(4, measured(7, 0.6))
    assert capsys.readouterr().err == "evaluator: val_loss 0.6 after step 7\n"


def test_how_sums_were_formed_is_in_the_history_and_on_the_screen(capsys):
    communication = Communication()
    with closing(Progress(1, 1)) as progress:
        for event in (
            {"kind": "submission", "number": 1, "workers": 2, "from_step": 0, "backend": "horovod"},
            {"kind": "topology", "asked": "auto", "used": "shared-memory"},
            {"kind": "topology", "asked": "auto", "used": "shared-memory"},
        ):
            communication.handle(0, event)
            progress.handle(0, event)
    said = "backend horovod, topology shared-memory"
    assert capsys.readouterr().err.splitlines() == [said]
    history = History(
        [{"epoch": 1.0, "loss": 0.4}],
        backend=communication.backend,
        topology=communication.topology,
    )
    assert said in repr(history)
    assert f"<p>{said}</p>" in history._repr_html_()
    assert History.from_dict(history.to_dict()).topology == "shared-memory"
