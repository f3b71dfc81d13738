"""Synchronous SGD with backup workers: n + b compute, the first n gradients of a step count.

Later ones are dropped, and their senders continue with the current parameters (Chen et al. 2016,
"Revisiting distributed synchronous SGD", arXiv 1604.00981). The rows of a dropped gradient are
skipped in that epoch, as are the rows that slow workers have left when n workers have none. One
that has more rows than others and keeps up with them is waited for: nothing of it is skipped.
"""

from __future__ import annotations

import sys

import torch

from sparkdml.errors import ParameterError
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.backup_workers.root import Ask, FarRoot, NearRoot
from sparkdml.strategies.base import Strategy, check_backend
from sparkdml.strategies.replicas import make_alike
from sparkdml.training.epoch import Epoch
from sparkdml.training.training import Training

SKIPPED_ROWS = "skipped_rows"


class BackupWorkers(Strategy):
    """Like `AllReduce`, but each step ignores the `backup` gradients that arrive last.

    Rows are lost by it: how many is in the history, as `skipped_rows`, and said at the end of each
    epoch. Of a worker that is always slow most rows are skipped; `AdaptiveBalance` loses none. The
    sum of a step goes through one rank. Two runs are the same only if nothing is dropped.

    Args:
        backup: how many of the workers' gradients are not waited for; `numWorkers` counts all.
        max_lag: how many steps a slow worker may be behind, before it is waited for: as many
            gradients are kept for it in memory.
        backend: "horovod", "torch", "mpi", or "auto", as in `AllReduce`. Gradients go by torch.
    """

    columns = (SKIPPED_ROWS,)

    def __init__(self, backup: int = 1, max_lag: int = 16, backend: str = "auto") -> None:
        if backup < 0:
            raise ParameterError("backup", backup, "at least 0")
        if max_lag < 1:
            raise ParameterError("max_lag", max_lag, "at least 1")
        self.backup, self.max_lag = backup, max_lag
        self.backend = check_backend(backend)

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers)]

    def run(self, role: str, training: Training) -> None:
        make_alike(training.task, training.ctx.comm)
        self._step = 0  # of this submission
        with self._open(training) as root:
            for epoch in training.epochs(self):
                for batch in epoch:
                    training.task.grad(batch)
                    training.clock.lap("compute")
                    if not self._apply_sums(training, epoch, root):
                        break  # none of the first ranks had a row left
                self._count_skipped(training, epoch)

    def _open(self, training: Training) -> Ask:
        comm, params = training.ctx.comm, training.task.params
        buckets = [bucket.tensor for bucket in params.buckets(sys.maxsize)]
        if comm.rank:
            return FarRoot(comm, buckets)
        needed = self._num_needed(comm.size)
        if comm.size <= self.backup:
            training.note(f"{self!r} with {comm.size} workers waits for one gradient a step")
        return NearRoot(
            comm, buckets, num_needed=needed, num_stats=len(params.stats), max_lag=self.max_lag
        )

    def _num_needed(self, size: int) -> int:
        return max(1, size - self.backup)

    def _apply_sums(self, training: Training, epoch: Epoch, root: Ask) -> bool:
        """The sum of this step; those of more steps, where this rank was late."""
        task = training.task
        for number, _ in enumerate(root.send(self._step)):
            if number:
                training.spans.start_step(training.step + 1)
            self._step += 1
            totals = task.totals()
            training.clock.lap("communication")
            training.spans.lap("communication")
            if not epoch.count(totals):
                return False
            task.apply(totals)
            training.spans.lap("optimizer")
            epoch.tick()
        return True

    def _count_skipped(self, training: Training, epoch: Epoch) -> None:
        if training.is_replayed:
            return
        own = training.ctx.data.num_rows_in(epoch.number, training.rows_per_step)
        total = torch.tensor([float(own)], dtype=torch.float64, device=training.ctx.device)
        total_rows = training.ctx.comm.allreduce_(total).item()
        skipped = 0.0 if training.is_interrupted else total_rows - epoch.totals.rows
        epoch.measured[SKIPPED_ROWS] = skipped
        if skipped:
            training.note(
                f"epoch {epoch.number + 1}: {skipped:,.0f} of {total_rows:,.0f} rows were skipped, "
                f"as their gradients came after the first {self._num_needed(training.ctx.size)} of "
                "a step, or not at all"
            )

    def __repr__(self) -> str:
        return f"BackupWorkers(backup={self.backup}, max_lag={self.max_lag})"
