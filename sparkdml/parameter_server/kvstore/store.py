"""`KVStore`: the servers as MXNet's users think of them.

`init` a key with a value, `push` what is to be added to it (or gradients, once `set_optimizer` has
told the servers how to step), `pull` what it is now. (Chen et al. 2015, "MXNet: a flexible and
efficient machine learning library for heterogeneous distributed systems", section 2.3.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.client.base import Client, Ticket
from sparkdml.parameter_server.client.base import Rows as RowIds
from sparkdml.parameter_server.optimizers import Updater

Key = str | int


class KVStore:
    """One worker's end of the store.

    Two tiers: the values that a worker brings for one key, of several devices or threads, are added
    up before they leave it; and with a `MergingClient` those of all workers of a host are. What the
    consistency of the servers asks for (who may run ahead of whom) holds here too: `clock` ends a
    step.

    Args:
        client: of the parameter server, from `ServerCluster.client(...)` or a strategy's own.
        num_workers: how many workers share the store.
        rank: this worker's among them; None for the client's own number.
    """

    def __init__(self, client: Client, num_workers: int, rank: int | None = None) -> None:
        if num_workers < 1:
            raise ParameterError("num_workers", num_workers, "at least 1")
        self.client, self.num_workers = client, num_workers
        self.rank = client.worker if rank is None else rank

    def init(self, key: Key, value: Tensor, rows: bool = False) -> None:
        """Make the key, unless it is there: the first worker to come brings the value.

        With `rows`, single rows can be pushed and pulled.
        """
        self.client.init(str(key), value, rows=rows)

    def push(
        self,
        key: Key,
        value: Tensor | Sequence[Tensor],
        rows: RowIds | None = None,
        weight: float = 1.0,
    ) -> Ticket[None]:
        """Add to the key, or with an optimizer take a gradient step; several values are merged.

        Returns at once. This worker's own pulls come after it; `wait` on what is returned to know
        that the servers have it. `weight` is how many examples a gradient is the sum of.
        """
        return self.client.push(str(key), merge(value), rows, weight)

    def pull(self, key: Key, out: Tensor | None = None) -> Tensor:
        """The key's value, into `out` if it is given."""
        return self.pull_async(key, out=out).wait()

    def row_sparse_pull(self, key: Key, row_ids: RowIds, out: Tensor | None = None) -> Tensor:
        """Some rows of a key that was made with `rows=True`, in the order asked for."""
        return self.pull_async(key, row_ids, out).wait()

    def pull_async(
        self, key: Key, rows: RowIds | None = None, out: Tensor | None = None
    ) -> Ticket[Tensor]:
        """As `pull` and `row_sparse_pull`, without waiting."""
        return self.client.pull(str(key), rows, out)

    def set_optimizer(self, optimizer: Updater, keys: Sequence[Key] | None = None) -> None:
        """From now on pushes to these keys, or to all, are gradients for this optimizer."""
        self.client.set_optimizer(optimizer, None if keys is None else [str(key) for key in keys])

    def clock(self) -> int:
        """End a step: what was pushed is on the servers, and the others may count on it."""
        return self.client.clock()

    def barrier(self) -> None:
        """Wait for all workers that are alive."""
        self.client.barrier()

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.client.close()
        else:
            self.client.abort()


def merge(values: Tensor | Sequence[Tensor]) -> Tensor:
    """The sum, in the order given; a single tensor as it is."""
    if isinstance(values, Tensor):
        return values
    if not values:
        raise ParameterError("value", values, "a tensor, or at least one")
    total = values[0].clone()
    for value in values[1:]:
        total += value.to(total.device)
    return total
