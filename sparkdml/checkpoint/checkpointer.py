"""The worker's side of checkpoints: reads the state to resume from, takes new ones, reports them.

Runs on the training thread; `writer` writes on a thread of its own. All ranks call the same methods
at the same steps. Rank 0 writes what is the same everywhere, each
rank its own; the driver writes the manifest once every rank has reported its parts.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from sparkdml.checkpoint.archive import REPLICATED_PART, rank_part, read_part
from sparkdml.checkpoint.encoding import decode
from sparkdml.checkpoint.manifest import Kind, Manifest, Part, checkpoint_id
from sparkdml.checkpoint.policy import CheckpointSchedule, Interval
from sparkdml.checkpoint.state import Entry, State, merge
from sparkdml.checkpoint.stores.base import Place
from sparkdml.checkpoint.writer import Outgoing, Writer, Written
from sparkdml.errors import CheckpointError, SetupError, StoreError
from sparkdml.observe.timeline.recorder import NO_SPANS, NoSpans


class Reporter(Protocol):
    """Takes a worker's reports: at the driver, the `Committer` of the run.

    Each call returns once the driver has taken the report, or can no longer be reached.
    """

    def report_parts(self, report: dict[str, Any]) -> None:
        """This rank's parts of a checkpoint are in the store, or could not be written."""
        ...

    def report_damaged(self, checkpoint_id: str, why: str) -> None:
        """A checkpoint can't be read: the next submission resumes from its parent."""
        ...


@dataclass(frozen=True)
class CheckpointPlan:
    """What a worker must know of the checkpoints of its run."""

    place: Place
    probe: (
        str | None
    )  # an object that the driver has just written: a worker that can't read it has another disk
    submission: int
    resume: Manifest | None
    every: Interval
    epoch_ends: bool = False  # whether each epoch's end is saved, whatever `every` says
    writes: bool = True  # a replay only reads
    failures: int = 0
    elapsed_seconds: float = 0.0
    failure_seconds: float | None = None


class Checkpointer:
    """`ctx.checkpoint`. For a loop of one's own: `load()` first, then `save(step, …)` now and then.

    >>> state = ctx.checkpoint.load() or {"weights": initial}
    >>> for step in range(ctx.checkpoint.step, 1000):
    ...     ...
    ...     if ctx.checkpoint.due(step + 1):
    ...         ctx.checkpoint.save(step + 1, {"weights": weights})
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        rank: int,
        size: int,
        worker: dict[str, Any],
        reporter: Reporter,
        spans: NoSpans = NO_SPANS,
    ) -> None:
        self.plan = plan
        self.resumed = plan.resume
        self._rank, self._size = rank, size
        self._worker = worker  # its host, device and backend, for the manifest
        self._reporter = reporter
        self._spans = spans
        self._store = plan.place.open()
        self._writer = Writer(self._store)
        self._schedule = CheckpointSchedule(
            plan.every,
            now=time.monotonic(),
            step=self.step,
            epoch=0 if plan.resume is None else plan.resume.epoch,
            epoch_ends=plan.epoch_ends,
            failures=plan.failures,
            elapsed_seconds=plan.elapsed_seconds,
            failure_seconds=plan.failure_seconds,
        )
        if plan.resume is not None:
            self._schedule.costed(plan.resume.copy_seconds, plan.resume.write_seconds)
        self._last_error: BaseException | None = None
        self._check_shared()

    @property
    def step(self) -> int:
        """The step to resume from: 0 in a new run."""
        return 0 if self.resumed is None else self.resumed.step

    # -- reading --------------------------------------------------------------------------------

    def load(self) -> dict[str, Any] | None:
        """Return the state to resume from, by name; None in a new run."""
        state = self.load_entries()
        return None if state is None else {name: entry.value for name, entry in state.items()}

    def load_entries(self) -> State | None:
        manifest = self.resumed
        if manifest is None:
            return None
        try:
            replicated = self._read(
                manifest, [part for part in manifest.parts if part.rank is None]
            )
            own = [part for part in manifest.parts if part.rank is not None]
            if manifest.num_workers == self._size:
                ours = self._read(manifest, [part for part in own if part.rank == self._rank])[0]
            else:
                ours = merge(self._read(manifest, own))
        except StoreError:
            raise
        except CheckpointError as error:
            # The driver will choose the parent checkpoint and start again.
            self._reporter.report_damaged(manifest.id, str(error))
            raise
        return {**(replicated[0] if replicated else {}), **ours}

    def _read(self, manifest: Manifest, parts: list[Part]) -> list[State]:
        return [decode(read_part(self._store, manifest, part), part.name) for part in parts]

    # -- writing --------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        return self.plan.writes

    @property
    def busy(self) -> bool:
        """Whether this rank's last checkpoint is still being written."""
        return self._writer.busy

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due by rank 0's clock: ask on rank 0, and tell the others."""
        return self.writes and self._schedule.due_after_step(step, time.monotonic())

    def due_after_epoch(self, epoch: int) -> bool:
        """Whether a checkpoint is due at the end of an epoch: the same on every rank."""
        return self.writes and self._schedule.due_after_epoch(epoch)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        epoch: int = 0,
        kind: Kind = "step",
        metrics: Mapping[str, float] | None = None,
        global_batch: int = 0,
        later: Callable[[], State] = dict,
    ) -> None:
        """Copy the state now, and write it in the background. Call it on every rank.

        Values of `state` that are not an `Entry` must be the same on every rank. Blocks only while
        this rank's previous checkpoint is still being written.
        """
        if not self.writes:
            return
        entries = {
            name: value if isinstance(value, Entry) else Entry(value)
            for name, value in state.items()
        }
        own = {name: entry for name, entry in entries.items() if entry.rule != "replicated"}
        files = [Outgoing(rank_part(self._rank), self._rank, own, later)]
        if self._rank == 0:
            shared = {name: e for name, e in entries.items() if e.rule == "replicated"}
            files.append(Outgoing(REPLICATED_PART, None, shared))
        id = checkpoint_id(step, self.plan.submission, kind)
        report = {
            "id": id,
            "step": step,
            "epoch": epoch,
            "kind": kind,
            "metrics": dict(metrics or {}),
            "global_batch": global_batch,
            "size": self._size,
            "worker": self._describe_worker(),
        }
        self._schedule.taken(step, time.monotonic())
        self._writer.write(id, files, lambda written: self._written(report, written))
        if kind == "root":
            self._writer.wait()
            if self._last_error is not None:
                raise CheckpointError(
                    f"the first checkpoint can't be written: {self._last_error}"
                ) from self._last_error

    def wait(self) -> None:
        """Wait until this rank's parts are in the store, or their write has failed."""
        self._writer.wait()

    def close(self) -> None:
        """Nothing more will be saved; what is in flight still gets to the store."""
        self._writer.close()

    def _written(self, report: dict[str, Any], written: Written) -> None:
        self._last_error = written.error
        self._spans.add_write(written.write_seconds, sum(part.num_bytes for part in written.parts))
        if written.error is None:  # else the waits between attempts would count
            self._schedule.costed(written.copy_seconds, written.write_seconds)
        report["copy_seconds"] = written.copy_seconds
        report["write_seconds"] = written.write_seconds
        report["parts"] = [asdict(part) for part in written.parts]
        report["error"] = None if written.error is None else str(written.error)
        self._reporter.report_parts(report)

    def _describe_worker(self) -> dict[str, Any]:
        """Describe what the bits of the state depend on, besides the plan."""
        return {
            **self._worker,
            "threads": torch.get_num_threads(),
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "torch": torch.__version__,
        }

    def _check_shared(self) -> None:
        if self.plan.probe is None:
            return
        try:
            self._store.read(self.plan.probe)
        except FileNotFoundError:
            raise SetupError(
                f"rank {self._rank} on {self._worker['host']} can't see what the driver wrote to "
                f"{self._store.url}: that place is not shared by all hosts. Use a path on a shared "
                "disk, or a store such as s3://… or hdfs://…"
            ) from None
