"""torchmetrics objects: the value over all ranks is that of one process with all rows."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkdml.checkpoint.state import merge
from sparkdml.errors import ParameterError
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.metric_objects import MetricObjects
from sparkdml.training.plan import Schedule

torchmetrics = pytest.importorskip("torchmetrics")

sys.path.insert(0, str(Path(__file__).parent))
from objectives import cut, make_plan  # noqa: E402

CPU = torch.device("cpu")


def make_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (count,), generator=generator)}


def make_metrics():
    return {
        "accuracy": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
        "auroc": torchmetrics.classification.MulticlassAUROC(3),  # keeps every row
        "f1": torchmetrics.classification.MulticlassF1Score(3, average=None),  # one a class
    }


def test_values_are_those_of_one_process_with_all_rows():
    rows, held_out = make_rows(50), make_rows(21, seed=3)
    plan = make_plan(
        model=lambda: nn.Linear(3, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        features=("x",),
        label="y",
        metrics={"plain": lambda o, t: (o.argmax(1) == t).float(), **make_metrics()},
    )
    trainings = train_on_threads(
        AllReduce,
        plan,
        Schedule(2, 8, validates=True),
        cut(rows, [43, 7]),
        cut(held_out, [21, 0]),  # one rank has none
    )
    module = trainings[0].task.module
    for prefix, data in (("", rows), ("val_", held_out)):
        expected = make_metrics()
        for metric in expected.values():
            metric.update(module(data["x"]), data["y"])
        for row in trainings[1].history:
            assert row[f"{prefix}accuracy"] == pytest.approx(expected["accuracy"].compute().item())
            assert row[f"{prefix}auroc"] == pytest.approx(expected["auroc"].compute().item())
            f1 = [row[f"{prefix}f1_{index}"] for index in range(3)]
            assert f1 == pytest.approx(expected["f1"].compute().tolist())
            assert row[f"{prefix}plain"] == pytest.approx(row[f"{prefix}accuracy"])


def test_a_collection_counts_as_its_members_and_the_users_object_stays_clean():
    mine = torchmetrics.MetricCollection(
        {
            "mse": torchmetrics.MeanSquaredError(),
            "largest": torchmetrics.MaxMetric(),
        }
    )
    objects = MetricObjects({"error": mine["mse"], "all": mine}, CPU)
    assert sorted(objects._metrics) == ["all_largest", "all_mse", "error"]
    objects._metrics["error"].update(torch.ones(3), torch.zeros(3))
    assert objects.compute([objects.encode()])["error"] == 1.0
    assert mine["mse"].total == 0


def half_updated(rows_of_rank):
    objects = MetricObjects(make_metrics(), CPU)
    for outputs, targets in rows_of_rank:
        objects.update(outputs, targets)
    return objects


def batches(seed, count=2):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 3, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def values(state):
    return {name: entry.value for name, entry in state.items()}


def test_states_in_the_middle_of_an_epoch_are_put_back():
    before = [half_updated(batches(rank)) for rank in range(2)]
    after = [MetricObjects(make_metrics(), CPU) for _ in range(2)]
    for rank in range(2):
        after[rank].load(values(before[rank].state()), rank)
        assert not after[rank].lost
        for objects in (before[rank], after[rank]):
            objects.update(*batches(10 + rank, 1)[0])
    expected = before[0].compute([objects.encode() for objects in before])
    assert after[0].compute([objects.encode() for objects in after]) == expected


def test_sums_survive_another_number_of_workers_and_others_are_told_of():
    before = [half_updated(batches(rank)) for rank in range(2)]
    merged = merge([objects.state() for objects in before])
    after = [MetricObjects(make_metrics(), CPU) for _ in range(3)]
    for rank in range(3):
        after[rank].load(values(merged), rank)
        assert after[rank].lost == ["auroc"]
        after[rank].update(*batches(20 + rank, 1)[0])
    computed = after[0].compute([objects.encode() for objects in after])
    whole = half_updated(
        [*batches(0), *batches(1), *(batches(20 + rank, 1)[0] for rank in range(3))]
    )
    expected = whole.compute([whole.encode()])
    assert computed["accuracy"] == pytest.approx(expected["accuracy"])
    assert computed["f1_1"] == pytest.approx(expected["f1_1"])


def test_a_metric_whose_value_is_a_table_is_refused():
    objects = MetricObjects(
        {"table": torchmetrics.classification.MulticlassConfusionMatrix(3)}, CPU
    )
    objects.update(*batches(0)[0])
    with pytest.raises(ParameterError, match=r"metrics\['table'\].*shape \[3, 3\]"):
        objects.compute([objects.encode()])
