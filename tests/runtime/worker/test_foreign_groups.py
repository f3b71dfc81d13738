"""Process groups of a script outlive its models."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch.distributed import distributed_c10d

from sparkdml.runtime.worker.main import MAKES_GROUPS, kept_groups


class Group:
    pass


def make_group(opened: list[weakref.ref]) -> None:
    group, _ = getattr(distributed_c10d, MAKES_GROUPS)()
    opened.append(weakref.ref(group))


def break_down_with_a_group(opened: list[weakref.ref]) -> None:
    with kept_groups():
        make_group(opened)
        raise RuntimeError("broken")


def test_torch_still_makes_groups_by_that_name() -> None:
    assert callable(getattr(distributed_c10d, MAKES_GROUPS))


def test_a_group_is_kept_until_the_script_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, MAKES_GROUPS, lambda: (Group(), None))
    original = getattr(distributed_c10d, MAKES_GROUPS)
    opened: list[weakref.ref] = []
    with kept_groups():
        make_group(opened)
        gc.collect()
        assert opened[0]() is not None
    gc.collect()
    assert opened[0]() is None
    assert getattr(distributed_c10d, MAKES_GROUPS) is original


def test_an_error_leaves_torch_as_it_was_and_the_group_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed_c10d, MAKES_GROUPS, lambda: (Group(), None))
    original = getattr(distributed_c10d, MAKES_GROUPS)
    opened: list[weakref.ref] = []
    with pytest.raises(RuntimeError, match="broken"):
        break_down_with_a_group(opened)
    gc.collect()
    assert opened[0]() is not None
    assert getattr(distributed_c10d, MAKES_GROUPS) is original
