"""What happens to a run when a contender fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contenders.base import Bench, Contender
from benchmarks.measurement import WHOLE_CALL, Measurement
from benchmarks.peers import run
from benchmarks.report import Report
from benchmarks.workloads import W3, Workload


class Scripted(Contender):
    title, shuffle = "scripted", "none"

    def __init__(self, name: str, outcomes: list[int | Exception], ours: bool = False) -> None:
        self.name, self.outcomes, self.ours = name, outcomes, ours

    def missing(self) -> str | None:
        return None

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return Measurement({WHOLE_CALL: 1.0}, rows=outcome)


def run_with(*contenders: Contender, rounds: int = 1) -> Report:
    report = Report(list(contenders), [W3], quick=True)
    run(report, Bench(Path("unused"), 1.0), rounds)
    return report


def test_contenders_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    contenders = [Scripted("a", [W3.rows] * 2), Scripted("b", [W3.rows] * 2)]

    report = run_with(*contenders, rounds=2)

    turns = [line.split(", ")[2].split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert turns == ["a", "b", "a", "b"]
    assert [list(entry) for entry in report.rounds["W3"]] == [["a", "b"], ["a", "b"]]


def test_a_peer_gets_a_second_call_which_is_told() -> None:
    report = run_with(Scripted("peer", [RuntimeError("unlucky"), W3.rows]))

    assert "peer" in report.rounds["W3"][0]
    assert report.repeated == ["W3, round 1 of 1, peer: unlucky"]
    assert report.failures == []


def test_ours_gets_none_and_the_others_continue() -> None:
    ours = Scripted("ours", [RuntimeError("broken"), W3.rows], ours=True)

    report = run_with(ours, Scripted("peer", [W3.rows]))

    assert list(report.rounds["W3"][0]) == ["peer"]
    assert report.failures == ["W3, round 1 of 1, ours: broken"]


def test_a_contender_that_skips_rows_has_failed() -> None:
    report = run_with(Scripted("ours", [W3.rows - 1], ours=True))

    assert report.failures == [
        "W3, round 1 of 1, ours: trained on 999 rows an epoch instead of 1000"
    ]
