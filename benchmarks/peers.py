"""Measure sparkdml and its peers, interleaved in one run: `python benchmarks/peers.py --help`.

Within a workload the contenders take turns (A B C A B C …), because the machine drifts. The
results go into a folder: `peers.md` and `peers.json` are the tables, `peers.png` is the picture.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders.base import Bench, Contender
from benchmarks.lineup import ALL
from benchmarks.measurement import Measurement
from benchmarks.report import Report
from benchmarks.session import prepare_environment
from benchmarks.workloads import FULL, QUICK, Training, Workload

RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a contender failed, else 0."""
    options = parse(argv)
    prepare_environment()
    sizes = QUICK if options.quick else FULL
    contenders, skipped = installed([ALL[name] for name in options.contenders])
    if not contenders:
        print("nothing to measure: all chosen contenders lack a requirement", file=sys.stderr)
        return 1
    report = Report(contenders, [sizes[name] for name in options.workloads], options.quick)
    report.skipped = skipped
    options.results.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.results / "data", options.timeout)
    try:
        run(report, bench, options.rounds)
    finally:
        bench.close()
        write(report, options.results)
    return 1 if report.failures else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks/peers.py", description=__doc__)
    parser.add_argument("--workloads", type=_names_in(FULL), default=list(FULL), help="W1,W3,…")
    parser.add_argument("--contenders", type=_names_in(ALL), default=list(ALL), help=", ".join(ALL))
    parser.add_argument("--rounds", type=_at_least_one, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one call")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    return parser.parse_args(argv)


def _names_in(known: Iterable[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"must be among {', '.join(known)}, with commas between, but got {unknown}"
            )
        return [name for name in known if name in chosen]

    return names


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 but got {value}")
    return value


def installed(chosen: list[Contender]) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that can run here, and by name what the others need."""
    missing = {each.name: each.missing() for each in chosen}
    skipped = {name: what for name, what in missing.items() if what is not None}
    for name, what in skipped.items():
        print(f"skipped: {name}, which needs {what}")
    return [each for each in chosen if each.name not in skipped], skipped


def run(report: Report, bench: Bench, rounds: int) -> None:
    for workload in report.workloads:
        entries = report.rounds.setdefault(workload.name, [])
        for number in range(1, rounds + 1):
            entries.append({})
            for contender in report.contenders:
                if not contender.does(workload):
                    continue
                where = f"{workload.name}, round {number} of {rounds}, {contender.name}"
                measured = attempt(contender, workload, bench, report, where)
                if measured is not None:
                    entries[-1][contender.name] = measured
                    times = ", ".join(f"{name} {s:.4g} s" for name, s in measured.seconds.items())
                    print(f"{where}: {times}", flush=True)


def attempt(
    contender: Contender, workload: Workload, bench: Bench, report: Report, where: str
) -> Measurement | None:
    """Return a measurement, or None after a failure, so that the other contenders still run.

    A peer's launcher may fail occasionally: it gets a second call, and the report says so. Ours
    doesn't.
    """
    for last in [True] if contender.ours else [False, True]:
        try:
            return measure_once(contender, workload, bench)
        except Exception as error:
            failed = f"{where}: {_first_line(error)}"
            (report.failures if last else report.repeated).append(failed)
            print(f"{where}: FAILED\n{error}", file=sys.stderr, flush=True)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def measure_once(contender: Contender, workload: Workload, bench: Bench) -> Measurement:
    """Make one warm call; refused if it didn't train on every row."""
    if isinstance(workload, Training):
        contender.warm_up(bench)
    load_average = os.getloadavg()[0]
    measured = contender.measure(workload, bench)
    if isinstance(workload, Training) and measured.rows != workload.rows:
        raise RuntimeError(f"trained on {measured.rows} rows an epoch instead of {workload.rows}")
    return replace(measured, load_average=load_average)


def write(report: Report, folder: Path) -> None:
    (folder / "peers.json").write_text(report.to_json())
    (folder / "peers.md").write_text(report.to_markdown())
    try:
        from benchmarks.plot import draw

        draw(report, folder / "peers.png")
    except ImportError as error:
        print(f"no plot: {error} (`pip install sparkdml[plot]`)")
    print(f"\n{report.to_markdown()}\nwritten to {folder}")


if __name__ == "__main__":
    sys.exit(main())
