"""What unmodified Horovod and DDP scripts open in a worker, and how it is let go of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MAKES_GROUPS = "_new_process_group_helper"  # torch's own: `init_process_group` and `new_group` do

_of_failed: list[Any] = []  # an error has the script's variables, until its process ends


@contextmanager
def kept_groups() -> Iterator[None]:
    """Hold the process groups that a script opens, until it has let go of its models.

    A DDP model that is dropped after `destroy_process_group` would be the last to have its group.
    It ends the group's thread with Python's lock in hand, for which that thread may be waiting (to
    drop the last gradients): both would wait for ever. Python itself drops a group without it.
    """
    torchs: Any = sys.modules.get("torch.distributed.distributed_c10d")
    make: Any = getattr(torchs, MAKES_GROUPS, None)
    if make is None:  # torch was built without groups, or is another torch
        yield
        return
    kept: list[Any] = []

    def make_and_keep(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        kept.append(made[0])
        return made

    setattr(torchs, MAKES_GROUPS, make_and_keep)
    try:
        yield
    except BaseException:
        _of_failed.extend(kept)
        raise
    finally:
        setattr(torchs, MAKES_GROUPS, make)


def leave_foreign_groups(failed: bool) -> None:
    """Close what a script opened and left open."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and not failed and horovod.is_initialized():
        horovod.shutdown()
