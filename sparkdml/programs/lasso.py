"""Lasso by parallel coordinate descent, scheduled dynamically.

Rows are distributed over the workers, and coefficients are on the servers. In each round a few
coefficients are set to their optimal values at the same time. They are drawn at random, in
proportion to how far they moved last time, except those that correlate too much with another one of
the round. (Lee et al. 2014, STRADS; Bradley et al. 2011, "Parallel coordinate descent for
L1-regularized loss minimization"; the objective is scikit-learn's: |y - Xb|² / 2n + alpha |b|.)

The correlations of the next round's candidates are summed over the workers together with this
round's gradients, so the dependency check needs no additional round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.errors import DataError, ParameterError
from sparkdml.parameter_server.kvstore.store import KVStore
from sparkdml.parameter_server.kvstore.tables import MatrixTable
from sparkdml.programs.base import Program, run_program, sum_over_ranks
from sparkdml.programs.scheduling import Floats, Ints, draw, independent

UPDATE, LOOK = 0, 1  # kinds of rounds: change coefficients, or measure how far each would move
NOTHING = np.empty(0, dtype=np.int64)


def best_value(correlation: Floats, squared_norm: Floats, penalty: float) -> Floats:
    """Return the value that minimizes the objective in one coefficient, with all others fixed.

    `correlation` is that of the column with the residual without the coefficient's own
    contribution.
    """
    shrunk = np.sign(correlation) * np.maximum(np.abs(correlation) - penalty, 0.0)
    best = np.zeros_like(shrunk)
    np.divide(shrunk, squared_norm, out=best, where=squared_norm > 0)
    return best


def fit_lasso(
    store: KVStore,
    comm: Communicator,
    x: Floats,
    y: Floats,
    alpha: float,
    name: str = "coefficients",
    **options: Any,
) -> tuple[MatrixTable, float]:
    """Return the coefficients' table and the intercept; every worker calls it with its own rows.

    Training starts from the coefficients in the table of that name, if it exists. `options` are
    those of `Lasso`.
    """
    count, y_sum, *x_sums = sum_over_ranks(comm, len(y), y.sum(), x.sum(axis=0))
    if not count:
        raise DataError("no worker has a row")
    y_mean, x_means = y_sum / count, np.asarray(x_sums) / count
    table = MatrixTable(store, name, x.shape[1], 1)
    program = Lasso(table, x - x_means, y=y - y_mean, num_rows=int(count), alpha=alpha, **options)
    run_program(program, comm)
    coefficients = table.blocks(4 * program.width)
    return table, float(y_mean - sum(x_means[rows] @ part[:, 0] for rows, part in coefficients))


class Lasso(Program):
    """One worker's rows, and at rank 0 the schedule.

    Args:
        table: the coefficients, one row of width 1 for each column of `x`.
        x, y: this worker's rows; for an intercept, columns and targets are centred over all
            workers.
        num_rows: the number of rows of all workers.
        alpha: the penalty's weight.
        tolerance: training ends when no coefficient would move the predictions by more than this,
            in standard deviations of y (root mean square).
        width: the maximum number of coefficients that are changed at once.
        threshold: two columns with at least this correlation are never changed at once.
        dynamic: draw coefficients by how far they moved last time; otherwise all are equally
            likely.
        seed: the random seed of the draw.
    """

    def __init__(
        self,
        table: MatrixTable,
        x: Floats,
        y: Floats,
        num_rows: int,
        alpha: float,
        tolerance: float = 1e-6,
        width: int = 16,
        threshold: float = 0.3,
        dynamic: bool = True,
        seed: int = 0,
    ) -> None:
        check_lasso(alpha, tolerance, width, threshold)
        if x.ndim != 2 or x.shape[1] != table.num_rows or len(x) != len(y):
            raise ParameterError(
                "x", x.shape, f"a matrix of {len(y)} rows and {table.num_rows} columns"
            )
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise DataError("x and y must be finite: there is a NaN or an infinity among them")
        self._table, self._x = table, np.asfortranarray(x, dtype=np.float64)
        # Start from the table's content: the solution for an earlier, larger alpha, for instance.
        self._residual = np.array(y, dtype=np.float64)
        self._target_square = float(self._residual @ self._residual)
        self._penalised = 0.0  # the sum of all coefficients' absolute values
        for rows, values in table.blocks(4 * width):
            self._residual -= self._x[:, rows] @ values[:, 0]
            self._penalised += float(np.abs(values).sum())
        self._changing: tuple[Ints, Floats] = NOTHING, np.empty(0)  # and what they were before
        self._num_rows, self._penalty = num_rows, alpha * num_rows
        self._alpha, self._tolerance, self.width = alpha, tolerance, width
        self._threshold, self._dynamic = threshold, dynamic
        self._dice = np.random.default_rng(seed)
        # For the scheduler only: how far each coefficient moved the predictions when it was last
        # changed or measured, and the sums over all workers that the next round needs.
        self._kind = LOOK  # of the last round
        self._moved = np.full(table.num_rows, np.inf)
        self._unseen = np.arange(table.num_rows)
        self._candidates, self._gram = NOTHING, np.empty((0, 0))
        self._squared_norms = np.zeros(table.num_rows)
        self._scale = 0.0  # of y, to which movements are compared
        self.objectives: list[float] = []  # at rank 0, at the start of each round
        self.num_updates = 0  # coefficients changed so far
        self.num_looks = 0  # coefficients that were only measured

    # -- schedule -------------------------------------------------------------------------------

    def schedule(self, round: int, num_workers: int) -> list[Tensor] | None:
        if not len(self._unseen) and not self._is_moving():
            if self._kind == LOOK:
                return None  # all of them were measured since the last change
            self._unseen = np.arange(self._table.num_rows)
        if len(self._unseen):
            # In pieces, so that no worker holds more coefficients than in any other round.
            piece, self._unseen = np.split(self._unseen, [min(4 * self.width, len(self._unseen))])
            return [_message(LOOK, piece, NOTHING)] * num_workers
        chosen = self._candidates[independent(self._gram, self._threshold, self.width)]
        self._candidates = self._draw_candidates(chosen)
        return [_message(UPDATE, chosen, self._candidates)] * num_workers

    def _is_moving(self) -> bool:
        return bool(self._moved.max(initial=0.0) > self._tolerance * self._scale)

    def _draw_candidates(self, chosen: Ints) -> Ints:
        """Draw more for the next round than it can change, since some will have to wait."""
        floor = self._tolerance * self._scale / 10 + 1e-300  # those that stand still may move again
        weights = self._moved + floor if self._dynamic else np.ones(len(self._moved))
        weights[chosen] = 0.0  # how far they move is known after this round
        weights[self._squared_norms == 0] = 0.0
        with np.errstate(divide="ignore"):
            drawn = draw(weights, 2 * self.width, self._dice)
        return drawn[weights[drawn] > 0]

    # -- push -----------------------------------------------------------------------------------

    def push(self, work: Tensor) -> Tensor:
        kind, rows, candidates = _read(work)
        self._catch_up()
        x = self._x[:, rows]
        squares = [self._residual @ self._residual, self._target_square]
        parts = [np.array(squares), x.T @ self._residual]
        if kind == LOOK:
            parts.append(np.einsum("ij,ij->j", x, x))
        else:
            self._changing = rows, self._table.get(rows)[:, 0].astype(np.float64)
            ahead = self._x[:, candidates]
            parts.append((ahead.T @ ahead).ravel())
        return torch.from_numpy(np.concatenate(parts))

    def _catch_up(self) -> None:
        """Update the residual by the last round's changes."""
        rows, before = self._changing
        if len(rows):
            self._residual -= self._x[:, rows] @ (self._table.get(rows)[:, 0] - before)
            self._changing = NOTHING, np.empty(0)

    def finish(self) -> None:
        self._catch_up()

    # -- pull -----------------------------------------------------------------------------------

    def pull(self, works: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        self._kind, rows, candidates = _read(works[0])
        sums = np.sum([part.numpy() for part in parts], axis=0)
        squares, products, rest = np.split(sums, [2, 2 + len(rows)])
        loss = squares[0] / (2 * self._num_rows)
        self.objectives.append(loss + self._alpha * self._penalised)
        if self._kind == LOOK:
            self._squared_norms[rows] = rest
            if not self._scale:
                self._scale = float(np.sqrt(squares[1])) or 1.0
        else:
            self._gram = rest.reshape(len(candidates), len(candidates))
        before = self._table.get(rows)[:, 0].astype(np.float64)
        norms = self._squared_norms[rows]
        change = best_value(products + norms * before, norms, self._penalty) - before
        self._moved[rows] = np.abs(change) * np.sqrt(norms)
        if self._kind == LOOK:
            self.num_looks += len(rows)
            return
        self.num_updates += len(rows)
        self._table.add(rows, change[:, None])
        self._penalised += float(np.abs(before + change).sum() - np.abs(before).sum())


def _message(kind: int, rows: Ints, candidates: Ints) -> Tensor:
    return torch.from_numpy(np.concatenate([[kind, len(rows)], rows, candidates]))


def _read(work: Tensor) -> tuple[int, Ints, Ints]:
    kind, count = int(work[0]), int(work[1])
    return kind, work[2 : 2 + count].numpy(), work[2 + count :].numpy()


def check_lasso(alpha: float, tolerance: float, width: int, threshold: float) -> None:
    if not alpha >= 0:
        raise ParameterError("alpha", alpha, "at least 0")
    if not tolerance > 0:
        raise ParameterError("tolerance", tolerance, "more than 0")
    if width < 1:
        raise ParameterError("width", width, "at least 1")
    if not 0 < threshold <= 1:
        raise ParameterError("threshold", threshold, "more than 0 and at most 1")
