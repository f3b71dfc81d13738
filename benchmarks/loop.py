"""W1's loop beside its limit, epoch by epoch in the same workers: `python benchmarks/loop.py`.

On a machine whose speed changes from minute to minute, runs that are minutes apart, as in
`collectives.py`, can't be compared. Here every epoch of a `fit` is preceded by four others, in the
same processes and on the same rows: one without communication as a user would write it, one without
communication with our step, one whose ranks only synchronize in every step, and one through torch's
DDP. So the times of a ratio were measured within a few seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import sparkdml as dml
from benchmarks.ratios import Spread
from benchmarks.session import prepare_environment, start_session
from benchmarks.training import RankResult, run_epochs
from benchmarks.workloads import SEED, W1, WORKERS, Training, ensure_data, make_model
from sparkdml.comm.base import Communicator
from sparkdml.comm.topologies.opening import open_topology
from sparkdml.training.flat import FlatParams
from sparkdml.training.flat_step import flat_step

RESULTS = Path(__file__).resolve().parent / "results"
ALONE, FLAT, SYNCHRONIZATION = "no communication", "no communication, our step", "synchronization"
DDP, OURS = "DDP", "sparkdml"
TITLES = {
    OURS: "**sparkdml, shared memory**",
    DDP: "torch's DDP on gloo, with the same feed",
    SYNCHRONIZATION: "synchronization alone: ranks sum one number per step, with our step",
    FLAT: "no communication, with our step over the flat buffer",
    ALONE: "no communication, with torch's own step: the limit",
}


@dataclass
class Beside(dml.Callback):
    """Runs in each worker: trains four models beside the estimator's, an epoch of each in turn."""

    workload: Training
    _models: dict[str, tuple[nn.Module, Any]] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _began: float = 0.0

    def on_epoch_start(self, training: Any) -> None:
        number = training.epoch.number
        if number > 0:  # the first is read from Spark's stream, which can be read only once
            alone = self._train(ALONE, training, number)
            # The others use the same number of batches on every rank: one may be left out, in their
            # favour.
            fewest = -_most(training, -len(alone.step_seconds[0]))
            results = {ALONE: alone}
            results |= {
                name: self._train(name, training, number, int(fewest))
                for name in (FLAT, SYNCHRONIZATION, DDP)
            }
            for name, result in results.items():
                self._seconds[name] = _most(training, result.epoch_seconds[0])
        training.ctx.comm.barrier()
        self._began = time.monotonic()

    def on_epoch_end(self, training: Any, row: dict[str, float]) -> None:
        self._seconds[OURS] = _most(training, time.monotonic() - self._began)
        row.update(self._seconds)

    def _train(
        self, name: str, training: Any, number: int, num_batches: int | None = None
    ) -> RankResult:
        def batches(_: int) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in islice(training.ctx.feed(self.workload.batch_size, number), num_batches):
                yield batch["features"], batch["label"]

        if name not in self._models:
            self._models[name] = self._make(name, training)
        training.ctx.comm.barrier()
        return run_epochs(*self._models[name], batches, epochs=1, load_seconds=0.0)

    def _make(self, name: str, training: Any) -> tuple[nn.Module, Any]:
        module: nn.Module = make_model(self.workload)
        if name == DDP:
            module = nn.parallel.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=self.workload.learning_rate)
        if name in (ALONE, DDP):
            return module, optimizer
        comm = (
            open_topology("shared-memory", training.ctx.comm) if name == SYNCHRONIZATION else None
        )
        return module, FlatSteps(module, optimizer, comm)


class FlatSteps:
    """Steps over the flat buffer, as in a task; with `comm`, each after a sum of one number."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator | None
    ) -> None:
        self._params = FlatParams(module, num_stats=1)
        self._step = flat_step(optimizer, self._params, self._params.parameters)
        self._synchronize = None if comm is None else comm.repeated(torch.zeros(1))

    def zero_grad(self) -> None:
        self._params.zero()

    def step(self) -> None:
        if self._synchronize is not None:
            self._synchronize().wait()
        self._step()


def _most(training: Any, number: float) -> float:
    """Return the largest value of all ranks."""
    return float(training.ctx.comm.allreduce_(torch.tensor([number]).double(), "max").item())


def table(rows: Sequence[dict[str, float]]) -> str:
    lines = [
        f"| W1, {len(rows)} epochs of each in turn | s per epoch | as fast as the limit "
        "| as the limit with our step | as synchronization alone | as DDP |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        seconds = Spread.of([row[name] for row in rows])
        others = (ALONE, FLAT, SYNCHRONIZATION, DDP)
        ratios = [Spread.of([row[other] / row[name] for row in rows]) for other in others]
        assert seconds is not None
        cells = [f"{seconds.median:.2f} ({seconds.low:.2f} to {seconds.high:.2f})"]
        cells += [f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})" for r in ratios if r is not None]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/loop.py", description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each, after the first")
    parser.add_argument("--rows", type=int, default=W1.rows)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    options = parser.parse_args(argv)
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1 but got {options.epochs}")
    prepare_environment()
    work = replace(W1, rows=options.rows)
    folder = str(ensure_data(work, options.results / "data"))
    spark = start_session()
    try:
        fitted = dml.TorchEstimator(
            model=partial(make_model, work),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=work.learning_rate),
            batchSize=work.batch_size,
            epochs=options.epochs + 1,
            numWorkers=WORKERS,
            seed=SEED,
            strategy=dml.AllReduce(backend="torch", topology="shared-memory"),
            callbacks=[Beside(work)],
        ).fit(spark.read.parquet(folder))
    finally:
        spark.stop()
    rows = [{name: row[name] for name in TITLES} for row in list(fitted.history)[1:]]
    text = table(rows)
    (options.results / "loop.md").write_text(text)
    (options.results / "loop.json").write_text(json.dumps(rows, indent=2))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
