"""Draws docs/images/consistency/*.svg from real runs: `python scripts/draw_consistency.py`.

Four workers and a server run on threads of this process, with the real wire: each worker sleeps for
the duration of its steps, pushes, finishes its clock and pulls. The drawings show measurements.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from draw_strategies import BLUE, COLOURS, GREEN, GREY, Parts, document, words

from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP, Consistency
from sparkdml.testing.server_cluster import ServerCluster

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "consistency"
CLOCKS, UNIT_SECONDS = 12, 0.25
LEFT, PIXELS_A_UNIT, LANE = 70, 18, 30  # of the picture
WIDTH = 650
# The durations of each worker's steps: one is fast, two have a long step, one is slow.
UNITS = [
    [1.0] * CLOCKS,
    [1.2, 1.2, 4.0] + [1.2] * (CLOCKS - 3),
    [1.1] * 6 + [4.0] + [1.1] * (CLOCKS - 7),
    [1.8] * CLOCKS,
]


@dataclass(frozen=True)
class Step:
    """A worker's step: the clock that it finished, and seconds since the start."""

    clock: int
    began: float
    computed: float
    read: float  # from then on it had the model for its next step
    was_sent: bool


class Timelines:
    """One run: what each worker did when."""

    def __init__(self, consistency: Consistency, gone: int | None = None) -> None:
        self.consistency, self.gone = consistency, gone
        self.steps: list[list[Step]] = [[] for _ in UNITS]
        self.died = self.came_back = 0.0
        self._start = threading.Barrier(len(UNITS), action=self._begin)

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def run(self) -> Timelines:
        with (
            ServerCluster(1, len(UNITS), consistency=self.consistency) as cluster,
            ThreadPoolExecutor(len(UNITS)) as pool,
        ):
            for future in [
                pool.submit(self._work, cluster, worker) for worker in range(len(UNITS))
            ]:
                future.result()
        return self

    def _work(self, cluster: ServerCluster, worker: int) -> None:
        client = cluster.client(worker)
        client.init("model", torch.ones(1000))
        self._start.wait()
        while client.clock_now < CLOCKS:
            number = client.clock_now
            if worker == self.gone and number == 3 and not self.died:
                client.abort()
                cluster.membership.lost_worker(worker)
                self.died = self._now()
                time.sleep(5 * UNIT_SECONDS)
                client = cluster.client(worker)
                client.init("model", torch.ones(1000))
                self.came_back = self._now()
                continue
            began, before = self._now(), client.stats.pushes
            time.sleep(UNITS[worker][number] * UNIT_SECONDS)
            computed = self._now()
            # Updates shrink as training converges, so that Gaia's filter holds some of them back.
            client.push("model", torch.full((1000,), 0.02 / (1 + number))).wait()
            was_sent = client.stats.pushes > before
            clock = client.clock()
            client.pull("model").wait()
            self.steps[worker].append(Step(clock, began, computed, self._now(), was_sent))
        client.close()

    @property
    def most_ahead(self) -> int:
        """The clocks by which a worker was ahead of the slowest active one when it read."""
        gaps = []
        for steps in self.steps:
            for step in steps:
                done = [
                    sum(other.computed <= step.read for other in others)
                    for others in self.steps
                    if others[-1].computed > step.read
                ]
                gaps.append(step.clock - min(done, default=step.clock))
        return max(gaps)

    @property
    def waiting(self) -> float:
        """The fraction of the workers' time that is waiting."""
        steps = [step for steps in self.steps for step in steps]
        waited = sum(step.read - step.computed for step in steps)
        return waited / sum(step.read - step.began for step in steps)


def draw(timelines: Timelines) -> Parts:
    def x(seconds: float) -> float:
        return LEFT + seconds / UNIT_SECONDS * PIXELS_A_UNIT

    parts: Parts = []
    for worker, steps in enumerate(timelines.steps):
        y = 12 + LANE * worker
        parts.append(words(8, y + 14, f"worker {worker}"))
        for step in steps:
            width = x(step.computed) - x(step.began) - 1
            colour = BLUE if step.was_sent else GREY
            parts.append(
                f'<rect x="{x(step.began):.1f}" y="{y}" width="{width:.1f}" height="18" rx="2" '
                f'fill="{colour}" fill-opacity=".8"/>'
            )
            middle = (x(step.began) + x(step.computed)) / 2
            parts.append(words(round(middle, 1), y + 13, str(step.clock), "w m"))
            if x(step.read) - x(step.computed) > 4:
                parts.append(
                    f'<path d="M{x(step.computed):.1f} {y + 9}H{x(step.read) - 2:.1f}" '
                    f'stroke="{COLOURS["orange"]}" stroke-width="3" stroke-dasharray="3 2"/>'
                )
        if worker == timelines.gone:
            parts.append(words(round(x(timelines.died) + 4, 1), y + 13, "dies"))
            parts.append(
                f'<path d="M{x(timelines.came_back) - 3:.1f} {y - 2}v22" stroke="{GREEN}" '
                'stroke-width="2"/>'
            )
    said = f"{timelines.waiting:.0%} of the workers' time is waiting"
    if timelines.gone is None:
        said += f"; at most {timelines.most_ahead} clocks ahead of the slowest"
    return [*parts, words(LEFT, 16 + LANE * len(UNITS) + 6, said)]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs = {
        "bsp": Timelines(BSP()),
        "ssp": Timelines(SSP(3)),
        "asp": Timelines(ASP(significance=0.01)),
        "tap": Timelines(TAP()),
        "gone": Timelines(BSP(), gone=3),
    }
    for name, timelines in runs.items():
        parts = draw(timelines.run())
        path = FOLDER / f"{name}.svg"
        path.write_text(document(name, parts, WIDTH, 30 + LANE * len(UNITS)))
        print(path, parts[-1])


if __name__ == "__main__":
    main()
