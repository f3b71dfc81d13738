"""Synchronous SGD by allreduce: the sum of all gradients is the same on every rank.

The gradients are cut into fixed buckets, reduced always in the same order, so that two runs give
the same bits. With several buckets communication overlaps with backward: a bucket is sent as soon
as backward has filled it and all buckets before it have been sent. The next batch is read between
sending the last bucket and waiting for the sums. Runs in each worker, on the loop's thread; the
communicator's own threads carry the sums. (Goyal et al. 2017, arXiv 1706.02677; ring-allreduce as
in Horovod, Sergeev and Del Balso 2018, arXiv 1802.05799.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkdml.checkpoint.state import State
from sparkdml.comm.base import NATIVE, Work
from sparkdml.comm.topologies.opening import TOPOLOGIES
from sparkdml.compression.base import Compression, Reducer, Uncompressed
from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.feed.feed import ReadAhead
from sparkdml.strategies.base import StepStrategy
from sparkdml.training.epoch import Epoch
from sparkdml.training.flat import Bucket
from sparkdml.training.task import Task, Totals
from sparkdml.training.training import Training, TrainingPlan

BACKENDS = ("auto", "horovod", "torch", "mpi")


class AllReduce(StepStrategy):
    """Average the gradients of every step over all workers.

    Args:
        backend: "horovod", "torch", "mpi" (see docs/explanation-strategies.md), or "auto" for
            Horovod where it is installed.
        bucket_bytes: how much is reduced at once. Smaller buckets start sooner, larger ones cost
            fewer round trips. A model smaller than this is reduced in one go after backward.
        topology: who exchanges sums with whom. "native" is what the backend does by itself;
            "shared-memory" is for workers of one host, and "hierarchical" shares memory inside
            each host and sends messages between them; "ring", "tree", "double-tree" and
            "halving-doubling" send messages. "auto" is memory wherever ranks share a host, else a
            tree for what is short (as was measured, among 2 to 4 ranks) and native for the rest.
            On a GPU it is always native, and nothing else may be asked for.
        compression: what the gradients become on the wire: `FP16()`, `BF16()`, `OneBit()`,
            `TopK()`, `PowerSGD()`, or None. Weights, losses and metrics always travel exactly.
            `OneBit` and `TopK` have an exchange of their own, so they take no topology.
    """

    def __init__(
        self,
        backend: str = "auto",
        bucket_bytes: int = 8 << 20,
        topology: str = "auto",
        compression: Compression | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ParameterError("backend", backend, f"one of {', '.join(map(repr, BACKENDS))}")
        if bucket_bytes < 1:
            raise ParameterError("bucket_bytes", bucket_bytes, "at least 1")
        if topology not in TOPOLOGIES:
            raise ParameterError("topology", topology, f"one of {', '.join(map(repr, TOPOLOGIES))}")
        if compression is not None:
            if not isinstance(compression, Compression):
                raise ParameterError("compression", compression, "None, or for instance dml.FP16()")
            if topology not in ("auto", "native") and not compression.any_topology:
                raise ParameterError(
                    "topology",
                    topology,
                    f"'auto' or 'native' with {compression}, which has an exchange of its own",
                    "FP16(), BF16() and PowerSGD() go over any topology.",
                )
        self.backend = backend
        self.bucket_bytes = bucket_bytes
        self.topology = topology
        self.compression = compression

    def check(self, plan: TrainingPlan) -> None:
        if plan.task.precision == "fp16" and self.compression and self.compression.has_residuals:
            raise ParameterError(
                "compression",
                self.compression,
                "None or FP16() with precision='fp16': residuals would be in units of a loss "
                "scale that changes",
                "Use precision='bf16'.",
            )

    def run(self, role: str, training: Training) -> None:
        with self.open_wire(training.ctx) as self._wire:
            super().run(role, training)

    @property
    def wire_topology(self) -> str:
        if self.compression is not None and not self.compression.any_topology:
            return NATIVE  # its exchange goes over the backend's own messages
        return self.topology

    def start(self, training: Training) -> None:
        comm, task = training.ctx.comm, training.task
        self._training = training
        comm.broadcast_(task.params.values)
        for buffer in task.module.buffers():
            comm.broadcast_(buffer)
        self._buckets: list[Bucket] = task.params.buckets(self.bucket_bytes)
        self._owner = [
            index
            for index, bucket in enumerate(self._buckets)
            for _ in range(bucket.num_parameters)
        ]
        self._missing = [bucket.num_parameters for bucket in self._buckets]
        self._works: list[Work] = []
        self._reducer: Reducer = Uncompressed(self._wire, self._buckets)
        if self.compression is not None and comm.size > 1:  # one rank has no wire
            self._reducer = self.compression.reducer(self._wire, task.params, self._buckets)
        if len(self._buckets) > 1 and comm.size > 1:
            task.on_gradient(self._gradient_is_ready)

    def agree(self, task: Task) -> Totals:
        while len(self._works) < len(self._buckets):
            self._send_next()
        self.overlap_work()
        for work in self._works:
            work.wait()
        self._works = []
        self._missing = [bucket.num_parameters for bucket in self._buckets]
        return task.totals()

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        self._batches = ReadAhead(super().batches(training, epoch), training.reading)
        return self._batches

    def overlap_work(self) -> None:
        """Read the next batch: ranks are never quite alike, and the first to be done would wait."""
        if self._training.ctx.size > 1:
            self._batches.advance()

    def _gradient_is_ready(self, index: int) -> None:
        """In backward: send every bucket that is full, in order, but for the last.

        The last one has the stats, and goes when the step asks for them.
        """
        self._missing[self._owner[index]] -= 1
        while len(self._works) < len(self._buckets) - 1 and not self._missing[len(self._works)]:
            self._send_next()

    def _send_next(self) -> None:
        self._works.append(self._reducer.reduce_async_(len(self._works)))

    def state(self) -> State:
        return self._reducer.state()

    def load(self, state: Mapping[str, Any]) -> None:
        lost = self._reducer.load(state)
        if lost:  # only by force, with another bucket_bytes or compression
            self._training.note(
                f"the checkpoint's {' and '.join(lost)} don't fit the buckets of {self!r}, and "
                "start from zero: pass the same bucket_bytes and compression to keep them"
            )

    def __repr__(self) -> str:
        compression = f", compression={self.compression}" if self.compression else ""
        return (
            f"AllReduce(backend={self.backend!r}, bucket_bytes={self.bucket_bytes}, "
            f"topology={self.topology!r}{compression})"
        )
