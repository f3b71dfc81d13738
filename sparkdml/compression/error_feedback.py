"""Error feedback: what was not sent is kept as a residual, and sent later.

Residuals are in units of one row's gradient. Batches differ in size, and so do the ranks' shares of
a step: a residual from a full batch must weigh no more in the last, short batch than the gradients
of that batch do. A rank without rows sends nothing and keeps its residual.
(Seide et al. 2014, Interspeech; Karimireddy et al. 2019, arXiv 1901.09847.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.base import Communicator, Work
from sparkdml.compression.base import Reducer, Unfinished, begin_stats
from sparkdml.training.flat import Bucket, FlatParams
from sparkdml.training.totals import ROWS

# Ends an exchange; returns what this rank has sent, and the sum of what all ranks have sent.
End = Callable[[], tuple[Tensor, Tensor]]


def with_residual(sums: Tensor, residual: Tensor, rows: float) -> Tensor:
    """Return what should be sent for `rows` rows: the sum of their gradients, and the residual."""
    return torch.add(sums, residual, alpha=rows)


def compensate_(residual: Tensor, wanted: Tensor, sent: Tensor, rows: float) -> None:
    """Update the residual in place, after `sent` was sent instead of `wanted`."""
    if rows:
        torch.sub(wanted, sent, out=residual).div_(rows)


class ResidualReducer(Reducer):
    """Error feedback around any exchange: a subclass sends a tensor, and this keeps the residuals.

    Each bucket has a residual, per row. It is added to what the next step sends, and becomes what
    that step did not send. `state()` brings it into checkpoints, each rank its own.

    Attributes:
        comm: the communicator that the exchange goes over.
        buckets: the stretches of the gradients, in the order in which they are reduced.
    """

    sends_stats: ClassVar[bool] = False  # whether a bucket's exchange adds up its stats, too

    def __init__(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> None:
        self.comm, self._params, self.buckets = comm, params, buckets
        self._residuals = [torch.zeros_like(b.grads, dtype=torch.float32) for b in buckets]

    def reduce_async_(self, index: int) -> Work:
        bucket, residual = self.buckets[index], self._residuals[index]
        # This rank's own rows: all were counted in the forward passes, before the first gradient
        # was complete. Read them before the stats are summed.
        rows = float(self._params.stats[ROWS])
        is_empty = not bucket.grads.numel()
        begun = begin_stats(self.comm, bucket) if is_empty or not self.sends_stats else []
        if is_empty:
            return Unfinished(begun, lambda: None)
        wanted = with_residual(bucket.grads.float(), residual, rows)
        end = self.begin(index, wanted, rows)

        def finish() -> None:
            sent, total = end()
            compensate_(residual, wanted, sent, rows)
            bucket.grads.copy_(total)

        return Unfinished(begun, finish)

    @abstractmethod
    def begin(self, index: int, wanted: Tensor, rows: float) -> End:
        """Begin to send a bucket's flat float32 tensor; the gradients of `rows` rows are in it.

        Returns a function that ends the exchange: it gives what of this rank was sent, and the sum
        of what all ranks sent, which is the same on every rank. With `rows` at 0, send zeros.
        """

    def state(self) -> State:
        """Return this rank's residuals; with another number of ranks, all start from zero.

        "debts" is their name in checkpoints since the first release.
        """
        return {"debts": Entry(self._residuals, "reset")}

    def load(self, state: Mapping[str, Any]) -> list[str]:
        return load_all_("residuals", self._residuals, state.get("debts"))


def copy_all_(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def load_all_(what: str, own: Sequence[Tensor], saved: Sequence[Tensor] | None) -> list[str]:
    """Restore tensors from a checkpoint, if saved; return `[what]` if their shapes differ."""
    if saved is None:
        return []
    if [tensor.shape for tensor in saved] != [tensor.shape for tensor in own]:
        return [what]
    copy_all_(own, saved)
    return []
