"""The servers' updaters equal torch's optimizers; sparse ones touch the named rows alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.optimizers import SGD, Adagrad, Adam, Add, Updater, updater_from

PAIRS: list[tuple[Updater, Any]] = [
    (SGD(lr=0.1), partial(torch.optim.SGD, lr=0.1)),
    (SGD(lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    (Adagrad(lr=0.1), partial(torch.optim.Adagrad, lr=0.1)),
    (
        Adagrad(lr=0.1, weight_decay=0.1, initial_accumulator=0.3),
        partial(torch.optim.Adagrad, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.3),
    ),
    (Adam(lr=0.01), partial(torch.optim.Adam, lr=0.01)),
    (
        Adam(lr=0.01, beta1=0.8, beta2=0.99, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
]


@pytest.mark.parametrize(("updater", "optimizer_of"), PAIRS, ids=lambda x: str(x)[:60])
@pytest.mark.parametrize("by_row", [False, True])
def test_dense_updates_equal_torchs(updater: Updater, optimizer_of: Any, by_row: bool) -> None:
    torch.manual_seed(1)
    values = torch.randn(7, 3)
    parameter = torch.nn.Parameter(values.clone())
    optimizer = optimizer_of([parameter])
    slots = updater.slots(values, by_row)
    for _ in range(5):
        gradient = torch.randn(7, 3)
        parameter.grad = gradient.clone()
        optimizer.step()
        updater.update(values, gradient, slots)
    torch.testing.assert_close(values, parameter.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("updater", [pair[0] for pair in PAIRS], ids=str)
def test_rows_that_are_named_move_as_if_they_were_alone(updater: Updater) -> None:
    torch.manual_seed(2)
    values = torch.randn(6, 4)
    untouched, alone = values.clone(), values[[1, 4]].clone()
    slots, own = updater.slots(values, True), updater.slots(alone, True)
    rows = torch.tensor([1, 4])
    for _ in range(3):
        gradient = torch.randn(2, 4)
        updater.update_rows(values, rows, gradient, slots)
        updater.update(alone, gradient, own)
    assert torch.equal(values[rows], alone)
    assert torch.equal(values[[0, 2, 3, 5]], untouched[[0, 2, 3, 5]])
    for name, slot in slots.items():
        assert torch.equal(slot[rows], own[name])


@pytest.mark.parametrize("updater", [Add(), *[pair[0] for pair in PAIRS]], ids=str)
def test_an_updater_survives_the_wire(updater: Updater) -> None:
    assert updater_from(updater.to_dict()) == updater


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: SGD(lr=-1), "lr"),
        (lambda: SGD(nesterov=True), "nesterov"),
        (lambda: Adagrad(eps=float("nan")), "eps"),
        (lambda: Adam(beta2=1.0), "beta2"),
        (lambda: updater_from({"kind": "os.system"}), "updater"),
        (lambda: updater_from({"kind": "SGD", "speed": 1}), "updater"),
    ],
)
def test_bad_arguments_are_named(make: Any, parameter: str) -> None:
    with pytest.raises(ParameterError, match=parameter):
        make()
