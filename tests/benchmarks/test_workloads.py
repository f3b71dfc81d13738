"""The data that all contenders share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.training import RankResult, in_step
from benchmarks.workloads import (
    FULL,
    W1,
    W2,
    W3,
    W4,
    Allreduce,
    Training,
    ensure_data,
    load_share,
    make_model,
)


def test_the_ranks_shares_are_all_of_the_rows_in_equal_parts(tmp_path: Path) -> None:
    folder = ensure_data(W3, tmp_path)

    everything = torch.cat([load_share(folder, rank, 2)[0] for rank in range(2)])
    features, labels = load_share(folder, 0, 2)

    assert features.shape == (W3.rows // 2, W3.width)
    assert features.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) == set(range(W3.classes))
    assert len(torch.unique(everything, dim=0)) == W3.rows


def test_data_is_made_once(tmp_path: Path) -> None:
    before = {part: part.stat().st_mtime_ns for part in ensure_data(W3, tmp_path).iterdir()}

    assert {part: part.stat().st_mtime_ns for part in ensure_data(W3, tmp_path).iterdir()} == before


def test_rows_that_make_unequal_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows must be a multiple of 8 but got 1001"):
        ensure_data(replace(W3, rows=1001), tmp_path)


@pytest.mark.parametrize("workload", [W1, W2, W3])
def test_models_take_the_workloads_rows_and_start_alike(workload: Training) -> None:
    rows = torch.ones(3, workload.width)

    outputs = make_model(workload)(rows)

    assert outputs.shape == (3, workload.classes)
    assert torch.equal(outputs, make_model(workload)(rows))


def test_workloads_survive_the_way_to_another_process() -> None:
    for workload in FULL.values():
        assert type(workload).from_json(workload.to_json()) == workload
    assert isinstance(W4, Allreduce)


def test_an_epoch_in_step_is_the_sum_of_the_slower_ranks_steps() -> None:
    def rank(*steps: float) -> RankResult:
        return RankResult(0.0, 0.0, [sum(steps)], 0, 0.0, [list(steps)])

    assert in_step([rank(1, 3, 1), rank(2, 1, 1)]) == [2 + 3 + 1]
    assert in_step([rank(1, 1), rank(1, 1, 1)]) == [3]  # one has a batch more
