"""`KVStore`: the servers with the interface of MXNet's KVStore. Used in workers, or at the driver.

`init` creates a key with a value, `push` adds to it (or, after `set_optimizer`, sends gradients for
the servers' optimizer), `pull` fetches its current value. (Chen et al. 2015, "MXNet: a flexible and
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

    Values are merged on two levels: those of one worker for one key, from several devices or
    threads, are added up before they are sent; with a `MergingClient` so are those of all workers
    of a host. The servers' consistency model applies here too: `clock` ends a step.

    Args:
        client: of the parameter server, from `ServerCluster.client(...)` or a strategy's own.
        num_workers: how many workers share the store.
        rank: this worker's rank among them; None for the client's own number.
    """

    def __init__(self, client: Client, num_workers: int, rank: int | None = None) -> None:
        if num_workers < 1:
            raise ParameterError("num_workers", num_workers, "at least 1")
        self.client, self.num_workers = client, num_workers
        self.rank = client.worker if rank is None else rank

    def init(self, key: Key, value: Tensor, rows: bool = False) -> None:
        """Create the key unless it exists: the first worker's value wins.

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

        Returns at once. This worker's later pulls see it; `wait` on the returned ticket until the
        servers have it. `weight` is the number of examples that a gradient is the sum of.
        """
        return self.client.push(str(key), merge(value), rows, weight)

    def pull(self, key: Key, out: Tensor | None = None) -> Tensor:
        """Return the key's value, in `out` if it is given."""
        return self.pull_async(key, out=out).wait()

    def row_sparse_pull(self, key: Key, row_ids: RowIds, out: Tensor | None = None) -> Tensor:
        """Return some rows of a key that was created with `rows=True`, in the given order."""
        return self.pull_async(key, row_ids, out).wait()

    def pull_async(
        self, key: Key, rows: RowIds | None = None, out: Tensor | None = None
    ) -> Ticket[Tensor]:
        """Like `pull` and `row_sparse_pull`, without waiting."""
        return self.client.pull(str(key), rows, out)

    def set_optimizer(self, optimizer: Updater, keys: Sequence[Key] | None = None) -> None:
        """From now on pushes to these keys, or to all, are gradients for this optimizer."""
        self.client.set_optimizer(optimizer, None if keys is None else [str(key) for key in keys])

    def clock(self) -> int:
        """End a step: what was pushed is on the servers, where other workers can read it."""
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
