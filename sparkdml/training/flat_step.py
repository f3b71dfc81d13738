"""A torch optimizer's step over the flat buffers: one parameter in place of many.

What `torch.optim` does for each parameter in turn takes a small model longer than the update itself
(Adam: a dozen operations for each). Where the rule is the same for every number, one update of the
buffer that they all lie in comes to the same. The user's optimizer stays what it is: its settings
are read in every step, its state is that of its parameters, as views into a flat one.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sparkdml.training.flat import FlatParams

# Those whose rule looks at one number and its gradient at a time; not what is derived from them.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
# What their states hold once for a whole parameter.
SCALARS = ("step", "mu_product")


def flat_step(
    optimizer: torch.optim.Optimizer, params: FlatParams, parameters: list[nn.Parameter]
) -> Callable[[], object]:
    """What makes the optimizer's step over all its parameters, in one go where that is the same."""
    groups = [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    if type(optimizer) in ELEMENTWISE and groups == [{id(parameter) for parameter in parameters}]:
        kind = FlatSGD if type(optimizer) is torch.optim.SGD else FlatStep
        return kind(optimizer, params, parameters)
    return optimizer.step


class FlatStep:
    """Makes the steps of `optimizer`, whose one group holds these parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: FlatParams,
        parameters: list[nn.Parameter],
    ) -> None:
        self._optimizer = optimizer
        inside = {id(parameter) for parameter in parameters}
        self._parameters = [p for p in params.parameters if id(p) in inside]
        self._first = self._parameters[0]
        self._whole = params.whole_of(parameters)
        # The same optimizer over one parameter. Its `step` without torch's wrappers, which call
        # hooks and profilers: with hooks, the optimizer's own step is used.
        self._flat = copy.copy(optimizer)
        self._flat.state = defaultdict(dict)
        self._make_step = inspect.unwrap(type(optimizer).step)
        self._shared: dict[str, Any] | None = None  # the first parameter's state, as left there
        self._scalars: list[Tensor] = []  # of all parameters
        self._sources: list[Tensor] = []  # of each of those, in the flat state

    def __call__(self) -> None:
        own = self._optimizer
        replaced = vars(own).get("step")
        is_scheduled = replaced is not None and hasattr(replaced, "_wrapped_by_lr_sched")
        settings = own.param_groups[0]
        if (
            (replaced is not None and not is_scheduled)
            or own._optimizer_step_pre_hooks
            or own._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or len(own.param_groups) > 1
            or settings.get("differentiable")
            or not self._has_state()
        ):
            self._forget()
            own.step()
            return
        with torch.no_grad():
            self._update(settings)
        if is_scheduled:
            own._opt_called = True  # type: ignore[attr-defined]  # what schedulers wrap it for
        if self._shared is None:
            if self._whole in self._flat.state:
                self._share()
        elif self._scalars:
            torch._foreach_copy_(self._scalars, self._sources)

    def _update(self, settings: dict[str, Any]) -> None:
        self._flat.param_groups = [{**settings, "params": [self._whole]}]
        self._make_step(self._flat)

    def _has_state(self) -> bool:
        """Whether the flat state is that of the parameters; made so if another state was set."""
        theirs = self._optimizer.state
        if theirs.get(self._first) is self._shared:
            return True
        self._forget()
        states = [theirs.get(parameter) or {} for parameter in self._parameters]
        if not any(states):
            return True  # cleared, or not begun
        if not _have_gone_together(states):
            return False
        flat = self._flat.state[self._whole]
        for name, value in states[0].items():
            if _is_flat(name, value):
                flat[name] = torch.cat([state[name].reshape(-1) for state in states])
            else:
                flat[name] = copy.deepcopy(value)
        self._share()
        return True

    def _forget(self) -> None:
        """The parameters have states of their own; they are checked again before the next step."""
        self._shared, self._scalars = None, []
        self._flat.state.clear()

    def _share(self) -> None:
        """The parameters' states are views into the flat one from now on, and copies of scalars."""
        flat, theirs = self._flat.state[self._whole], self._optimizer.state
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            theirs[parameter] = {
                name: value[start:stop].view(parameter.shape)
                if _is_flat(name, value)
                else copy.deepcopy(value)
                for name, value in flat.items()
            }
            start = stop
        self._shared = theirs[self._first]
        names = [name for name in SCALARS if name in flat]
        self._scalars = [theirs[p][name] for name in names for p in self._parameters]
        self._sources = [flat[name] for name in names for _ in self._parameters]


class FlatSGD(FlatStep):
    """Without momentum and the like a step is one addition, and shorter than torch's way to it."""

    def _update(self, settings: dict[str, Any]) -> None:
        rate, grad = settings["lr"], self._whole.grad
        is_more = settings["momentum"] or settings["weight_decay"] or settings["maximize"]
        if is_more or isinstance(rate, Tensor) or grad is None:
            super()._update(settings)
        else:
            self._whole.add_(grad, alpha=-rate)


def _is_flat(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in SCALARS


def _have_gone_together(states: list[dict[str, Any]]) -> bool:
    """Whether all parameters have made the same steps."""
    first = states[0]
    kinds = {name: type(value) for name, value in first.items()}
    return all(
        {name: type(value) for name, value in state.items()} == kinds
        and all(float(state[name]) == float(first[name]) for name in SCALARS if name in first)
        for state in states
    )
