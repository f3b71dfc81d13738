"""The tables: their content, and that every contender that was left out is named."""

from __future__ import annotations

import json

from benchmarks.contenders.base import Bench, Contender
from benchmarks.measurement import FIRST_EPOCH, WHOLE_CALL, Measurement
from benchmarks.report import Report
from benchmarks.workloads import W1, Workload


class Fake(Contender):
    shuffle = "none"

    def __init__(self, name: str, ours: bool = False) -> None:
        self.name, self.title, self.ours = name, f"the {name}", ours

    def missing(self) -> str | None:
        return None

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        raise AssertionError(f"{workload} {bench}")


def measured(whole_call: float, epoch: float) -> Measurement:
    return Measurement({WHOLE_CALL: whole_call, FIRST_EPOCH: epoch}, rows=W1.rows, loss=0.5)


def a_report() -> Report:
    report = Report([Fake("ours", ours=True), Fake("peer"), Fake("broken")], [W1], quick=False)
    report.rounds["W1"] = [
        {"ours": measured(2, 1), "peer": measured(10, 1.5)},
        {"ours": measured(4, 2), "peer": measured(16, 3)},
    ]
    report.skipped["absent"] = "a package"
    report.failures.append("W1, round 1 of 2, broken: no luck")
    return report


def test_markdown_has_medians_rates_and_ratios() -> None:
    lines = a_report().to_markdown().splitlines()

    assert "| the ours | 3.00 (2.00 to 4.00) | 1.50 (1.00 to 2.00) | 667 k | 0.5000 |" in lines
    assert "How many times as fast the ours is:" in lines
    assert "| the peer | 4.50 (4.00 to 5.00) | 1.50 (1.50 to 1.50) |" in lines


def test_markdown_names_the_skipped_and_the_failed() -> None:
    text = a_report().to_markdown()

    assert "Skipped: absent, which needs a package." in text
    assert "- W1, round 1 of 2, broken: no luck" in text


def test_json_keeps_every_round_and_the_ratios() -> None:
    values = json.loads(a_report().to_json())

    assert [entry["ours"]["seconds"][WHOLE_CALL] for entry in values["rounds"]["W1"]] == [2, 4]
    assert values["ratios"]["W1"]["ours against peer"][WHOLE_CALL]["median"] == 4.5
    assert "ours against broken" not in values["ratios"]["W1"]
