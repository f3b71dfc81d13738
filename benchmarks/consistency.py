"""Time to a loss under BSP, SSP, ASP and TAP beside stragglers: `python benchmarks/consistency.py`.

MNIST, where SPARKDML_DATA names the folder that has `mnist/`; else scikit-learn's digits. Four
workers and two servers; the time of a step is a sleep, so that it does not depend on the machine's
few cores. There are two kinds of stragglers, each four times slower than the others: another worker
in every step, or always the same one. Rank 0 keeps copies of the model at several moments of the
run; after the run they are evaluated by the loss on the test images.

Where pushes are applied one by one (all models except BSP), each is a separate step: the learning
rate is divided by the number of workers, so that a clock moves the model equally far in total.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

import sparkdml as dml
from benchmarks.measurement import Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from benchmarks.session import prepare_environment
from benchmarks.strategies import accuracy, read_images

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdml.training.run import TrainingRun

RESULTS = Path(__file__).resolve().parent / "results"
WORKERS, SERVERS, SLOW_RANK, TIMES_SLOWER = 4, 2, 3, 4
SECONDS_BETWEEN_LOOKS = 0.2
TO_TARGET = "to the target"

Pattern = Literal["rotating", "always"]
TITLES: dict[Pattern, str] = {
    "rotating": "another worker is slow in every step",
    "always": "one worker is always slow",
}
MODELS: dict[str, dml.ParameterServer] = {
    "BSP": dml.ParameterServer(SERVERS, dml.BSP()),
    "SSP(3)": dml.ParameterServer(SERVERS, dml.SSP(3)),
    "ASP": dml.ParameterServer(SERVERS, dml.ASP(0.01)),
    "TAP": dml.ParameterServer(SERVERS, dml.TAP()),
    "TAP, leased": dml.ParameterServer(SERVERS, dml.TAP(), leased=True),
}
LINE_UP: dict[Pattern, tuple[str, ...]] = {
    "rotating": ("BSP", "SSP(3)", "ASP", "TAP"),
    "always": tuple(MODELS),
}
AIMS: dict[tuple[Pattern, str], float] = {  # times as fast as BSP
    ("rotating", "SSP(3)"): 1.5,
    ("always", "TAP, leased"): 2.0,
}


@dataclass(frozen=True)
class Work:
    """The work of every run."""

    rows: int
    batch_size: int
    epochs: int
    target: float
    learning_rate: float
    seconds_a_step: float
    within: float  # points of accuracy from BSP's


MNIST = Work(30_000, 128, 2, 0.4, learning_rate=0.5, seconds_a_step=0.08, within=0.5)
# A test image is a quarter of a point here.
DIGITS = Work(1_400, 8, 3, 0.5, learning_rate=0.2, seconds_a_step=0.05, within=2.0)


class Straggles(dml.Callback):
    """A step takes its time, and the straggler's takes more."""

    def __init__(self, pattern: Pattern, seconds: float) -> None:
        self.pattern, self.seconds = pattern, seconds

    def on_step_start(self, training: TrainingRun) -> None:
        slow = training.step % WORKERS if self.pattern == "rotating" else SLOW_RANK
        time.sleep(self.seconds * (TIMES_SLOWER if training.ctx.rank == slow else 1))


class Looks(dml.Callback):
    """Rank 0 writes the model down now and then, with the seconds since its first step began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = self.last = 0.0

    def on_step_start(self, training: TrainingRun) -> None:
        self.began = self.began or time.perf_counter()

    def on_step_end(self, training: TrainingRun) -> None:
        if time.perf_counter() - self.last > SECONDS_BETWEEN_LOOKS:
            self.last = time.perf_counter()
            self._write(training)

    def on_run_end(self, training: TrainingRun) -> None:
        self._write(training)

    def _write(self, training: TrainingRun) -> None:
        if training.ctx.rank == 0:
            seconds = time.perf_counter() - self.began
            torch.save(training.task.module.state_dict(), self.folder / f"{seconds:012.4f}.pt")


@dataclass(frozen=True)
class Run:
    """One training: the test loss over time, and how good the model was in the end."""

    seconds: list[float]
    losses: list[float]
    accuracy: float

    def reached(self, target: float) -> float | None:
        """When the mean of three evaluations reached the target; a lucky one doesn't count."""
        for n in range(2, len(self.losses)):
            if sum(self.losses[n - 2 : n + 1]) / 3 <= target:
                return self.seconds[n]
        return None


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def train(
    images: DataFrame, test: tuple[Tensor, Tensor], pattern: Pattern, name: str, work: Work
) -> Run:
    strategy = MODELS[name]
    scale = 1 if strategy.consistency.aggregates else WORKERS
    folder = Path(tempfile.mkdtemp(prefix="sparkdml-consistency-"))
    try:
        dml.TorchEstimator(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=work.learning_rate / scale),
            batchSize=work.batch_size,
            epochs=work.epochs,
            numWorkers=WORKERS,
            seed=7,
            strategy=strategy,
            callbacks=[
                # The last epoch with small steps: the noise of the last few doesn't decide.
                dml.LearningRateSchedule(
                    partial(MultiStepLR, milestones=[work.epochs - 1], gamma=0.2)
                ),
                Looks(folder),
                Straggles(pattern, work.seconds_a_step),
            ],
            verbose=0,
        ).fit(images)
        return judge_looks(folder, test)
    finally:
        shutil.rmtree(folder)


def judge_looks(folder: Path, test: tuple[Tensor, Tensor]) -> Run:
    inputs, targets = test
    module = network().eval()
    looks = sorted(folder.glob("*.pt"))
    losses = []
    with torch.no_grad():
        for look in looks:
            module.load_state_dict(torch.load(look, weights_only=True))
            outputs = module(inputs)
            losses.append(nn.functional.cross_entropy(outputs, targets).item())
    share = accuracy(outputs, targets).mean().item()
    return Run([float(look.stem) for look in looks], losses, share)


def to_tensors(images: DataFrame) -> tuple[Tensor, Tensor]:
    rows = images.toPandas()
    features = torch.from_numpy(np.stack(rows["features"].to_numpy())).float()
    return features, torch.tensor(rows["label"].to_numpy())


# -- results ----------------------------------------------------------------------------------


@dataclass
class Found:
    """All runs of a pattern: one of each model in a round."""

    pattern: Pattern
    work: Work
    runs: dict[str, list[Run]]

    @property
    def rounds(self) -> list[Round]:
        count = max(len(runs) for runs in self.runs.values())
        return [
            {
                name: Measurement({TO_TARGET: seconds})
                for name, runs in self.runs.items()
                if n < len(runs) and (seconds := runs[n].reached(self.work.target)) is not None
            }
            for n in range(count)
        ]

    def sooner(self, name: str) -> Spread | None:
        return times_as_fast(self.rounds, name, ["BSP"], TO_TARGET)

    def points(self, name: str) -> float:
        """Percentage points of accuracy above BSP's, where they differ most."""
        pairs = zip(self.runs[name], self.runs["BSP"], strict=True)
        return max((100 * (one.accuracy - usual.accuracy) for one, usual in pairs), key=abs)

    def to_markdown(self) -> str:
        lines = [
            f"{TITLES[self.pattern].capitalize()}: seconds to a test loss of {self.work.target}, "
            "the median of the rounds (least to most).",
            "",
            "| model | s to target | times as fast as BSP | s in total | accuracy | points |",
            "|---" * 6 + "|",
        ]
        for name, runs in self.runs.items():
            cells = (
                name,
                written(Spread.of(seconds_of(self.rounds, name, TO_TARGET)), 1),
                written(self.sooner(name), 2),
                written(Spread.of([run.seconds[-1] for run in runs]), 1),
                written(Spread.of([100 * run.accuracy for run in runs]), 2),
                f"{self.points(name):+.2f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def missed(self) -> list[str]:
        """The aims that were missed."""
        missed = []
        for name in self.runs:
            sooner, wanted = self.sooner(name), AIMS.get((self.pattern, name))
            if wanted is not None and (sooner is None or sooner.median < wanted):
                missed.append(f"{self.pattern}: {name} is not {wanted} times as fast as BSP")
            if abs(self.points(name)) > self.work.within:
                missed.append(f"{self.pattern}: {name} is {self.points(name):+.2f} points away")
        return missed


def written(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "never"
    text = f"{spread.median:.{digits}f}"
    if spread.count == 1:
        return text
    return f"{text} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def draw(all_found: Sequence[Found], path: Path) -> None:
    """The test loss over time: a panel for each kind of straggler, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(all_found), figsize=(6 * len(all_found), 3.8), squeeze=False
    )
    for axis, found in zip(axes.flat, all_found, strict=True):
        for number, (name, runs) in enumerate(found.runs.items()):
            for n, run in enumerate(runs):
                label = name if n == 0 else None
                axis.plot(run.seconds, run.losses, f"C{number}", label=label, linewidth=1.2)
        axis.axhline(found.work.target, color="#8a919b", linestyle="--", linewidth=1)
        axis.set(yscale="log", xlabel="seconds", title=TITLES[found.pattern])
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axes[0][0].set_ylabel("test loss")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def start_session() -> SparkSession:
    slots = WORKERS + SERVERS
    session = (
        dml.session_builder("sparkdml consistency", f"local[{slots},4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "3g")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/consistency.py", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPARKDML_DATA"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="digits, even if MNIST is available")
    parser.add_argument("--patterns", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    data = None if options.small or options.data is None else Path(options.data)
    work = DIGITS if data is None else MNIST
    prepare_environment()
    spark = start_session()
    try:
        images, test_images = read_images(spark, data, work.rows)
        test = to_tensors(test_images)
        all_found = [Found(p, work, {name: [] for name in LINE_UP[p]}) for p in options.patterns]
        for number in range(1, options.rounds + 1):
            for found in all_found:
                for name, runs in found.runs.items():  # one after the other: the machine drifts
                    runs.append(train(images, test, found.pattern, name, work))
                    seconds = runs[-1].reached(work.target)
                    print(f"round {number}, {found.pattern}, {name}: {seconds} s", file=sys.stderr)
    finally:
        spark.stop()
    options.results.mkdir(parents=True, exist_ok=True)
    table = "\n".join(found.to_markdown() for found in all_found)
    (options.results / "consistency.md").write_text(table)
    (options.results / "consistency.json").write_text(
        json.dumps([asdict(found) for found in all_found], indent=1)
    )
    draw(all_found, options.results / "consistency.png")
    print(table)
    missed = [words for found in all_found for words in found.missed()]
    print("\n".join(["missed:", *missed]) if missed else "all aims reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
