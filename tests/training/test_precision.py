"""Autocast and the loss scale; torch.compile."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.forward import GROWTH_INTERVAL, LossScale
from sparkdml.training.modules import check_compile_options
from sparkdml.training.plan import Schedule
from sparkdml.training.task import Task

sys.path.insert(0, str(Path(__file__).parent))
from objectives import cut, gan_plan, make_plan, make_points


def make_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return {"x": x, "y": (x.sum(dim=1) > 0).long()}


def supervised(**changes):
    fields = {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        "loss": nn.CrossEntropyLoss(),
        "features": ("x",),
        "label": "y",
        "metrics": {"accuracy": lambda outputs, targets: outputs.argmax(1) == targets},
    }
    return make_plan(**{**fields, **changes})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_what_float32_learns(precision):
    parts = cut(make_rows(256), [128, 128])
    seen = []

    class Net(nn.Sequential):
        def forward(self, x):
            outputs = super().forward(x)
            seen.append(outputs.dtype)
            return outputs

    plan = supervised(model=lambda: Net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    half = train_on_threads(
        AllReduce, supervised(model=plan.model, precision=precision), Schedule(6, 8), parts
    )
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert set(seen) == {kind}
    full = train_on_threads(AllReduce, plan, Schedule(6, 8), parts)
    values = half[0].task.params.values
    assert values.dtype == torch.float32
    assert torch.equal(values, half[1].task.params.values)
    assert half[0].history[-1]["accuracy"] > 0.9
    assert half[0].history[-1]["loss"] == pytest.approx(full[0].history[-1]["loss"], abs=0.05)
    assert ("loss_scale" in half[0].history[0]) == (precision == "fp16")


def test_an_overflow_skips_the_step_and_halves_the_scale_on_every_rank():
    class Explodes(nn.Linear):
        """Its gradients are more than half precision can hold, once."""

        def forward(self, x):
            return super().forward(x) * (2000.0 if x[0, 0] > 50 else 1.0)

    rows = make_rows(32)
    rows["x"][8, 0] = 60  # the second step of rank 0
    trainings = train_on_threads(
        AllReduce,
        supervised(model=lambda: Explodes(4, 2), precision="fp16"),
        Schedule(1, 8),
        cut(rows, [16, 16]),
    )
    start = LossScale(8).value
    for training in trainings:
        assert training.task.loss_scale.skipped_steps == 1
        assert training.task.loss_scale.value == start / 2
        assert torch.isfinite(training.task.params.values).all()
        assert training.history[0]["skipped_steps"] == 1
    first = train_on_threads(
        AllReduce,
        supervised(model=lambda: Explodes(4, 2), precision="fp16"),
        Schedule(1, 8),
        cut({name: torch.cat([v[:8], v[16:24]]) for name, v in rows.items()}, [8, 8]),
    )
    assert torch.equal(first[0].task.params.values, trainings[0].task.params.values)


def test_the_scale_grows_after_many_good_steps():
    scale = LossScale(64)
    start, grads = scale.value, torch.ones(3)
    for _ in range(GROWTH_INTERVAL):
        assert scale.accepts(grads)
    assert scale.value == 2 * start
    assert not scale.accepts(torch.tensor([1.0, float("inf")]))
    assert scale.value == start
    other = LossScale(1)
    other.load(scale.state())
    assert vars(other) == vars(scale)


def test_the_scale_cancels_out():
    """The gradient that callbacks see is the one without it."""
    task = Task(gan_plan(precision="fp16"), torch.device("cpu"))
    plain = Task(gan_plan(), torch.device("cpu"))
    plain.module.load_state_dict(task.module.state_dict())
    rows = make_points(8)
    seen = {}
    for name, one in (("scaled", task), ("plain", plain)):
        one.on_agreed.append(lambda o=one, n=name: seen.update({n: o.params.grads.clone()}))
        for _ in range(6):  # the first scales may be too large, and then nothing moves
            if name not in seen:
                one.grad(Batch(rows, 8))
                one.apply(one.totals())
    torch.testing.assert_close(seen["scaled"], seen["plain"], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {"backend": "eager"}])
def test_a_compiled_module_trains_alike_and_keeps_its_names(options):
    parts = cut(make_rows(40), [24, 16])
    expected = train_on_threads(AllReduce, supervised(), Schedule(1, 8), parts)
    torch._dynamo.reset()
    # One rank: torch's compiler knows nothing of threads.
    one = [{name: value[:24] for name, value in make_rows(40).items()}]
    compiled = train_on_threads(AllReduce, supervised(compile=options), Schedule(1, 8), one)
    plain = train_on_threads(AllReduce, supervised(), Schedule(1, 8), one)
    assert (
        compiled[0].task.module.state_dict().keys() == expected[0].task.module.state_dict().keys()
    )
    torch.testing.assert_close(compiled[0].task.params.values, plain[0].task.params.values)


def test_several_modules_are_compiled_each():
    plan = gan_plan(compile={"backend": "eager"})
    task = Task(plan, torch.device("cpu"))
    assert all(part._compiled_call_impl is not None for part in task.module.children())


@pytest.mark.slow
def test_inductor():
    torch._dynamo.reset()
    one = [make_rows(24)]
    compiled = train_on_threads(AllReduce, supervised(compile=True), Schedule(1, 8), one)
    plain = train_on_threads(AllReduce, supervised(), Schedule(1, 8), one)
    torch.testing.assert_close(compiled[0].task.params.values, plain[0].task.params.values)


def test_arguments_of_compile_are_checked():
    check_compile_options({"mode": "reduce-overhead"})
    with pytest.raises(ParameterError, match=r"compile must be .*fullgraph.* but got 'modes'"):
        check_compile_options({"modes": "max"})


def test_a_missing_compiler_is_told_before_the_first_step(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        Task(supervised(compile=True), torch.device("cpu"))


def test_parameter_groups_and_learning_rates_by_group():
    def groups(module):
        weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
        biases = (p for name, p in module.named_parameters() if name.endswith("bias"))
        return [{"params": weights, "lr": 0.0}, {"params": biases}]

    task = Task(
        supervised(parameter_groups=groups, optimizer=partial(torch.optim.SGD, lr=0.1)),
        torch.device("cpu"),
    )
    before = {name: p.clone() for name, p in task.module.named_parameters()}
    task.grad(Batch(make_rows(8), 8))
    task.apply(task.totals())
    for name, parameter in task.module.named_parameters():
        assert torch.equal(parameter, before[name]) == name.endswith("weight")
