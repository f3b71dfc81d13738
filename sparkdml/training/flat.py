"""All trainable parameters of a module in one flat buffer, and their gradients in another.

The module's parameters become views into the buffers, so an allreduce, a norm or a copy of the
whole model is one operation on one tensor, and nothing has to be packed or unpacked. The gradients
lie in the reverse of the modules' order, which is about the order in which backward finishes them;
behind them lie a few numbers that travel with them (`stats`: weight, rows, loss, metrics).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from sparkdml.errors import ParameterError
from sparkdml.feed.batch import ALIGNMENT_BYTES
from sparkdml.training.modules import Modules


@dataclass(frozen=True)
class Bucket:
    """A stretch of the gradients that is reduced at once, and the parameters that fill it.

    Attributes:
        tensor: the gradients, and in the last bucket the stats behind them.
        shapes: of the parameters, in their order.
        grads: the gradients alone, flat.
    """

    tensor: Tensor
    shapes: tuple[torch.Size, ...]

    @property
    def num_parameters(self) -> int:
        return len(self.shapes)

    @property
    def grads(self) -> Tensor:
        return self.tensor[: sum(shape.numel() for shape in self.shapes)]

    @property
    def stats(self) -> Tensor:
        """The part that must be sent uncompressed: empty except in the last bucket."""
        return self.tensor[sum(shape.numel() for shape in self.shapes) :]


class FlatParams:
    """All trainable parameters of a module, which are of one floating-point type on one device.

    Attributes:
        parameters: in the order in which they lie in the buffers, the module's last ones first.
        values: their values, one flat tensor. The module's parameters are views into it.
        grads: their gradients, one flat tensor, in the same order.
        stats: the numbers that travel with the gradients: weight, rows, loss, votes, metrics.
    """

    def __init__(self, module: nn.Module, num_stats: int) -> None:
        check_parameters(module, [p for p in module.parameters() if p.requires_grad])
        self.parameters = in_order(module)
        first = self.parameters[0]
        count = sum(p.numel() for p in self.parameters)
        self.values = torch.empty(count, dtype=first.dtype, device=first.device)
        # A half-precision float can't count a batch's rows: then the stats travel by themselves.
        self._apart = first.dtype.itemsize < 4
        self._buffer = torch.zeros(
            count + (0 if self._apart else num_stats), dtype=first.dtype, device=first.device
        )
        self.grads = self._buffer[:count]
        self.stats = (
            torch.zeros(num_stats, device=first.device) if self._apart else self._buffer[count:]
        )
        self._wholes: list[tuple[slice, nn.Parameter]] = []
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            self.values[start:stop].view(parameter.shape).copy_(parameter.detach())
            parameter.grad = self.grads[start:stop].view(parameter.shape)
            start = stop
        self.rebind(self.values)

    def rebind(self, values: Tensor) -> None:
        """The parameters are views into this buffer from now on, with what it holds."""
        assert values.shape == self.values.shape
        self.values = values
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            parameter.data = values[start:stop].view(parameter.shape)
            start = stop
        for span, whole in self._wholes:
            whole.data = values[span]

    def whole_of(self, parameters: list[nn.Parameter]) -> nn.Parameter:
        """One flat parameter in the place of some that lie side by side, in the same memory."""
        span = self.span_of(parameters)
        whole = nn.Parameter(self.values[span])
        whole.grad = self.grads[span]
        self._wholes.append((span, whole))
        return whole

    def span_of(self, parameters: list[nn.Parameter]) -> slice:
        """Return the slice of adjacent parameters, such as those of a module."""
        wanted = {id(parameter) for parameter in parameters}
        inside: list[tuple[int, int]] = []
        position = 0
        for parameter in self.parameters:
            if id(parameter) in wanted:
                inside.append((position, position + parameter.numel()))
            position += parameter.numel()
        start, stop = inside[0][0], inside[-1][1]
        assert stop - start == sum(b - a for a, b in inside), "they don't lie side by side"
        return slice(start, stop)

    def zero(self) -> None:
        """Gradients and stats of nothing."""
        self._buffer.zero_()
        if self._apart:
            self.stats.zero_()

    def buckets(self, max_bytes: int) -> list[Bucket]:
        """The gradients cut at parameters' borders; the stats travel with the last."""
        buckets: list[Bucket] = []
        limit = max(1, max_bytes // self.values.element_size())
        start, stop, members = 0, 0, tuple[torch.Size, ...]()
        for parameter in self.parameters:
            if members and stop + parameter.numel() - start > limit:
                buckets.append(Bucket(self._buffer[start:stop], members))
                start, members = stop, ()
            stop += parameter.numel()
            members += (parameter.shape,)
        buckets.append(Bucket(self._buffer[start:], members))
        if self._apart:
            buckets.append(Bucket(self.stats, ()))
        return buckets

    def on_gradient(self, ready: Callable[[int], None]) -> None:
        """Call `ready(index)` in backward as soon as a parameter's gradient is complete."""
        for index, parameter in enumerate(self.parameters):
            hook = partial(_call_ready, ready, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def check_views(self) -> None:
        """A model or optimizer that replaced a gradient would silently train on zeros: find out."""
        start = 0
        for parameter in self.parameters:
            expected = self.grads.data_ptr() + start * self.grads.element_size()
            if not parameter.numel():
                continue  # lies nowhere, and has nothing to lose
            if parameter.grad is None or parameter.grad.data_ptr() != expected:
                raise ParameterError(
                    "optimizer",
                    "an optimizer or model that replaces or clears p.grad",
                    "one that leaves p.grad in place",
                    "Use zero_grad(set_to_none=False), or leave zeroing to the estimator.",
                )
            start += parameter.numel()


def in_order(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters, the last ones first; of several modules, those of each together.

    Within a module those of odd lengths come at the end, so that all before them begin at multiples
    of 64 bytes: a matrix product takes longer where its weights don't, and may round otherwise.
    """
    modules = list(module.children()) if isinstance(module, Modules) else [module]
    ordered: dict[int, nn.Parameter] = {}  # by id, as modules may share some
    for part in reversed(modules):
        own = [p for p in part.parameters() if p.requires_grad][::-1]
        for parameter in sorted(own, key=lambda p: p.numel() * p.itemsize % ALIGNMENT_BYTES > 0):
            ordered.setdefault(id(parameter), parameter)
    return list(ordered.values())


def _call_ready(ready: Callable[[int], None], index: int, _: Tensor) -> None:
    ready(index)


def check_parameters(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ParameterError(
            "model",
            type(module).__name__,
            f"a module whose parameters have shapes, but {lazy[0]} has none yet",
            "Run the module once on a sample, or give the sizes in place of Lazy layers.",
        )
    if not parameters:
        raise ParameterError(
            "model", type(module).__name__, "a module with at least one trainable parameter"
        )
    kinds = {p.dtype for p in parameters}
    if len(kinds) > 1 or not parameters[0].dtype.is_floating_point:
        raise ParameterError(
            "model",
            type(module).__name__,
            f"a module with parameters of one floating-point type, not {sorted(map(str, kinds))}",
            "Convert it with module.float().",
        )
