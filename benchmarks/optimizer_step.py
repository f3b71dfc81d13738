"""Optimizers' steps over the flat buffer beside torch's own: `python benchmarks/optimizer_step.py`.

Both take turns after the same backward pass, as in a training loop: a step that is repeated alone
finds all its data in the caches, which never happens in training.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.ratios import Spread
from benchmarks.workloads import W1, W2, Training, make_model
from sparkdml.training.flat import FlatParams
from sparkdml.training.flat_step import flat_step

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}


class Contender:
    """A model and its optimizers."""

    def __init__(self, work: Training, make: Callable[..., torch.optim.Optimizer], flat: bool):
        self.module = make_model(work)
        params = FlatParams(self.module, num_stats=1)
        optimizer = make(self.module.parameters(), lr=1e-4)
        parameters = list(self.module.parameters())
        self.step = flat_step(optimizer, params, parameters) if flat else optimizer.step
        self._params = params

    def seconds(self, features: torch.Tensor, labels: torch.Tensor) -> float:
        self._params.zero()
        nn.functional.cross_entropy(self.module(features), labels).backward()  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def measure(work: Training, name: str, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of each step: torch's own, and that over the flat buffer."""
    features = torch.randn(work.batch_size, work.width)
    labels = torch.randint(0, work.classes, (work.batch_size,))
    own, flat = (Contender(work, OPTIMIZERS[name], is_flat) for is_flat in (False, True))
    both = [(own.seconds(features, labels), flat.seconds(features, labels)) for _ in range(steps)]
    return both[len(both) // 10 :]  # the first steps create the optimizers' states


def table(work: Training, steps: int) -> str:
    count = sum(p.numel() for p in make_model(work).parameters())
    lines = [
        f"| {work.name}'s model, {count:,} parameters | own step, µs | flat, µs | times as fast |",
        "|---|---|---|---|",
    ]
    for name in OPTIMIZERS:
        pairs = measure(work, name, steps)
        own, flat, ratio = (
            Spread.of(values)
            for values in ([a for a, _ in pairs], [b for _, b in pairs], [a / b for a, b in pairs])
        )
        assert own is not None
        assert flat is not None
        assert ratio is not None
        medians = f"{own.median * 1e6:.0f} | {flat.median * 1e6:.0f} | {ratio.median:.2f}"
        lines.append(f"| {name} | {medians} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/optimizer_step.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(argv)
    if options.steps < 10:
        parser.error(f"--steps must be at least 10 but got {options.steps}")
    torch.set_num_threads(1)  # as in a worker with one core
    for work in (W1, W2):
        print(table(work, options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
