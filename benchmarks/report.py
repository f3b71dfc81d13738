"""The run as Markdown tables and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from benchmarks.aims import judge
from benchmarks.contenders.base import Contender
from benchmarks.measurement import EPOCH_METRICS
from benchmarks.ratios import Round, Spread, metrics_in, seconds_of, times_as_fast
from benchmarks.workloads import Workload

_PACKAGES = ("torch", "pyspark", "horovod", "pyarrow", "sparkdml")


@dataclass
class Report:
    """The results of a run so far; `rounds` grows with each round."""

    contenders: list[Contender]
    workloads: list[Workload]
    quick: bool
    rounds: dict[str, list[Round]] = field(default_factory=dict)  # workload's name -> its rounds
    skipped: dict[str, str] = field(default_factory=dict)  # contender's name -> what is missing
    failures: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # failures that got a second call
    started: str = field(default_factory=lambda: _now())

    @property
    def references(self) -> list[Contender]:
        """The contender to compare the others with: ours, or the first if ours doesn't run."""
        return [each for each in self.contenders if each.ours] or self.contenders[:1]

    def to_json(self) -> str:
        return json.dumps(
            {
                "started": self.started,
                "quick": self.quick,
                "machine": describe_machine(),
                "workloads": {each.name: asdict(each) for each in self.workloads},
                "skipped": self.skipped,
                "failures": self.failures,
                "repeated": self.repeated,
                "rounds": {
                    name: [{who: m.to_dict() for who, m in entry.items()} for entry in rounds]
                    for name, rounds in self.rounds.items()
                },
                "ratios": self._ratios_as_values(),
            },
            indent=2,
        )

    def _ratios_as_values(self) -> dict[str, Any]:
        ratios: dict[str, Any] = {}
        for name, rounds in self.rounds.items():
            for reference in self.references:
                for contender in self.contenders:
                    for metric in metrics_in(rounds):
                        spread = times_as_fast(rounds, reference.name, [contender.name], metric)
                        if spread is not None and contender is not reference:
                            key = f"{reference.name} against {contender.name}"
                            ratios.setdefault(name, {}).setdefault(key, {})[metric] = asdict(spread)
        return ratios

    def to_markdown(self) -> str:
        machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
        lines = ["# Benchmarks", "", f"Started {self.started}: {machine}.", ""]
        if self.quick:
            lines += ["**A --quick run: it checks the benchmark; its times mean nothing.**", ""]
        lines += [f"Skipped: {name}, which needs {what}." for name, what in self.skipped.items()]
        for workload in self.workloads:
            rounds = self.rounds.get(workload.name, [])
            if any(rounds):
                lines += ["", *self._workload_section(workload, rounds)]
        lines += ["", *self._aims_section()]
        lines += ["", "## How each contender mixes its rows", ""]
        lines += [f"- {each.title}: {each.shuffle}." for each in self.contenders]
        for head, failures in (("Failures", self.failures), ("Called again", self.repeated)):
            if failures:
                lines += ["", f"## {head}", "", *(f"- {failure}" for failure in failures)]
        return "\n".join(lines) + "\n"

    def _workload_section(self, workload: Workload, rounds: list[Round]) -> list[str]:
        metrics = metrics_in(rounds)
        names = {name for entry in rounds for name in entry}
        took_part = [each for each in self.contenders if each.name in names]
        lines = [f"## {workload.name}: {workload.title}", ""]
        lines += [f"Seconds, the median of {_rounds(len(rounds))} (least to most).", ""]
        rates = [metric for metric in metrics if metric in EPOCH_METRICS]
        head = [*metrics, *(f"rows/s, {metric}" for metric in rates), "loss"]
        body = [
            [
                each.title,
                *(_seconds(Spread.of(seconds_of(rounds, each.name, m))) for m in metrics),
                *(_rate(rounds, each.name, metric) for metric in rates),
                _loss(rounds, each.name),
            ]
            for each in took_part
        ]
        if all(row[-1] == _NOTHING for row in body):
            head, body = head[:-1], [row[:-1] for row in body]
        lines += _table(["", *head], body)
        for reference in (each for each in self.references if each in took_part):
            lines += ["", f"How many times as fast {reference.title} is:", ""]
            lines += _table(["as", *metrics], self._ratio_rows(reference, took_part, rounds))
        return lines

    @staticmethod
    def _ratio_rows(
        reference: Contender, took_part: Sequence[Contender], rounds: list[Round]
    ) -> list[list[str]]:
        def cells(other: Contender) -> list[str]:
            return [
                _ratio(times_as_fast(rounds, reference.name, [other.name], metric))
                for metric in metrics_in(rounds)
            ]

        return [[other.title, *cells(other)] for other in took_part if other is not reference]

    def _aims_section(self) -> list[str]:
        judged = judge(self.rounds)
        if not judged:
            return []
        body = [
            [
                f"{aim.workload}: {aim.what}",
                aim.wanted,
                _spread(spread, lambda value: f"{value:.2f}"),
                "yes" if aim.reached(spread) else "no",
            ]
            for aim, spread in judged
        ]
        return ["## Aims", "", *_table(["", "target", "measured", "reached"], body)]


_NOTHING = "-"


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _spread(spread: Spread | None, form: Callable[[float], str]) -> str:
    if spread is None:
        return _NOTHING
    text = form(spread.median)
    return text if spread.count == 1 else f"{text} ({form(spread.low)} to {form(spread.high)})"


def _seconds(spread: Spread | None) -> str:
    return _spread(spread, lambda value: f"{value:.6f}" if value < 0.1 else f"{value:.2f}")


def _ratio(spread: Spread | None) -> str:
    return _spread(spread, lambda value: f"{value:.2f}")


def _rate(rounds: list[Round], name: str, metric: str) -> str:
    rows = max((entry[name].rows for entry in rounds if name in entry), default=0)
    spread = Spread.of(seconds_of(rounds, name, metric))
    return _NOTHING if spread is None or not rows else f"{rows / spread.median / 1000:,.0f} k"


def _loss(rounds: list[Round], name: str) -> str:
    losses = [entry[name].loss for entry in rounds if name in entry]
    known = [loss for loss in losses if loss is not None]
    return f"{known[-1]:.4f}" if known else _NOTHING


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(" ", "minutes")


def describe_machine() -> dict[str, str]:
    described = {"cores": str(os.cpu_count()), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            described[package] = "not installed"
    return described
