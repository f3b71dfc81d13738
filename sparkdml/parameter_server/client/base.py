"""The interface that a worker has to the servers: a client with push, pull and a clock.

A table is a named tensor. `rows=True` makes it a table of rows (an embedding, a factor matrix), of
which single rows can be pushed and pulled; other tables are pushed and pulled whole, though they
are divided into parts for the servers too. The table's updater decides what a push means: `Add()`
adds it; an optimizer (`SGD`, `Adagrad`, `Adam`, see `optimizers.py`) takes it as a gradient: the
sum over some examples, with their number as `weight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.stats import ClientStats

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result", covariant=True)

# The connection to the driver's membership: `ask(what, **fields)` gives its answer, as plain JSON
# values, or None while the driver can't be reached. Called from several threads.
Rows = Sequence[int] | Tensor


class Ask(Protocol):
    def __call__(self, what: str, **fields: Any) -> Any: ...


class Ticket(Protocol[Result]):
    """An operation in flight. `wait` returns its result, or raises its error."""

    def wait(self, timeout_seconds: float | None = None) -> Result: ...

    @property
    def done(self) -> bool: ...


class Client(Protocol):
    """One worker's client. All calls that return tickets return at once; a thread does the rest.

    Pushes and pulls of one client reach a table in the order of the calls, so a pull sees this
    worker's own pushes (but for those that the consistency model holds back until the clock).
    """

    worker: int
    stats: ClientStats

    @property
    def clock_now(self) -> int:
        """How many clocks this worker has finished."""
        ...

    def init(
        self,
        name: str,
        tensor: Tensor,
        rows: bool = False,
        updater: Updater | None = None,
        exact: bool = False,
    ) -> None:
        """Create the table unless it exists: the first worker's value wins. Waits.

        Every push to an `exact` table is sent at once and in full precision, whatever the filter or
        the consistency model.
        """
        ...

    def push(
        self, name: str, value: Tensor, rows: Rows | None = None, weight: float = 1.0
    ) -> Ticket[None]:
        """Send an update; done once the servers hold it in every replica.

        The tensor must not change until then. With `rows`, `value[i]` belongs to row `rows[i]`; a
        row that occurs twice counts twice.
        """
        ...

    def pull(
        self, name: str, rows: Rows | None = None, out: Tensor | None = None
    ) -> Ticket[Tensor]:
        """Fetch the table, or some of its rows, as fresh as the consistency model demands."""
        ...

    def clock(self) -> int:
        """Finish a clock: all own pushes are on the servers, where other workers can read them.

        Waits for the acknowledgements of this worker's pushes, not for other workers: the next pull
        waits for them, as far as the consistency model requires.
        """
        ...

    def barrier(self) -> None:
        """Wait until all workers that are alive have reached the barrier."""
        ...

    def set_optimizer(self, updater: Updater, names: Sequence[str] | None = None) -> None:
        """Set the updater of these tables, or of all. Its state is kept if it fits."""
        ...

    def snapshot(self) -> Mapping[str, Mapping[str, Any]]:
        """Return all tables with their updaters' state, as of one clock: for a checkpoint."""
        ...

    def restore(self, snapshot: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore a snapshot, whatever the servers hold now."""
        ...

    def close(self) -> None:
        """Finish what is in flight, and leave: the others no longer wait for this worker."""
        ...

    def abort(self) -> None:
        """Leave at once after a failure."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()
