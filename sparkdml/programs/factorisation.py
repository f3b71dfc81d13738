"""Matrix factorisation in disjoint blocks (DSGD).

Users and items are each cut into as many blocks as there are workers. A worker has the ratings of
its own users. In each round it processes those of one block of items, a different one for each
worker, so no two workers ever change the same factors and none waits for a lock. After as many
rounds as there are workers, every rating has been used once. (Gemulla et al. 2011, "Large-scale
matrix factorization with distributed stochastic gradient descent".)

Within a block the ratings are processed in batches in which no user and no item occurs twice: a
batch is a few vector operations, and equals plain SGD over its ratings one by one. The same holds
for the whole: W workers compute what one worker would compute from the same ratings in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.errors import DataError, ParameterError
from sparkdml.parameter_server.kvstore.store import KVStore
from sparkdml.parameter_server.kvstore.tables import MatrixTable, Rows
from sparkdml.programs.base import Program, deal, run_program, sum_over_ranks
from sparkdml.programs.scheduling import (
    Ints,
    disjoint_batches,
    place_in_block,
    rotate,
    rows_of_block,
)

USERS, ITEMS = 0, 1  # in the seeds of their first factors


def sgd_batch(
    users: Rows,
    items: Rows,
    user: Ints,
    item: Ints,
    rating: NDArray[np.float32],
    mean: float,
    learning_rate: float,
    regularisation: float,
) -> float:
    """Make a step on ratings that share no user or item, in place; return the squared errors' sum.

    A row holds factors and, last, a bias. A rating is the mean plus two biases plus the product of
    the factors.
    """
    of_user, of_item = users[user], items[item]
    error = rating - mean - of_user[:, -1] - of_item[:, -1]
    error -= np.einsum("ij,ij->i", of_user[:, :-1], of_item[:, :-1])
    pull_user, pull_item = of_item.copy(), of_user.copy()
    pull_user[:, -1] = pull_item[:, -1] = 1.0  # a bias is the factor of a constant
    step = error[:, None]
    users[user] = of_user + learning_rate * (step * pull_user - regularisation * of_user)
    items[item] = of_item + learning_rate * (step * pull_item - regularisation * of_item)
    return float(error @ error)


def begin(rows: Rows, dice: np.random.Generator) -> None:
    """Small random factors and no bias, in place."""
    rows[:, :-1] = dice.normal(0.0, 0.1, (len(rows), rows.shape[1] - 1))
    rows[:, -1] = 0.0


@dataclass(frozen=True)
class Factors:
    """The result: tables with a row for each user and item, and the mean rating."""

    users: MatrixTable
    items: MatrixTable
    mean: float
    errors: list[float]  # at rank 0: root mean square in training, of each epoch

    def predict(self, user: Ints, item: Ints) -> NDArray[np.float32]:
        """Return predicted ratings; fetches only the rows that it needs."""
        wanted_users, users = np.unique(user, return_inverse=True)
        wanted_items, items = np.unique(item, return_inverse=True)
        return predict(
            self.users.get(wanted_users),
            self.items.get(wanted_items),
            user=users,
            item=items,
            mean=self.mean,
        )


def factorise(
    store: KVStore,
    comm: Communicator,
    user: Ints,
    item: Ints,
    rating: NDArray[np.floating],
    shape: tuple[int, int],
    rank: int = 16,
    name: str = "factors",
    **options: Any,
) -> Factors:
    """Return factors of all workers' ratings; every worker calls it with its own ratings.

    Args:
        store, comm: this worker's.
        user, item, rating: this worker's ratings, of any users: they are first redistributed, so
            that each user's ratings are on one worker.
        shape: the number of users and the number of items.
        rank: the number of factors.
        name: a prefix of the names of the tables.
        options: those of `Factorisation`.
    """
    if rank < 1:
        raise ParameterError("rank", rank, "at least 1")
    for what, ids, count in (("user", user, shape[0]), ("item", item, shape[1])):
        if len(ids) and not (ids.min() >= 0 and ids.max() < count):
            raise DataError(f"{what} ids must be from 0 to {count - 1}, as `shape` says")
    total, count = sum_over_ranks(comm, rating.sum(), len(rating))
    if not count:
        raise DataError("no worker has a rating")
    if not np.isfinite(total):
        raise DataError("ratings must be finite: there is a NaN or an infinity among them")
    user, item, own = deal(comm, user % comm.size, user, item, rating.astype(np.float32))
    users, items = (
        MatrixTable(
            store,
            f"{name}.{what}",
            num_rows=num_rows,
            width=rank + 1,
            max_rows_held=-(-num_rows // comm.size),
        )
        for what, num_rows in zip(("users", "items"), shape, strict=True)
    )
    mean = float(total / count)
    program = Factorisation(
        users,
        items,
        user=user,
        item=item,
        rating=own,
        worker=comm.rank,
        num_workers=comm.size,
        mean=mean,
        **options,
    )
    run_program(program, comm)
    users.max_rows_held = items.max_rows_held = None  # training is over: a reader may need all rows
    return Factors(users, items, mean, program.errors)


class Factorisation(Program):
    """One worker's ratings.

    Args:
        users, items: the factors, one row each: `rank` factors and a bias.
        user, item, rating: the ratings of this worker's users (`user % num_workers == worker`).
        worker, num_workers: the worker's number, which is also its block of users, and the number
            of workers.
        mean: the mean of all ratings.
        epochs: passes over the ratings.
        learning_rate: the learning rate of the first epoch; it is multiplied by `decay` after each.
        regularisation: the weight of the L2 penalty, which pulls factors and biases towards 0.
        seed: the random seed of the order of the ratings.
    """

    def __init__(
        self,
        users: MatrixTable,
        items: MatrixTable,
        user: Ints,
        item: Ints,
        rating: NDArray[np.float32],
        worker: int,
        num_workers: int,
        mean: float,
        epochs: int = 30,
        learning_rate: float = 0.02,
        decay: float = 0.95,
        regularisation: float = 0.08,
        seed: int = 0,
    ) -> None:
        if epochs < 1:
            raise ParameterError("epochs", epochs, "at least 1")
        if not learning_rate > 0:
            raise ParameterError("learning_rate", learning_rate, "more than 0")
        if not 0 < decay <= 1:
            raise ParameterError("decay", decay, "more than 0 and at most 1")
        if not regularisation >= 0:
            raise ParameterError("regularisation", regularisation, "at least 0")
        assert (user % num_workers == worker).all(), "ratings of another worker's users"
        self._items, self._worker, self._num_workers = items, worker, num_workers
        self._mean, self._epochs, self._seed = mean, epochs, seed
        self._learning_rate, self._decay = learning_rate, decay
        self._regularisation = regularisation
        self._blocks = [
            _Block(user[inside], item[inside], rating[inside], num_workers)
            for inside in (item % num_workers == block for block in range(num_workers))
        ]
        # A worker keeps its own users' factors throughout: no other worker needs them.
        self._held = ExitStack()
        own = rows_of_block(worker, num_workers, users.num_rows)
        self._users = self._held.enter_context(users.hold(own))
        begin(self._users, np.random.default_rng([seed, worker, USERS]))
        self.errors: list[float] = []  # at rank 0: root mean square in training, of each epoch
        self._sums = np.zeros(2)

    def schedule(self, round: int, num_workers: int) -> list[Tensor] | None:
        epoch = round // num_workers
        if epoch == self._epochs:
            return None
        return [
            torch.tensor([rotate(worker, round, num_workers), epoch])
            for worker in range(num_workers)
        ]

    def push(self, work: Tensor) -> Tensor:
        index, epoch = work.tolist()
        block, learning_rate = self._blocks[index], self._learning_rate * self._decay**epoch
        dice = np.random.default_rng([self._seed, epoch, self._worker, index])
        squares = 0.0
        with self._items.hold(
            rows_of_block(index, self._num_workers, self._items.num_rows)
        ) as items:
            if epoch == 0 and index == self._worker:  # the first worker to hold this block
                begin(items, np.random.default_rng([self._seed, index, ITEMS]))
            for batch in dice.permutation(len(block.batches)):
                user, item, rating = block.batches[batch]
                squares += sgd_batch(
                    self._users,
                    items,
                    user=user,
                    item=item,
                    rating=rating,
                    mean=self._mean,
                    learning_rate=learning_rate,
                    regularisation=self._regularisation,
                )
        return torch.tensor([squares, block.num_ratings], dtype=torch.float64)

    def pull(self, works: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        self._sums += np.sum([part.numpy() for part in parts], axis=0)
        if works[0][0] == self._num_workers - 1:  # worker 0 held the last block
            squares, count = self._sums
            self.errors.append(float(np.sqrt(squares / max(count, 1))))
            self._sums = np.zeros(2)

    def finish(self) -> None:
        self._held.close()


class _Block:
    """A worker's ratings of one block of items, in disjoint batches, counted inside the blocks."""

    def __init__(
        self, user: Ints, item: Ints, rating: NDArray[np.float32], num_blocks: int
    ) -> None:
        user, item = place_in_block(user, num_blocks), place_in_block(item, num_blocks)
        self.num_ratings = len(rating)
        self.batches = [
            (user[batch], item[batch], rating[batch].astype(np.float32))
            for batch in disjoint_batches(user, item)
        ]


def predict(users: Rows, items: Rows, user: Ints, item: Ints, mean: float) -> NDArray[np.float32]:
    """Ratings from the rows of both, as `sgd_batch` has them."""
    of_user, of_item = users[user], items[item]
    products = np.einsum("ij,ij->i", of_user[:, :-1], of_item[:, :-1])
    rating: NDArray[np.float32] = mean + of_user[:, -1] + of_item[:, -1] + products
    return rating
