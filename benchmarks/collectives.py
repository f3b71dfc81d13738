"""Every topology beside Horovod's and torch's own, and W1's loop with shared memory.

`python benchmarks/collectives.py --help`. All ways to sum take turns, and so do the fits: only
measurements of one round are divided by each other. With more ranks than cores, ranks wait for a
core as well as for each other.

Each backend has its own gang of processes: Horovod's thread wakes every millisecond, even when it
has nothing to do, and would take cycles from others in the same processes. In every round, for
every size, each gang has its turn: Horovod's, then torch's with our topologies. The other gang is
stopped (SIGSTOP) with all its threads, but only between its calls, when none of its ranks is in a
sum.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.collective_ranks import HOROVOD, open_sums, time_sums
from benchmarks.contenders.bare_torchrun import BareTorchrun
from benchmarks.contenders.base import Bench, Contender
from benchmarks.contenders.feed_limit import FeedLimit
from benchmarks.contenders.sparkdml_fit import SparkdmlFit
from benchmarks.measurement import IN_STEP, LATER_EPOCHS, Measurement, allreduce_metric
from benchmarks.ratios import Round, Spread, metrics_in, seconds_of, times_as_fast
from benchmarks.session import prepare_environment
from benchmarks.workloads import W1, Training
from sparkdml.comm.backends import horovod_available

if TYPE_CHECKING:
    from sparkdml.testing.rank_processes import RankProcesses

RESULTS = Path(__file__).resolve().parent / "results"
SHARED = "shared-memory"
RANKS = (2, 4)
SIZES, QUICK_SIZES = (1_000, 100_000, 10_000_000), (1_000, 100_000)
# Of one size, in one gang. No rank may be stopped for the 120 s after which Horovod's thread, which
# agrees with its peers all the time, takes them for lost: see HOROVOD_GLOO_TIMEOUT_SECONDS.
TURN_SECONDS = 100.0


@dataclass(frozen=True)
class Aim:
    """`contender` must be `at_least` times as fast as `other`."""

    contender: str
    other: str
    metric: str
    at_least: float


SUM_AIMS = [
    Aim(SHARED, HOROVOD, allreduce_metric(size), at_least)
    for size, at_least in zip(SIZES, (10.0, 10.0, 2.5), strict=True)
]
OURS = SparkdmlFit("torch", SHARED)
LOOP: list[Contender] = [OURS, SparkdmlFit("torch", "native"), BareTorchrun(), FeedLimit()]
FREE_AGREEMENT = f"{FeedLimit.name}, if its ranks waited for each other"
LOOP_AIMS = [
    Aim(OURS.name, FeedLimit.name, LATER_EPOCHS, 0.9),
    Aim(OURS.name, BareTorchrun.name, LATER_EPOCHS, 1.8),
]


def measure_sums(ranks: int, rounds: int, sizes: Sequence[int], quick: bool) -> list[Round]:
    from sparkdml.testing.rank_processes import RankProcesses

    backends = ["horovod", "torch"] if horovod_available() else ["torch"]
    with ExitStack() as stack:
        gangs = []
        for backend in backends:
            gang = stack.enter_context(RankProcesses(backend, ranks, TURN_SECONDS))
            stack.enter_context(continued_at_the_end(gang))
            with turn_of(gang):
                gang.run(open_sums, backend)
            gangs.append(gang)
        return [measure_round(gangs, sizes, quick) for _ in range(rounds)]


def measure_round(gangs: Sequence[RankProcesses], sizes: Sequence[int], quick: bool) -> Round:
    load = os.getloadavg()[0]
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for size in sizes:
        for gang in gangs:
            with turn_of(gang):
                found = gang.run(time_sums, size, repeats(size, quick))[0]
            for name, taken in found.items():
                seconds[name][allreduce_metric(size)] = taken
    return {name: Measurement(each, load_average=load) for name, each in seconds.items()}


@contextmanager
def turn_of(gang: RankProcesses) -> Iterator[None]:
    """The gang runs only within this context."""
    tell(gang, signal.SIGCONT)
    try:
        yield
    finally:
        tell(gang, signal.SIGSTOP)


def continued_at_the_end(gang: RankProcesses) -> subprocess.Popen[bytes]:
    """By a shell whose input ends with this process, even if it is killed.

    Ranks that are stopped can't see that they are no longer needed, and would stay indefinitely.
    """
    script = ["sh", "-c", 'read -r nothing; kill -CONT "$@"', "sh", *map(str, gang.pids)]
    return subprocess.Popen(script, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def tell(gang: RankProcesses, number: signal.Signals) -> None:
    for pid in gang.pids:
        os.kill(pid, number)


def repeats(size: int, quick: bool) -> int:
    """Repeat short sums more often, since they vary more and take less time."""
    count = max(8, min(200, 10_000_000 // size))
    return max(1, count // 10) if quick else count


def measure_loop(work: Training, rounds: int, bench: Bench) -> list[Round]:
    entries: list[Round] = []
    for number in range(1, rounds + 1):
        entry: Round = {}
        for contender in LOOP:
            contender.warm_up(bench)
            load = os.getloadavg()[0]
            measured = contender.measure(work, bench)
            entry[contender.name] = replace(measured, load_average=load)
            seconds = measured.seconds[LATER_EPOCHS]
            print(f"W1, round {number} of {rounds}, {contender.name}: {seconds:.3f} s", flush=True)
            if IN_STEP in measured.seconds:
                entry[FREE_AGREEMENT] = Measurement({LATER_EPOCHS: measured.seconds[IN_STEP]})
        entries.append(entry)
    return entries


def table(rounds: Sequence[Round], against: str, in_ms: bool) -> list[str]:
    """A table of times, with how many times as fast as `against` each is."""
    metrics = [name for name in metrics_in(rounds) if in_ms or name == LATER_EPOCHS]
    unit = "ms" if in_ms else "s"
    head = [f"{metric}, {unit}" for metric in metrics]
    lines = [f"| | {' | '.join(head)} |", f"|---{'|---' * len(head)}|"]
    for name in rounds[0]:
        cells = []
        for metric in metrics:
            spread = Spread.of(seconds_of(rounds, name, metric))
            ratio = times_as_fast(rounds, name, [against], metric)
            time = "-" if spread is None else f"{spread.median * (1e3 if in_ms else 1):.3f}"
            cells.append(time if ratio is None else f"{time} ({_describe(ratio)})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", f"In brackets: how many times as fast as {against} (least to most)."]


def judge(rounds: Sequence[Round], aims: Sequence[Aim], where: str) -> list[str]:
    lines = []
    for aim in aims:
        ratio = times_as_fast(rounds, aim.contender, [aim.other], aim.metric)
        if ratio is not None:
            reached = "yes" if ratio.median >= aim.at_least else "no"
            what = f"{where}, {aim.metric}: {aim.contender} against {aim.other}"
            lines.append(f"| {what} | {aim.at_least:g} | {_describe(ratio)} | {reached} |")
    return lines


def _describe(ratio: Spread) -> str:
    return f"{ratio.median:.2f}; {ratio.low:.2f} to {ratio.high:.2f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks/collectives.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--only", choices=("sums", "loop"), help="one of the two parts")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="of the sums")
    parser.add_argument("--sizes", type=int, nargs="+", help="of the sums, in floats")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one fit")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    if min(options.ranks) < 2:
        parser.error(f"--ranks must be at least 2 but got {min(options.ranks)}")
    options.sizes = options.sizes or list(QUICK_SIZES if options.quick else SIZES)
    if min(options.sizes) < 1:
        parser.error(f"--sizes must be at least 1 but got {min(options.sizes)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    prepare_environment()
    options.results.mkdir(parents=True, exist_ok=True)
    lines, judged = ["# Collectives", ""], []
    if options.only != "loop":
        for ranks in options.ranks:
            sums = measure_sums(ranks, options.rounds, options.sizes, options.quick)
            against = HOROVOD if HOROVOD in sums[0] else next(iter(sums[0]))
            lines += [f"## {ranks} ranks", "", *table(sums, against, in_ms=True), ""]
            judged += judge(sums, SUM_AIMS, f"{ranks} ranks")
    if options.only != "sums":
        rows = 16_000 if options.quick else W1.rows
        work = replace(W1, name="W1-steady", rows=rows, epochs=2 if options.quick else 4)
        bench = Bench(options.results / "data", options.timeout)
        try:
            loop = measure_loop(work, options.rounds, bench)
        finally:
            bench.close()
        lines += ["## W1's loop", "", *table(loop, FeedLimit.name, in_ms=False), ""]
        judged += judge(loop, LOOP_AIMS, "W1")
    lines += ["## Aims", "", "| | target | measured | reached |", "|---|---|---|---|", *judged]
    text = "\n".join(lines)
    (options.results / "collectives.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
