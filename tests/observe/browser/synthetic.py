"""Runs as the Training tab's JSON tells them, made up: of any length, with everything in them."""

from __future__ import annotations

import math
import random
from typing import Any

START = 1_790_000_000.0
TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 41, in step
    loss = criterion(model(batch.features), batch.labels)
  File "torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x783 and 784x10)
<script>alert(1)</script>
"""
Json = dict[str, Any]


def summary(number: int = 0, **changes: Any) -> Json:
    """A run of the list; `number` makes them differ."""
    chance = random.Random(number)
    state = "running" if number < 2 else chance.choice(["finished"] * 6 + ["failed", "interrupted"])
    done = chance.uniform(0.1, 0.9) if state != "finished" else 1.0
    run: Json = {
        "id": f"run-{number:04d}",
        "name": chance.choice(["digits", "click-through", "forecast", "ranker"]) + f"-{number}",
        "state": state,
        "strategy": chance.choice(["AllReduce()", "AllReduce(backend='torch')"]),
        "backend": "horovod",
        "topology": "shared-memory",
        "workers": chance.choice([1, 2, 4, 8]),
        "epoch": max(1, round(done * 10)),
        "epochs": 10,
        "step": round(done * 31_250),
        "progress": done,
        "secondsLeft": 400 * (1 - done) if state == "running" else None,
        "loss": 2.3 * math.exp(-3 * done),
        "valLoss": 2.4 * math.exp(-3 * done),
        "rowsPerSecond": chance.uniform(2e4, 2e5),
        "started": START - number * 4000,
        "ended": None if state == "running" else START - number * 4000 + 900 * done,
        "seconds": 900 * done,
        "restarts": chance.choice([0, 0, 0, 1]),
        "cause": "ValueError: the labels hold a null (row 17)" if state == "failed" else None,
    }
    return run | changes


def detail(
    steps: int = 1_000_000,
    points: int = 2000,
    ranks: int = 8,
    epochs: int = 10,
    failures: int = 2,
    **changes: Any,
) -> Json:
    """One run of `steps` steps, thinned to `points` points, which failed `failures` times."""
    chance = random.Random(steps)
    at = sorted({max(1, round((index + 1) * steps / points)) for index in range(points)})
    loss = [
        [step, 0.09 + 2.2 * math.exp(-5 * step / steps) * chance.lognormvariate(0, 0.18)]
        for step in at
    ]
    done = epochs - 1
    ends = [round((epoch + 1) * steps / (done + 0.6)) for epoch in range(done)]
    rows = [_epoch(index, end, steps, chance) for index, end in enumerate(ends)]
    seconds = 3600.0
    failed_at = [round(steps * (0.3 + 0.3 * index)) for index in range(failures)]
    resumed = [step - round(steps * 0.04) for step in failed_at]
    times = [START + seconds * step / steps for step in failed_at]
    run = summary(0, step=steps, workers=ranks, epoch=epochs, epochs=epochs, restarts=failures)
    run |= {"progress": (done + 0.6) / epochs, "secondsLeft": 151.0, "started": START}
    run |= {"loss": loss[-1][1], "seconds": seconds, "name": "click-through"}
    run |= {"batchSize": 64, "globalBatch": 64 * ranks, "seed": 7, "stopped": None}
    run["series"] = {
        "loss": loss,
        "rowsPerSecond": _speeds(seconds, 600, 24_000 * ranks, chance),
        "rankRowsPerSecond": {
            str(rank): _speeds(seconds, 400, 24_000 * (0.55 if rank == 3 else 1), chance)
            for rank in range(ranks)
        },
        "logged": {
            "learning_rate": [[step, 0.1 * (1 + math.cos(math.pi * step / steps))] for step in at],
            "evaluator/val_loss": [
                [end, row["val_loss"]] for end, row in zip(ends, rows, strict=True)
            ],
        },
        "epochs": rows,
    }
    run["ranks"] = [_rank(rank, seconds, steps, chance) for rank in range(ranks)]
    run["checkpoints"] = _checkpoints(steps, seconds)
    run["checkpointCount"] = len(run["checkpoints"])
    run["failures"] = [
        {
            "rank": 3,
            "host": "10.0.0.4",
            "cause": "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
            "traceback": TRACEBACK,
            "step": step,
            "time": time,
        }
        for step, time in zip(failed_at, times, strict=True)
    ]
    run["failureCount"] = failures
    run["restartEvents"] = [
        {"cause": "rank 3 failed", "fromStep": step, "workers": ranks, "time": time + 2}
        for step, time in zip(resumed, times, strict=True)
    ]
    hosts = [f"10.0.0.{rank + 1}" for rank in range(ranks)]
    starts = zip([0, *resumed], [START + 0.4, *(time + 2 for time in times)], strict=True)
    run["submissions"] = [
        {"number": number, "workers": ranks, "hosts": hosts, "fromStep": step, "time": time}
        for number, (step, time) in enumerate(starts, start=1)
    ]
    run["notes"] = [{"rank": 0, "text": "learning rate 0.05 from epoch 4 on", "time": START + 60}]
    run["reports"] = {
        "server": [
            {
                "rank": ranks + seat,
                "seat": seat,
                "pushes": 12_345,
                "bytes_pushed": 5 << 20,
                "dropped": "late: 2",
            }
            for seat in range(2)
        ]
    }
    run["plan"] = {
        "model": "Net(784, 256, 10)",
        "optimizer": "SGD(lr=0.1, momentum=0.9)",
        "feed": "512 shards by row hash, spooled to local disk",
        "validation": "0.1 of the rows",
    }
    return run | changes


def _epoch(index: int, end: int, steps: int, chance: random.Random) -> Json:
    left = math.exp(-5 * end / steps)
    return {
        "epoch": index + 1,
        "step": end,
        "loss": 0.1 + 2.3 * left,
        "accuracy": 0.97 - 0.8 * left,
        "val_loss": 0.16 + 2.2 * left + chance.uniform(0, 0.03),
        "val_accuracy": 0.95 - 0.8 * left,
        "rows": 6_000_000,
        "steps": end,
        "seconds": 360.0,
        "rows_per_second": 16_666.0,
    }


def _speeds(seconds: float, count: int, level: float, chance: random.Random) -> list[list[float]]:
    drift, points = 0.0, []
    for index in range(count):
        drift = 0.95 * drift + chance.gauss(0, 0.008)
        points.append([START + seconds * (index + 1) / count, level * (1 + drift)])
    return points


def _rank(rank: int, seconds: float, steps: int, chance: random.Random) -> Json:
    slow = rank == 3
    shares = {
        "data": 0.34 if slow else chance.uniform(0.05, 0.09),
        "compute": 0.52 + chance.uniform(-0.03, 0.03),
        "checkpoint": 0.02,
        "other": 0.015,
    }
    shares["communication"] = 1 - sum(shares.values())
    return {
        "rank": rank,
        "host": f"10.0.0.{rank + 1}",
        "steps": steps,
        "rows": steps * 64,
        "bytes": 3 << 20,
        "messages": 4 * steps,
        "rowsPerSecond": 13_204.0 if slow else chance.uniform(23e3, 25e3),
        "seconds": {name: share * seconds for name, share in shares.items()},
        "stepSeconds": 0.0036,
        "staleness": 0,
        "straggler": slow,
        "slower": 1.8 if slow else None,
        "why": "data" if slow else None,
    }


def _checkpoints(steps: int, seconds: float, count: int = 24) -> list[Json]:
    return [
        {
            "id": f"ckpt-{index:08x}",
            "parent": f"ckpt-{index - 1:08x}" if index else None,
            "step": round(steps * index / count),
            "bytes": 48_300_000,
            "copySeconds": 0.012,
            "writeSeconds": 0.41,
            "kind": "root" if index == 0 else "epoch" if index % 3 == 0 else "step",
            "time": START + seconds * index / count,
        }
        for index in range(count)
    ]
