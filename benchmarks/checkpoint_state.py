"""The copy of a state and its write by themselves, against `torch.save`: part of checkpoint.py."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measurement import Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from benchmarks.workloads import SEED
from sparkdml.checkpoint.encoding import take_apart
from sparkdml.checkpoint.state import Entry, State
from sparkdml.checkpoint.stores.local import LocalStore
from sparkdml.checkpoint.writer import Outgoing, Staging, Writer, Written

SECONDS = "seconds"
COPY, WRITE = "the copy in host memory", "the write: hash, write, sync, rename"
SAVE_SYNCED, SAVE = "torch.save, then sync", "torch.save, left to the page cache"


def make_state(megabytes: int) -> State:
    """Weights and Adam's two moments, in tensors of 4 MB as layers have them."""
    count = max(1, megabytes // 12)
    random = torch.Generator().manual_seed(SEED)

    def tensors() -> dict[str, Tensor]:
        return {f"{layer}": torch.randn(1 << 20, generator=random) for layer in range(count)}

    return {name: Entry(tensors()) for name in ("weights", "first_moment", "second_moment")}


def measure_state(state: State, folder: Path, rounds: int) -> tuple[list[Round], int]:
    values = {name: entry.value for name, entry in state.items()}
    _, tensors = take_apart(state)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    staging, store = Staging(), LocalStore(f"file:{folder / 'store'}")
    writer = Writer(store)
    problems: list[Exception] = []
    plain = folder / "plain.pt"

    def write() -> float:
        """As the worker does; the copy, which it makes first, is taken off."""
        ended: list[Written] = []
        writer.write("0000000000-0001-step", [Outgoing("state", None, state)], ended.append)
        writer.wait()
        problems.extend(each.error for each in ended if each.error is not None)
        return ended[0].write_seconds

    def save(synced: bool) -> None:
        with open(plain, "wb") as file:
            torch.save(values, file)
            file.flush()
            if synced:
                os.fsync(file.fileno())

    contenders: dict[str, Callable[[], float]] = {
        COPY: lambda: _timed(lambda: staging.copy(tensors)),
        WRITE: write,
        SAVE_SYNCED: lambda: _timed(lambda: save(True)),
        SAVE: lambda: _timed(lambda: save(False)),
    }
    measured: list[Round] = []
    for number in range(rounds + 1):
        entry: Round = {}
        for name, contender in contenders.items():
            entry[name] = Measurement({SECONDS: contender()})
            for left in (plain, folder / "store"):  # no one pays for another's dirty pages
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(True)
            os.sync()
        if number:  # the first round makes the buffers
            measured.append(entry)
    if problems:
        raise problems[0]
    return measured, num_bytes


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def state_to_markdown(rounds: list[Round], num_bytes: int) -> list[str]:
    lines = [
        "| | MB/s, median | times as fast as torch.save with sync | … without sync |",
        "|---|---|---|---|",
    ]
    for name in (COPY, WRITE, SAVE_SYNCED, SAVE):
        spread = Spread.of(seconds_of(rounds, name, SECONDS))
        assert spread is not None
        speed = f"{num_bytes / spread.median / 1e6:,.0f}"
        ratios = [ratio(rounds, name, other, SECONDS) for other in (SAVE_SYNCED, SAVE)]
        lines.append(f"| {name} | {speed} | {ratios[0]} | {ratios[1]} |")
    return lines


def ratio(rounds: list[Round], name: str, other: str, metric: str) -> str:
    spread = times_as_fast(rounds, name, [other], metric)
    assert spread is not None
    return f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"
