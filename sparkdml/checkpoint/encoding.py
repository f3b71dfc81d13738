"""Encodes state as JSON and safetensors, so that reading it never runs code.

A value is split into a skeleton of JSON and the tensors that the skeleton names. Anything else is
refused with its path within the state. Pure; used in the workers and at the driver.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import CheckpointError

CHUNK_BYTES = 4 << 20

Tensors = dict[str, Tensor]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


def take_apart(state: State) -> tuple[dict[str, Any], Tensors]:
    """The skeleton, and the tensors themselves, not yet copied."""
    tensors: Tensors = {}
    known: dict[tuple[Any, ...], str] = {}
    skeleton = {
        name: {
            "rule": entry.rule,
            "weight": entry.weight,
            "value": _encode(entry.value, name, tensors, known),
        }
        for name, entry in state.items()
    }
    return skeleton, tensors


def put_together(skeleton: dict[str, Any], tensors: Tensors) -> State:
    return {
        name: Entry(_decode(entry["value"], tensors), entry["rule"], entry["weight"])
        for name, entry in skeleton.items()
    }


def _encode(value: Any, path: str, tensors: Tensors, known: dict[tuple[Any, ...], str]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.generic):
        return _encode(value.item(), path, tensors, known)
    if isinstance(value, Tensor):
        return {"$tensor": _name_tensor(value.detach(), path, tensors, known)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        return {"$array": _name_tensor(tensor, path, tensors, known), "shape": list(value.shape)}
    if isinstance(value, bytes):
        tensor = torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)
        return {"$bytes": _name_tensor(tensor, path, tensors, known), "length": len(value)}
    if isinstance(value, tuple | list):
        items = [_encode(v, f"{path}.{i}", tensors, known) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [(key, _encode(v, f"{path}.{key}", tensors, known)) for key, v in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        if all(isinstance(key, int | str) for key in value):
            return {"$dict": [list(pair) for pair in pairs]}
    raise CheckpointError(
        f"the state {path!r} is a {type(value).__name__}, which no checkpoint can hold: use "
        "tensors, arrays, numbers, text, and dicts and lists of them. Return such values from "
        "state(), and rebuild the rest in load()"
    )


def _name_tensor(
    tensor: Tensor, path: str, tensors: Tensors, known: dict[tuple[Any, ...], str]
) -> str:
    """Tied weights are one tensor in memory, and one in the file."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"the state {path!r} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors "
            "can't hold. Keep it dense and of a plain type, or rebuild it in load()"
        )
    identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.numel() and identity in known:
        return known[identity]
    tensors[path] = tensor
    known[identity] = path
    return path


def _decode(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$array" in value:
        return tensors[value["$array"]].numpy().reshape(value["shape"])
    if "$bytes" in value:
        return tensors[value["$bytes"]].numpy().tobytes()[: value["length"]]
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    if "$dict" in value:
        return {key: _decode(item, tensors) for key, item in value["$dict"]}
    return {key: _decode(item, tensors) for key, item in value.items()}


class Stream:
    """The bytes of a safetensors file, in chunks that are views of the tensors' own memory.

    May be iterated more than once: a store that failed reads them again.
    """

    def __init__(self, skeleton: dict[str, Any], tensors: Tensors) -> None:
        # The format allows no gaps, and aligned data reads faster: the widest types come first.
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())
        header: dict[str, Any] = {"__metadata__": {"skeleton": json.dumps(skeleton)}}
        start = 0
        for name in order:
            tensor = tensors[name]
            stop = start + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, stop],
            }
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._tensors = [tensors[name] for name in order]
        self.num_bytes = len(self._head) + start

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        for tensor in self._tensors:
            if tensor.numel():
                data = tensor.reshape(-1).view(torch.uint8).numpy().data
                for start in range(0, len(data), CHUNK_BYTES):
                    yield data[start : start + CHUNK_BYTES]


def decode(content: bytes, name: str) -> State:
    """Decode a file's state. safetensors checks the header's lengths before it uses them."""
    try:
        length = int.from_bytes(content[:8], "little")
        skeleton = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["skeleton"])
        return put_together(skeleton, safetensors.torch.load(content))
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
