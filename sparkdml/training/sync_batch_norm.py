"""BatchNorm over the rows of all ranks, on any device, through the run's own communicator.

Ranks may run out of rows at different times, and a batch may be cut into more pieces on one rank
than on another. So the messages of all layers have one size, and a rank that is done with its rows
answers with zeros until all are: it needs to know nothing of shapes, layers or order. The header
of a message says which layer it belongs to, so that those ranks keep the same running statistics.
(Ioffe and Szegedy 2015, arXiv 1502.03167; over several workers as in Peng et al. 2018,
arXiv 1711.07240.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdml.comm.base import Communicator
from sparkdml.errors import CommunicationError, ParameterError

# The header: how many ranks are done, how many are not, the sum of the latter's layers (from 1 on),
# how many of them are in a forward pass, and the number of values that a channel has in all.
_DONE, _ACTIVE, _LAYERS, _FORWARD, _COUNT = range(5)
_HEADER = 5


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def check_batch_norms(module: nn.Module) -> None:
    """At the driver: there is something to synchronize, and nothing that can't be."""
    layers = batch_norms(module)
    if not layers:
        raise ParameterError(
            "syncBatchNorm",
            True,
            f"False, since {type(module).__name__} has no BatchNorm layer",
        )
    for layer in layers:
        if type(layer).forward is not _BatchNorm.forward:
            raise ParameterError(
                "syncBatchNorm",
                True,
                f"False where a model has layers of {type(layer).__name__}, whose forward is its "
                "own",
                "Use nn.BatchNorm1d, 2d or 3d.",
            )


class BatchNormGroup:
    """The ranks whose rows are normalized together."""

    def __init__(self, module: nn.Module, comm: Communicator, device: torch.device) -> None:
        check_batch_norms(module)
        # A communicator of its own: messages of gradients may be under way in a backward pass, and
        # in another order on each rank.
        self._comm = comm.split(0)
        self._layers = batch_norms(module)
        widest = max(layer.num_features for layer in self._layers)
        # Doubles: the variance is a difference of sums.
        self._message = torch.zeros(_HEADER + 2 * widest, dtype=torch.float64, device=device)
        for index, layer in enumerate(self._layers):
            layer.forward = _SyncForward(layer, index, self)  # type: ignore[assignment, method-assign]

    def finish(self) -> None:
        """This rank is done with its rows of a step; wait until all ranks are."""
        while True:
            self._message.zero_()
            self._message[_DONE] = 1
            self._comm.allreduce_(self._message)
            header = self._message[:_HEADER].tolist()
            if header[_DONE] == self._comm.size:
                return
            if header[_FORWARD]:
                layer = self._layers[round(header[_LAYERS] / header[_ACTIVE]) - 1]
                _track(layer, *_moments(self._message, layer.num_features, header[_COUNT]))

    def exchange(self, index: int, forward: bool, count: float, sums: Tensor) -> Tensor:
        """The message of one layer, added up over all ranks; two rows of sums behind its header."""
        message, width = self._message, sums.shape[1]
        message.zero_()
        message[:_HEADER] = message.new_tensor([0, 1, index + 1, float(forward), count])
        message[_HEADER : _HEADER + 2 * width] = sums.reshape(-1)
        self._comm.allreduce_(message)
        header = message[:_HEADER].tolist()
        if header[_LAYERS] != header[_ACTIVE] * (index + 1):
            raise CommunicationError(
                "syncBatchNorm: the ranks run the BatchNorm layers in different orders, so their "
                "statistics can't be added up. Use layers in the same order for all rows"
            )
        return message


class _SyncForward:
    """In place of a layer's `forward`, so that the module, its names and its state stay."""

    def __init__(self, layer: _BatchNorm, index: int, group: BatchNormGroup) -> None:
        self._layer, self._index, self._group = layer, index, group

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        if not layer.training:
            return _BatchNorm.forward(layer, x)
        layer._check_input_dim(x)  # type: ignore[no-untyped-call]
        if x.shape[1] != layer.num_features:
            raise ValueError(f"expected {layer.num_features} channels but got {x.shape[1]}")
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            x, layer.weight, layer.bias, layer, self._index, self._group
        )
        return output


class _Normalize(torch.autograd.Function):
    """Batch normalization whose sums are over all ranks, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: _BatchNorm,
        index: int,
        group: BatchNormGroup,
    ) -> Tensor:
        others = [0, *range(2, x.dim())]
        values = x if x.dtype == torch.float64 else x.float()
        wide = values.double()
        sums = torch.stack([wide.sum(others), (wide * wide).sum(others)])
        message = group.exchange(index, True, values.numel() / values.shape[1], sums)
        count = float(message[_COUNT])
        if count <= 1:
            raise ValueError("BatchNorm needs more than 1 value a channel in a training step")
        mean, variance = _moments(message, values.shape[1], count)[:2]
        _track(layer, mean, variance, count)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        scale = (variance + layer.eps).rsqrt()
        normal = (values - mean.to(values.dtype).view(shape)) * scale.to(values.dtype).view(shape)
        ctx.save_for_backward(normal, scale, weight)
        ctx.count, ctx.index, ctx.group, ctx.others = count, index, group, others
        output = normal
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        shape = [1, -1, *[1] * (grad.dim() - 2)]
        values = grad.to(normal.dtype)
        own = torch.stack([values.sum(ctx.others), (values * normal).sum(ctx.others)])
        message = ctx.group.exchange(ctx.index, False, 0.0, own.double())
        width = normal.shape[1]
        means = message[_HEADER : _HEADER + 2 * width].view(2, width) / ctx.count
        means = means.to(normal.dtype)
        inner = values - means[0].view(shape) - normal * means[1].view(shape)
        factor = scale.to(normal.dtype) if weight is None else scale.to(normal.dtype) * weight
        # The weight's own gradient is of this rank's rows: the strategy adds up those of all.
        return (
            (inner * factor.view(shape)).to(grad.dtype),
            None if weight is None else own[1].to(weight.dtype),
            None if weight is None else own[0].to(weight.dtype),
            None,
            None,
            None,
        )


def _moments(message: Tensor, width: int, count: float) -> tuple[Tensor, Tensor, float]:
    sums = message[_HEADER : _HEADER + 2 * width].view(2, width)
    mean = sums[0] / count
    return mean, (sums[1] / count - mean * mean).clamp(min=0), count


def _track(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    """The running statistics, as torch's own layer keeps them."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    with torch.no_grad():
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        factor = layer.momentum
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
        kind = layer.running_mean.dtype
        unbiased = variance * (count / max(1.0, count - 1))
        layer.running_mean.lerp_(mean.to(kind), factor)
        layer.running_var.lerp_(unbiased.to(kind), factor)
