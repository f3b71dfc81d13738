"""Progress at the driver: a bar in a terminal, lines elsewhere, nothing where nothing is wanted."""

import sys
from contextlib import closing

import pytest

from sparkdml.errors import ParameterError
from sparkdml.observe import progress as progress_module
from sparkdml.observe.progress import Progress, fitting
from sparkdml.observe.stragglers import Times, describe_ranks

ROW = {
    "epoch": 1.0,
    "loss": 0.25,
    "val_loss": 0.3,
    "rows": 100.0,
    "steps": 4.0,
    "seconds": 2.0,
    "rows_per_second": 50.0,
}
SECONDS = {"data": 0.5, "compute": 1.0, "communication": 0.5, "checkpoint": 0.0, "other": 0.0}
STRAGGLER = {"rank": 1, "host": "b", "slower": 2.0, "why": "data", "seconds_lost": 9.0}


def steps(time, epoch, step, rows, of=100, loss=0.5):
    losses = [[step, loss]]
    fields = {"epoch": epoch, "step": step, "rows": rows, "of": of, "loss": loss}
    return (0, {"kind": "steps", "time": time, "losses": losses, **fields})


EVENTS = [
    (-1, {"kind": "run-start", "name": "fit Net", "workers": 2, "strategy": "AllReduce()"}),
    (-1, {"kind": "submission", "number": 1, "workers": 2, "hosts": ["a", "b"], "from_step": 0}),
    steps(10.0, 1, 1, 25.0),
    steps(11.0, 1, 3, 75.0, loss=0.4),
    (0, {"kind": "rank", "steps": 4, "rows": 60, "host": "a", "seconds": SECONDS}),
    (1, {"kind": "rank", "steps": 4, "rows": 40, "host": "b", "seconds": SECONDS}),
    (0, {"kind": "epoch", "row": ROW}),
    (0, {"kind": "log", "values": {"x": 1}}),
    (
        -1,
        {
            "kind": "checkpoint",
            "id": "7f",
            "parent": None,
            "ckpt_kind": "epoch",
            "step": 4,
            "bytes": 1_234_000,
            "copy_seconds": 0.01,
            "write_seconds": 0.2,
        },
    ),
    (
        -1,
        {
            "kind": "failure",
            "failed_rank": 1,
            "host": "b",
            "cause": "rank 1 on b failed: OSError",
            "traceback": "Traceback\n  line\nOSError",
            "step": 5,
        },
    ),
    (-1, {"kind": "restart", "cause": "rank 1 on b failed", "from_step": 4, "workers": 1}),
    (-1, {"kind": "submission", "number": 2, "workers": 1, "hosts": ["a"], "from_step": 4}),
    steps(20.0, 2, 6, 50.0, of=None),
    (
        -1,
        {
            "kind": "run-end",
            "outcome": "finished",
            "cause": None,
            "seconds": 75.0,
            "stopped": "val_loss no longer falls",
            "stragglers": [STRAGGLER],
        },
    ),
]


def show(verbose, events=EVENTS):
    with closing(Progress(2, verbose)) as progress:
        for rank, event in events:
            progress.handle(rank, event)


@pytest.fixture
def terminal(monkeypatch):
    """A screen of 120 columns."""
    monkeypatch.setattr("sparkdml.observe.progress.is_watched", lambda: True)
    monkeypatch.setenv("TQDM_MININTERVAL", "0")
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: (120, 40))


def test_lines_where_there_is_no_terminal(capsys):
    show(verbose=1)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/2: loss 0.25, val_loss 0.3, 50 samples/s",
        "restart 1: resuming from step 4 with 1 worker (rank 1 on b failed)",
        "stopped after epoch 1: val_loss no longer falls",
    ]


def test_a_long_epoch_has_lines_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "LINE_SECONDS", -1.0)
    show(verbose=1, events=EVENTS[:4])
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/2, 25%: step 1, loss 0.5, 2 workers",
        "epoch 1/2, 75%: step 3, loss 0.4, 50 samples/s, 2 workers, 0:02 left",
    ]


def test_a_bar_in_a_terminal(capsys, terminal):
    show(verbose=1)
    said = capsys.readouterr().err
    assert "epoch 1/2:  38%|" in said
    assert "| step 3, loss 0.4, 50 samples/s, 2 workers, 0:02 left" in said
    assert "epoch 1/2:  50%|" in said
    assert "\rrestart 1: resuming from step 4 with 1 worker (rank 1 on b failed)" in said
    assert "epoch 2/2 (restart 1):  50%|" in said
    assert "| step 6, loss 0.5, 1 worker" in said
    assert "checkpoint" not in said
    assert "straggler" not in said


def test_silence(capsys, terminal):
    show(verbose=0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("is_watched", [False, True])
def test_details(capsys, monkeypatch, is_watched):
    monkeypatch.setattr("sparkdml.observe.progress.is_watched", lambda: is_watched)
    show(verbose=2)
    said = capsys.readouterr().err
    for line in (
        "fit Net: workers 2, strategy AllReduce()",
        "epoch 1/2: loss 0.25, val_loss 0.3, 50 samples/s",
        "epoch 1, rank 0 on a: 4 steps, 60 samples, 30 samples/s; data 25%, compute 50%, "
        "communication 25%",
        "epoch 1, rank 1 on b: 4 steps, 40 samples, 20 samples/s;",
        "checkpoint 7f (epoch) at step 4: 1.23MB, copied in 0.010 s, written in 0.20 s",
        "failed: rank 1 on b failed: OSError",
        "  OSError",
        "finished after 1:15",
        "straggler: rank 1 on b took 2.0 times as long as the others (9.0 s lost, data)",
    ):
        assert line in said


def test_a_summary_waits_for_the_ranks_that_speak_late(capsys):
    start, _, _, _, first, second, epoch, *_ = EVENTS
    with closing(Progress(2, 2)) as progress:
        for rank, event in (start, first, epoch):
            progress.handle(rank, event)
        assert "rank 0 on a" not in capsys.readouterr().err
        progress.handle(*second)
        said = capsys.readouterr().err.splitlines()
        assert [line[:20] for line in said] == ["epoch 1, rank 0 on a", "epoch 1, rank 1 on b"]
        progress.handle(*first)
        progress.handle(0, {"kind": "epoch", "row": {**ROW, "epoch": 2.0}})
        progress.handle(*EVENTS[-1])
    assert "epoch 2, rank 0 on a: 4 steps" in capsys.readouterr().err


def test_many_ranks_are_summed_up_by_the_slowest():
    ranks = {rank: Times("a", 10, 100, {"compute": 1.0 + rank}) for rank in range(100)}
    lines = describe_ranks(ranks)
    assert lines[0].startswith("rank 84 on a")
    assert lines[-1] == "… and 84 ranks with shorter steps"
    assert len(lines) == 17


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("event", EVENTS, ids=[event["kind"] for _, event in EVENTS])
def test_events_can_come_alone(event, is_watched, capsys, monkeypatch):
    monkeypatch.setattr("sparkdml.observe.progress.is_watched", lambda: is_watched)
    show(verbose=2, events=[event])
    capsys.readouterr()


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_run_that_had_ended_already(capsys, monkeypatch, is_watched):
    monkeypatch.setattr("sparkdml.observe.progress.is_watched", lambda: is_watched)
    show(verbose=1, events=[(-1, {"kind": "already-trained", "step": 1234})])
    assert "already complete (1,234 steps)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("room", "text"),
    [
        (None, "step 3, loss 0.4, 50 samples/s, 2 workers, 0:02 left"),
        (52, "step 3, loss 0.4, 50 samples/s, 2 workers, 0:02 left"),
        (51, "step 3, loss 0.4, 50 samples/s, 0:02 left"),
        (40, "loss 0.4, 50 samples/s, 0:02 left"),
        (20, "loss 0.4, 0:02 left"),
        (1, "loss 0.4"),
    ],
)
def test_what_gives_way_on_a_narrow_screen(room, text):
    facts = {"step": "step 3", "loss": "loss 0.4", "speed": "50 samples/s"}
    facts |= {"workers": "2 workers", "left": "0:02 left"}
    assert fitting(facts, room) == text


@pytest.mark.parametrize(("term", "watched"), [("xterm", True), ("dumb", False)])
def test_who_looks_on(monkeypatch, term, watched):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    assert progress_module.is_watched() is watched


def test_a_log_file_is_not_watched():
    assert not progress_module.is_watched()


def test_verbose_is_checked():
    with pytest.raises(ParameterError, match=r"verbose must be 0 \(silent\), 1 .* but got 3"):
        Progress(1, 3)
