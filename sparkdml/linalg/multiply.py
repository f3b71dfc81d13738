"""Blocked matrix multiplication over shards: A by columns, B by rows, partial products reduced.

Row k of the data holds column k of A and row k of B, so each worker can multiply its own rows
without communication: A B is the sum over k of outer products. A worker sums its own products, one
block of rows per matrix product, and a reduce-scatter sums over the workers, after which each holds
some rows of the result. A result that is larger than a worker's memory is computed in panels of
rows, one after the other, from the spooled data. (The outer-product form of SUMMA, van de Geijn and
Watts 1997, on a one-dimensional grid.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkdml.errors import DataError, ParameterError, check_whole
from sparkdml.runtime.api import run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.runtime.worker.context import Context


def multiply(
    df: DataFrame,
    left: str,
    right: str,
    *,
    num_workers: int | None = None,
    block_rows: int = 1024,
    panel_bytes: int = 1 << 28,
) -> Tensor:
    """Multiply two matrices whose inner dimension is the rows of a DataFrame.

    With `left == right`, this is the Gram matrix of the rows. The order of rows does not matter.

    Args:
        df: row k has column k of the left matrix and row k of the right one.
        left, right: the names of their columns, which hold arrays of floats or Spark vectors.
        num_workers: the number of workers; None uses every slot of the cluster.
        block_rows: the number of rows that are multiplied at once.
        panel_bytes: the size of the part of the result that a worker computes at once; a larger
            result takes several passes over the spooled rows.

    Returns:
        The product, in the driver, in the columns' floating-point type.
    """
    check_whole("block_rows", block_rows, 1)
    check_whole("panel_bytes", panel_bytes, 1)
    for name, column in (("left", left), ("right", right)):
        if column not in df.columns:
            raise ParameterError(name, column, f"one of {', '.join(df.columns)}")
    columns = [left] if left == right else [left, right]
    product = Product(left, right, block_rows, panel_bytes)
    pieces: list[list[Tensor]] = run(
        product, df, num_workers, columns=columns, name="sparkdml: multiply"
    )
    # Every panel is split over the ranks, in rank order; the panels follow one another.
    return torch.cat([torch.cat(panel) for panel in zip(*pieces, strict=True)])


@dataclass(frozen=True)
class Product:
    """Runs in every worker and returns its part of each panel of the result."""

    left: str
    right: str
    block_rows: int
    panel_bytes: int

    def __call__(self, ctx: Context) -> list[Tensor]:
        height, width, dtype = self._shape(ctx)
        found = []
        for start, stop in panels(height, width * dtype.itemsize, self.panel_bytes):
            partial = torch.zeros(stop - start, width, dtype=dtype, device=ctx.device)
            for batch in ctx.feed(self.block_rows, epoch=1, shuffle=False):
                left = as_matrix(batch[self.left])[:, start:stop].to(dtype)
                partial.addmm_(left.T, as_matrix(batch[self.right]).to(dtype))
            found.append(ctx.comm.reduce_scatter(partial).cpu())
        return found

    def _shape(self, ctx: Context) -> tuple[int, int, torch.dtype]:
        """Return the result's shape and dtype; ranks without rows get them from the others."""
        first = next(ctx.feed(1, epoch=1, shuffle=False), None)
        known = torch.zeros(3, dtype=torch.int64, device=ctx.device)
        if first is not None:
            left, right = as_matrix(first[self.left]), as_matrix(first[self.right])
            if not (left.is_floating_point() and right.is_floating_point()):
                raise DataError(
                    f"{self.left} and {self.right} must hold floating-point numbers, but hold "
                    f"{left.dtype} and {right.dtype}. Cast them to arrays of float or double"
                )
            is_double = torch.promote_types(left.dtype, right.dtype) == torch.float64
            known = known.new_tensor([left.shape[1], right.shape[1], int(is_double)])
        height, width, is_double_anywhere = ctx.comm.allreduce_(known, "max").tolist()
        if not height or not width:
            raise DataError("the data has no rows to multiply")
        return height, width, torch.float64 if is_double_anywhere else torch.float32


def as_matrix(tensor: Tensor) -> Tensor:
    """View a column of plain numbers as a matrix with one column."""
    return tensor.reshape(len(tensor), -1)


def panels(height: int, row_bytes: int, panel_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, each of at most `panel_bytes` bytes but at least one row."""
    rows = max(1, panel_bytes // max(1, row_bytes))
    for start in range(0, height, rows):
        yield start, min(start + rows, height)
