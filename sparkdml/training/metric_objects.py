"""torchmetrics objects: states on each rank, reduced over the ranks as each metric says.

torchmetrics is never imported here: who gives such objects has it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError


def is_metric_object(value: Any) -> bool:
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, (library.Metric, library.MetricCollection))


class MetricObjects:
    """By name; a collection counts as its members, by theirs."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._metrics: dict[str, Any] = {}
        self.lost: list[str] = []  # those whose states of an epoch's first part could not be kept
        for name, given in metrics.items():
            members = dict(given.items()) if hasattr(given, "items") else {"": given}
            for member, metric in members.items():
                own = copy.deepcopy(metric).to(device)
                own.sync_on_compute = False  # the states are reduced here
                own.reset()
                self._metrics[f"{name}_{member}" if member else name] = own

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def fresh(self) -> MetricObjects:
        """The same metrics, of nothing yet."""
        other = copy.deepcopy(self)
        other.reset()
        return other

    def update(self, outputs: Any, targets: Any) -> None:
        for metric in self._metrics.values():
            metric.update(outputs, targets)

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def encode(self) -> bytes:
        """All states, as one rank or partition has them."""
        tensors = {"": torch.zeros(0)}  # safetensors wants at least one
        for name, metric in self._metrics.items():
            for key, state in _states(metric).items():
                parts = state if isinstance(state, list) else [state]
                for index, part in enumerate(parts):
                    tensors[f"{name}\n{key}\n{index}"] = part.detach().cpu().contiguous().clone()
        return safetensors.torch.save(tensors)

    def gather(self, comm: Communicator, device: torch.device) -> list[bytes]:
        """Every rank's states. Call it on every rank."""
        own = torch.frombuffer(bytearray(self.encode()), dtype=torch.uint8).to(device)
        return [part.cpu().numpy().tobytes() for part in comm.allgather(own)]

    def compute(self, encoded: Sequence[bytes]) -> dict[str, float]:
        """The values over all ranks or partitions, from what each of them encoded."""
        ranks = [safetensors.torch.load(content) for content in encoded]
        row: dict[str, float] = {}
        for name, metric in self._metrics.items():
            merged = copy.deepcopy(metric)
            for key, reduction in merged._reductions.items():
                setattr(
                    merged, key, _reduce(merged, name, key=key, reduction=reduction, ranks=ranks)
                )
            merged._update_count, merged._computed = 1, None
            row.update(_by_name(name, merged.compute()))
        return row

    # -- checkpoints in the middle of an epoch --------------------------------------------------

    def state(self) -> State:
        """Sums survive a change of the number of workers; other states don't."""
        if not self._metrics:
            return {}
        sums: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            for key, value in _states(metric).items():
                is_sum = _is_sum(metric._reductions[key]) and isinstance(value, Tensor)
                (sums if is_sum else others).setdefault(name, {})[key] = value
        return {
            "metric_sums": Entry(sums, "sum"),
            "metric_states": Entry(
                {"states": others, "counts": [m._update_count for m in self._metrics.values()]},
                "reset",
            ),
        }

    def load(self, state: Mapping[str, Any], rank: int) -> None:
        if not self._metrics:
            return
        saved = state.get("metric_states")
        if saved is None:  # another number of workers: the sums are of all, so one rank has them
            self.lost = [
                name
                for name, metric in self._metrics.items()
                if not all(map(_is_sum, metric._reductions.values()))
            ]
            if rank == 0:
                self._put({n: v for n, v in state["metric_sums"].items() if n not in self.lost})
            return
        self._put(state["metric_sums"])
        self._put(saved["states"])
        for metric, count in zip(self._metrics.values(), saved["counts"], strict=True):
            metric._update_count = count

    def _put(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for name, values in states.items():
            metric = self._metrics[name]
            for key, value in values.items():
                parts = value if isinstance(value, list) else [value]
                moved = [part.to(metric.device) for part in parts]
                setattr(metric, key, moved if isinstance(value, list) else moved[0])
            metric._update_count = max(1, metric._update_count)


def _states(metric: Any) -> dict[str, Any]:
    return {key: getattr(metric, key) for key in metric._reductions}


def _is_sum(reduction: Any) -> bool:
    return getattr(reduction, "__name__", "") == "dim_zero_sum"


def _reduce(
    metric: Any, name: str, key: str, reduction: Any, ranks: Sequence[Mapping[str, Tensor]]
) -> Any:
    """One state over all ranks, in rank order, as torchmetrics' own synchronization does it."""
    prefix = f"{name}\n{key}\n"
    parts = [
        [
            tensors[f"{prefix}{index}"].to(metric.device)
            for index in range(sum(entry.startswith(prefix) for entry in tensors))
        ]
        for tensors in ranks
    ]
    if isinstance(getattr(metric, key), list):
        flat = [tensor for part in parts for tensor in part]
        if not flat or reduction is None:
            return flat
        return reduction(flat)
    stacked = torch.stack([part[0] for part in parts])
    return stacked if reduction is None else reduction(stacked)


def _by_name(name: str, value: Any) -> dict[str, float]:
    """A number, several by name, or a short vector such as one value a class."""
    if isinstance(value, Mapping):
        return {
            column: number
            for key, item in value.items()
            for column, number in _by_name(f"{name}_{key}", item).items()
        }
    tensor = torch.as_tensor(value).detach().double()
    if tensor.dim() == 0:
        return {name: tensor.item()}
    if tensor.dim() == 1:
        return {f"{name}_{index}": item for index, item in enumerate(tensor.tolist())}
    raise ParameterError(
        f"metrics[{name!r}]",
        f"a metric whose value is of shape {list(tensor.shape)}",
        "one whose value is a number, a dict or a vector of numbers",
    )
