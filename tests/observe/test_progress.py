"""Progress at the driver: a bar in a terminal, lines elsewhere, nothing where nothing is wanted."""

import sys

import pytest

from sparkdml.observe.progress import Progress

ROW = {"epoch": 1.0, "loss": 0.25, "rows": 100.0, "seconds": 2.0, "rows_per_second": 50.0}
EVENTS = [
    {"kind": "progress", "epoch": 1, "step": 3, "rows": 50.0, "of": 100, "loss": 0.5},
    {"kind": "progress", "epoch": 1, "step": 4, "rows": 60.0, "of": None, "loss": 0.4},
    {"kind": "epoch", "row": ROW},
    {"kind": "log", "values": {"x": 1}},
]


def show(enabled=True):
    with Progress(2, enabled) as progress:
        for event in EVENTS:
            progress.handle(0, event)


def test_lines_where_there_is_no_terminal(capsys):
    show()
    assert capsys.readouterr().err == "epoch 1/2: loss 0.25, 50 rows/s\n"


def test_a_bar_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    show()
    said = capsys.readouterr().err
    assert "epoch 1/2:  25%" in said
    assert "epoch 1/2:  50%" in said
    assert "loss 0.25, 50 rows/s" in said


def test_silence(capsys):
    show(enabled=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("event", EVENTS)
def test_events_can_come_alone(event, capsys):
    with Progress(1, enabled=True) as progress:
        progress.handle(0, event)
    capsys.readouterr()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_that_had_ended_already(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with Progress(2, enabled=True) as progress:
        progress.handle(-1, {"kind": "already-trained", "step": 1234})
    assert "already trained (1,234 steps)" in capsys.readouterr().err
