"""Losses as sums and weights: added over any cut of the rows, they give torch's own mean."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sparkdml.errors import ParameterError
from sparkdml.training.objective import Objective, metric_sum

ROWS, CLASSES = 24, 5


def outputs_and(targets_kind):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(ROWS, CLASSES, generator=generator)
    if targets_kind == "class":
        return outputs, torch.randint(0, CLASSES, (ROWS,), generator=generator)
    if targets_kind == "soft":
        return outputs, torch.rand(ROWS, CLASSES, generator=generator).softmax(1)
    if targets_kind == "binary":
        return outputs[:, 0].sigmoid(), torch.randint(0, 2, (ROWS,), generator=generator).float()
    return outputs[:, :1], torch.randn(ROWS, 1, generator=generator)


LOSSES = [
    (nn.CrossEntropyLoss(), "class"),
    (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1])), "class"),
    (nn.CrossEntropyLoss(ignore_index=2), "class"),
    (nn.CrossEntropyLoss(label_smoothing=0.1), "class"),
    (nn.CrossEntropyLoss(), "soft"),
    (nn.NLLLoss(), "class"),
    (nn.MSELoss(), "number"),
    (nn.L1Loss(), "number"),
    (nn.BCELoss(), "binary"),
    (nn.HuberLoss(), "number"),
    (lambda outputs, targets: ((outputs - targets) ** 2).mean(), "number"),
    (lambda outputs, targets: ((outputs - targets) ** 2)[:, 0], "number"),
    (F.mse_loss, "number"),
]


@settings(deadline=None, max_examples=10)
@given(cut=st.integers(1, ROWS - 1))
@pytest.mark.parametrize(("loss", "kind"), LOSSES)
def test_sums_over_any_cut_give_the_mean_of_the_whole(loss, kind, cut):
    outputs, targets = outputs_and(kind)
    whole = loss(outputs, targets).mean()
    objective = Objective(loss)
    parts = [
        objective(outputs[rows], targets[rows], len(outputs[rows]))
        for rows in (slice(0, cut), slice(cut, ROWS))
    ]
    total = sum(value for value, _ in parts) / sum(weight for _, weight in parts)
    torch.testing.assert_close(total, whole)


def test_a_summed_loss_is_not_divided():
    outputs, targets = outputs_and("number")
    objective = Objective(nn.MSELoss(reduction="sum"))
    assert objective.is_sum
    value, _ = objective(outputs, targets, ROWS)
    torch.testing.assert_close(value, nn.MSELoss(reduction="sum")(outputs, targets))


def test_the_users_loss_is_left_alone():
    loss = nn.MSELoss()
    Objective(loss)
    assert loss.reduction == "mean"


def test_labels_fit_what_sparks_columns_are():
    outputs, targets = outputs_and("class")
    as_double, _ = Objective(nn.CrossEntropyLoss())(outputs, targets.double(), ROWS)
    as_int, _ = Objective(nn.CrossEntropyLoss())(outputs, targets.int(), ROWS)
    assert as_double == as_int
    numbers, _ = outputs_and("number")
    value, weight = Objective(nn.MSELoss())(numbers, torch.zeros(ROWS, dtype=torch.long), ROWS)
    torch.testing.assert_close(value / weight, (numbers**2).mean())


def test_a_column_of_labels_against_one_output_does_not_broadcast():
    outputs = torch.arange(4.0).reshape(4, 1)
    value, weight = Objective(nn.MSELoss())(outputs, torch.arange(4.0), 4)
    assert value / weight == 0


def test_shapes_that_cannot_fit_are_refused():
    with pytest.raises(
        ParameterError, match=r"labels' shape \[4\] but got .*outputs of shape \[4, 3\]"
    ):
        Objective(nn.MSELoss())(torch.zeros(4, 3), torch.zeros(4), 4)


def test_a_loss_must_give_one_value_a_row():
    with pytest.raises(ParameterError, match="one value for each of the 4 rows"):
        Objective(lambda o, t: torch.zeros(3))(torch.zeros(4), torch.zeros(4), 4)


def test_metrics_may_be_means_or_rows():
    assert metric_sum(torch.tensor(0.5), 4, "m") == 2.0
    assert metric_sum(torch.tensor([True, True, False, True]), 4, "m") == 3.0
    assert metric_sum(0.25, 4, "m") == 1.0
    with pytest.raises(ParameterError, match=r"metrics\['m'\]"):
        metric_sum(torch.zeros(3), 4, "m")
