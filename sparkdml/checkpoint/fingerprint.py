"""A run's fingerprint: runs with equal fingerprints may share checkpoints. Driver only; pure.

Functions are distinguished by name, code and bound values; modules by their structure and the
shapes of their parameters. What is not part of it (the number of workers, the number of epochs, how
often to checkpoint) may change between two submissions.

Events, the Training tab and manifests show the descriptions. Texts that a partial binds may be
secrets, so they are described by a digest; older manifests contain them in plain.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sparkdml.checkpoint.stores.urls import without_passwords
from sparkdml.recorded_names import recorded_module

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAX_LISTED_FILES = 200

Show = Callable[[str], str]

_LITERAL = re.compile(r"""[bB]?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
# Where what a partial binds begins: after a function's digest, or a class's name with its module.
_PARTIAL = re.compile(r"(?: [0-9a-f]{12}|\w\.\w+)\(")


def describe(value: Any, weights: bool = False) -> str:
    """Describe a value as text, equal in all processes; `weights` adds a module's weights."""
    return _describe(value, _as_it_is, _hide_texts, weights)


def _describe(value: Any, show: Show, show_bound: Show, weights: bool = False) -> str:
    """Describe a value; `show` edits the repr of plain values, `show_bound` inside a partial."""
    if isinstance(value, nn.Module):
        content = [repr(value), _shapes(value), [_attributes(part) for part in value.modules()]]
        if weights:
            content.append([_describe_plainly(tensor) for tensor in value.state_dict().values()])
        return f"{type(value).__qualname__} {_digest(content)}"
    if isinstance(value, functools.partial):
        bound = [_describe(argument, show_bound, show_bound) for argument in value.args]
        bound += [
            f"{name}={_describe(v, show_bound, show_bound)}"
            for name, v in sorted(value.keywords.items())
        ]
        return f"{_describe(value.func, show, show_bound)}({', '.join(bound)})"
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        cells = getattr(value, "__closure__", None) or ()
        bound = [_describe_plainly(cell.cell_contents) for cell in cells]
        bound += [_describe_plainly(value.__defaults__), _describe_plainly(value.__kwdefaults__)]
        return f"{value.__module__}.{value.__qualname__} {_digest(_code(code), bound)}"
    if isinstance(value, type):
        return f"{recorded_module(value)}.{value.__qualname__}"
    if isinstance(value, Tensor):
        return f"tensor {_digest(str(value.dtype), value.detach().cpu().flatten().tolist())}"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key}: {_describe(item, show, show_bound)}" for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(_describe(item, show, show_bound) for item in value)
    if value is None or isinstance(value, str | int | float | bool):
        return show(repr(value))
    own_repr = "__repr__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    name = f"{recorded_module(type(value))}.{type(value).__qualname__}"
    return show(repr(value)) if own_repr else f"{name} {_digest(_attributes(value))}"


def _describe_plainly(value: Any) -> str:
    """What only goes into a digest: as it always was, so that digests of older runs match."""
    return _describe(value, _as_it_is, _as_it_is)


def _as_it_is(text: str) -> str:
    return text


def _hide_texts(text: str) -> str:
    """The literals of texts and bytes in a repr, each as a digest."""
    return _LITERAL.sub(lambda found: f"text {_digest(found.group())}", text)


def _hide_bound_texts(description: str) -> str:
    """A description that may be an older one, without the texts that a partial binds in it."""
    partial = _PARTIAL.search(description)
    if partial is None:
        return description
    return description[: partial.end()] + _hide_texts(description[partial.end() :])


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the differences, one line each. Texts that `before` has in plain are not shown."""
    old = {name: _hide_bound_texts(text) for name, text in before.items()}
    new = {name: _hide_bound_texts(text) for name, text in now.items()}
    return [
        f"{name} was {old.get(name, 'not set')}, is now {new.get(name, 'not set')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name) and old.get(name) != new.get(name)
    ]


def describe_data(df: DataFrame) -> dict[str, Any]:
    """Describe a DataFrame's rows without computing them.

    Spark's `semanticHash` can't serve: it differs between processes.
    """
    names = sorted(map(without_passwords, df.inputFiles()))
    known = _listed_files(df)
    return {
        "schema": df.schema.simpleString(),
        "num_files": len(names),
        "files": {name: known.get(name) for name in names[:MAX_LISTED_FILES]},
    }


def data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how the rows differ, by their number and the sum of their hashes.

    Files only explain a difference: the same rows may have been written again.
    """
    rows = [
        f"{what}: {before[key]:,} before, {now[key]:,} now"
        for key, what in (("num_rows", "rows"), ("hash_sum", "sum of the rows' hashes"))
        if key in before and key in now and before[key] != now[key]
    ]
    if rows:
        old, new = before.get("files", {}), now.get("files", {})
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                state = "is new" if name not in old else "is gone" if name not in new else "changed"
                rows.append(f"file {name} {state}")
    return rows[:12]


def _listed_files(df: DataFrame) -> dict[str, list[int]]:
    """Return sizes and times of the files that Spark has listed, without asking the file system."""
    files: dict[str, list[int]] = {}
    if not hasattr(df, "_jdf"):
        return files  # Spark Connect: the server doesn't return what it has listed
    leaves: Any = df._jdf.queryExecution().analyzed().collectLeaves()
    for index in range(leaves.size()):
        leaf = leaves.apply(index)
        if leaf.getClass().getSimpleName() != "LogicalRelation":
            continue
        relation = leaf.relation()
        if relation.getClass().getSimpleName() != "HadoopFsRelation":
            continue
        location = relation.location()
        if location.getClass().getSimpleName() != "InMemoryFileIndex":
            continue
        statuses = location.allFiles()
        for position in range(min(statuses.size(), MAX_LISTED_FILES)):
            status = statuses.apply(position)
            name = without_passwords(status.getPath().toUri().toString())
            files[name] = [int(status.getLen()), int(status.getModificationTime())]
    return files


def _attributes(value: Any) -> dict[str, str]:
    """Return those public attributes of an object whose values are plain."""
    return {
        name: repr(item)
        for name, item in sorted(getattr(value, "__dict__", {}).items())
        if not name.startswith("_")
        and name != "training"
        and isinstance(item, str | int | float | bool | tuple | None)
    }


def _shapes(module: nn.Module) -> list[Any]:
    state = module.state_dict(keep_vars=True)
    return [
        [name, str(value.dtype), list(value.shape), bool(getattr(value, "requires_grad", False))]
        for name, value in state.items()
        if isinstance(value, Tensor)
    ]


def _code(code: CodeType) -> list[Any]:
    """Return the code without line numbers: moving a function is no change."""
    constants = [
        _code(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
    ]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames)]


def _digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
