"""Matrix products over shards equal torch's own, whatever the ranks, blocks and panels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.comm.threads import run_threads
from sparkdml.errors import DataError, ParameterError
from sparkdml.linalg.multiply import Product, multiply, panels
from sparkdml.testing.threads import ThreadContext


def multiply_on_threads(left, right, sizes, product):
    lefts, rights = left.T.split(sizes), right.split(sizes)

    def multiply_rank(comm):
        return product(ThreadContext(comm, {"a": lefts[comm.rank], "b": rights[comm.rank]}))

    pieces = run_threads(len(sizes), multiply_rank)
    return torch.cat([torch.cat(panel) for panel in zip(*pieces, strict=True)])


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    block_rows=st.integers(1, 5),
    panel_bytes=st.integers(1, 400),
)
def test_any_shape_on_any_ranks_equals_torch(sizes, height, width, block_rows, panel_bytes):
    generator = torch.Generator().manual_seed(sum(sizes))
    left = torch.randn(height, sum(sizes), generator=generator, dtype=torch.float64)
    right = torch.randn(sum(sizes), width, generator=generator, dtype=torch.float64)
    found = multiply_on_threads(left, right, sizes, Product("a", "b", block_rows, panel_bytes))
    torch.testing.assert_close(found, left @ right)


def test_single_and_double_precision_meet_in_double():
    left, right = torch.ones(2, 4), torch.ones(4, 3, dtype=torch.float64) / 3
    found = multiply_on_threads(left, right, [1, 3], Product("a", "b", 8, 1 << 20))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, left.double() @ right)


def test_whole_numbers_and_no_rows_are_refused():
    product = Product("a", "b", 8, 1 << 20)
    whole = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(DataError, match="floating-point"):
        multiply_on_threads(whole, torch.ones(4, 2), [4], product)
    with pytest.raises(DataError, match="no rows"):
        multiply_on_threads(torch.ones(2, 0), torch.ones(0, 2), [0, 0], product)


@given(st.integers(1, 100), st.integers(1, 50), st.integers(1, 500))
def test_panels_cover_all_rows_once(height, row_bytes, panel_bytes):
    found = list(panels(height, row_bytes, panel_bytes))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(height))
    assert all((stop - start) * row_bytes <= max(panel_bytes, row_bytes) for start, stop in found)


@pytest.mark.spark
def test_a_dataframe_equals_numpy(spark):
    generator = torch.Generator().manual_seed(4)
    left = torch.randn(5, 60, generator=generator)
    right = torch.randn(60, 3, generator=generator)
    rows = [(a.tolist(), b.tolist()) for a, b in zip(left.T, right, strict=True)]
    df = spark.createDataFrame(rows, "a array<float>, b array<float>")
    found = multiply(df, "a", "b", num_workers=2, block_rows=16, panel_bytes=30)
    torch.testing.assert_close(found, left @ right, rtol=1e-5, atol=1e-5)
    with pytest.raises(ParameterError, match="left"):
        multiply(df, "z", "b")
    with pytest.raises(ParameterError, match="block_rows"):
        multiply(df, "a", "b", block_rows=0)
