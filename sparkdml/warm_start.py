"""`warmStart`: the weights that training starts from, a fitted model's or a state dict.

Driver only, before any job; `training.weights` loads them in each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from sparkdml.errors import ParameterError

MAX_LISTED = 6
# Prefixes that wrappers add to the parameters' names of the wrapped module.
_WRAPPERS = ("module.", "_orig_mod.")


class HasModule(Protocol):
    """What a warm start needs of a fitted model."""

    @property
    def module(self) -> nn.Module: ...


def to_warm_start(value: Any) -> Any:
    """The converter of `warmStart`: a fitted model, or a state dict."""
    # Asked of the class: reading the attribute would make a fitted model load its module.
    if isinstance(getattr(type(value), "module", None), property):
        return value
    is_state = isinstance(value, Mapping) and all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items()
    )
    if is_state and value:
        return dict(value)
    raise ParameterError(
        "warmStart",
        type(value).__name__,
        "a fitted TorchModel, or a state dict (names to tensors)",
        "Load a saved one by dml.TorchModel.load(path), or by torch.load(path, weights_only=True).",
    )


def starting_state(
    value: HasModule | Mapping[str, Tensor] | None, module: nn.Module
) -> dict[str, Tensor] | None:
    """Return the tensors of `warmStart`, checked against the module; None without `warmStart`."""
    if value is None:
        return None
    given: Mapping[str, Tensor]
    if isinstance(value, Mapping):
        given, what = value, "the state dict"
    else:
        given, what = value.module.state_dict(), f"the fitted {type(value.module).__name__}"
    state = {name: tensor.detach().cpu() for name, tensor in given.items()}
    problems = _differences(module, state)
    if problems:
        raise ParameterError(
            "warmStart",
            _Shown(what),
            f"weights of the model that is trained, {type(module).__name__}",
            f"{'; '.join(problems)}.{_hint(module, state)}",
        )
    return state


def _differences(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    own = module.state_dict()
    both = [name for name in own if name in state]
    found = {
        "it lacks": [name for name in own if name not in state],
        "it has in addition": [name for name in state if name not in own],
        "the shapes differ in": [
            f"{name} ({list(state[name].shape)}, and {list(own[name].shape)} in the model)"
            for name in both
            if state[name].shape != own[name].shape
        ],
        "the types differ in": [
            f"{name} ({state[name].dtype}, and {own[name].dtype} in the model)"
            for name in both
            if state[name].is_floating_point() != own[name].is_floating_point()
        ],
    }
    return [f"{what} {_listed(names)}" for what, names in found.items() if names]


def _hint(module: nn.Module, state: Mapping[str, Tensor]) -> str:
    for prefix in _WRAPPERS:
        bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if bare.keys() != state.keys() and not _differences(module, bare):
            return (
                f" The names begin with {prefix!r}, as a wrapper saves them: pass "
                f"{{name.removeprefix({prefix!r}): value for name, value in state.items()}}"
            )
    return ""


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    rest = len(every) - MAX_LISTED
    return ", ".join(every[:MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


class _Shown:
    """A short text for errors, in place of a value that would fill the screen."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
