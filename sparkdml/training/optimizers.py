"""Optimizers from what the user gave: one over all parameters, or one for each module by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import ParameterError
from sparkdml.training.modules import Modules
from sparkdml.training.plan import OptimizerSource, ParameterGroups

ONLY = ""  # the name of an optimizer that is the only one


class NoOptimizer(torch.optim.Optimizer):
    """In the place of one where the strategy makes the steps."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the parameters are the strategy's to move."""


class Optimizers(Mapping[str, torch.optim.Optimizer]):
    """By name; the name of an only one is empty."""

    def __init__(
        self,
        source: OptimizerSource,
        module: nn.Module,
        parameter_groups: ParameterGroups | None = None,
    ) -> None:
        self.modules: dict[str, nn.Module] = {ONLY: module}
        factories: dict[str, Any] = {ONLY: source}
        if isinstance(source, Mapping):
            check_names(source, module)
            self.modules = {name: getattr(module, name) for name in source}
            factories = dict(source)
        self._by_name = {
            name: build_optimizer(name, factories[name], part, parameter_groups)
            for name, part in self.modules.items()
        }

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def parameters(self, name: str) -> list[nn.Parameter]:
        return trainable(self.modules[name])

    def state(self) -> State:
        return {_entry(name): Entry(one.state_dict()) for name, one in self._by_name.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, optimizer in self._by_name.items():
            saved = state[_entry(name)]
            check_same_optimizer(optimizer, saved)
            optimizer.load_state_dict(saved)


def _entry(name: str) -> str:
    return f"optimizer.{name}" if name else "optimizer"


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def check_optimizers(
    source: OptimizerSource, module: nn.Module, parameter_groups: ParameterGroups | None
) -> None:
    """At the driver: all that can be told without making one, which is slow for the first time."""
    parts = [module]
    if isinstance(source, Mapping):
        check_names(source, module)
        parts = [getattr(module, name) for name in source]
    factories = list(source.values()) if isinstance(source, Mapping) else [source]
    for factory in factories:
        made = factory.func if isinstance(factory, functools.partial) else factory
        if inspect.isclass(made) and issubclass(made, torch.optim.LBFGS):
            raise refuse_lbfgs("optimizer")
    if parameter_groups is not None:
        for part in parts:
            check_groups(parameter_groups(part), part)


def refuse_lbfgs(parameter: str) -> ParameterError:
    return ParameterError(
        parameter,
        "torch.optim.LBFGS",
        "an optimizer that makes a step of one gradient",
        "LBFGS evaluates the loss several times a step.",
    )


def check_names(source: Mapping[str, Any], module: nn.Module) -> None:
    """An optimizer for each module that is trained, and for no other."""
    if not isinstance(module, Modules):
        raise ParameterError(
            "optimizer",
            f"a dict of {', '.join(source)}",
            "one function, since model= is one module",
            "Give model= as a dict with the same names, or one optimizer.",
        )
    trained = [name for name, part in module.items() if trainable(part)]
    missing = [name for name in trained if name not in source]
    if missing:
        raise ParameterError(
            "optimizer",
            f"a dict of {', '.join(source)}",
            f"a dict with a function for each module of model=: {', '.join(trained)}",
            f"Call requires_grad_(False) on {missing[0]!r} if it is not to be trained.",
        )
    extra = [name for name in source if name not in trained]
    if extra:
        why = "has no trainable parameter" if extra[0] in module else "is no module of model="
        raise ParameterError(
            "optimizer",
            f"a dict of {', '.join(source)}",
            f"a dict with the names of model= ({', '.join(trained)}); {extra[0]!r} {why}",
        )
    owner: dict[int, str] = {}
    for name in trained:
        for parameter in trainable(getattr(module, name)):
            if owner.setdefault(id(parameter), name) != name:
                raise ParameterError(
                    "optimizer",
                    f"a dict of {', '.join(source)}",
                    f"one function, since {owner[id(parameter)]!r} and {name!r} share a parameter",
                )


def build_optimizer(
    name: str,
    factory: Any,
    module: nn.Module,
    parameter_groups: ParameterGroups | None = None,
) -> torch.optim.Optimizer:
    parameter = f"optimizer[{name!r}]" if name else "optimizer"
    parameters: Any = iter(trainable(module))
    if parameter_groups is not None:
        parameters = parameter_groups(module)
        check_groups(parameters, module)
    built = factory(parameters)
    if not isinstance(built, torch.optim.Optimizer):
        raise ParameterError(
            parameter,
            type(built).__name__,
            "a function that takes the parameters and makes a torch optimizer",
            "For instance functools.partial(torch.optim.SGD, lr=0.1).",
        )
    if isinstance(built, torch.optim.LBFGS):
        raise refuse_lbfgs(parameter)
    return built


def check_groups(groups: Any, module: nn.Module) -> None:
    """Every trainable parameter is in exactly one group."""
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and "params" in group for group in groups
    ):
        raise ParameterError(
            "parameterGroups",
            type(groups).__name__,
            "a function of the module that returns a list of dicts, each with 'params'",
        )
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    seen: set[int] = set()
    for group in groups:
        if isinstance(group["params"], torch.Tensor):
            group["params"] = [group["params"]]
        group["params"] = list(group["params"])  # may be a generator, which is read but once
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ParameterError(
                    "parameterGroups",
                    f"a parameter of shape {list(parameter.shape)}",
                    "a function whose groups hold the module's trainable parameters alone",
                )
            if id(parameter) in seen:
                raise ParameterError(
                    "parameterGroups", names[id(parameter)], "in one group, not in two"
                )
            seen.add(id(parameter))
    left_out = [name for key, name in names.items() if key not in seen]
    if left_out:
        raise ParameterError(
            "parameterGroups",
            f"groups without {', '.join(left_out[:3])}",
            "a function whose groups hold every trainable parameter",
            "Add it, or call requires_grad_(False) on what is not to be trained.",
        )


def check_same_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Another optimizer's state may load, and fail in its first step."""
    before, now = state["param_groups"][0], optimizer.state_dict()["param_groups"][0]
    if before.keys() != now.keys():
        names = ", ".join(sorted(map(str, before.keys() ^ now.keys())))
        raise ValueError(f"the optimizers differ in {names}")
