"""Tables as states for a checkpoint: whole tensors, whatever parts and servers they came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdml.server.keys import Table
from sparkdml.server.optimizers import updater_from
from sparkdml.server.shard import Shard


def join_parts(table: Table, parts: list[Shard]) -> dict[str, Any]:
    """The parts of a table as one state of tensors, numbers and text."""
    assert len(parts) == table.num_parts
    slots = {}
    for name, slot in parts[0].slots.items():
        by_row = all(len(part.slots[name]) == len(part.values) for part in parts)
        slots[name] = torch.cat([part.slots[name] for part in parts]) if by_row else slot
    return {
        "values": torch.cat([part.values for part in parts]).reshape(table.shape),
        "rows": table.by_row,
        "updater": parts[0].updater.to_dict(),
        "slots": slots,
    }


def split_state(name: str, state: Mapping[str, Any], part_bytes: int) -> list[Shard]:
    """The inverse, for any size of parts."""
    values: Tensor = state["values"]
    table = Table.of(name, values, state["rows"], part_bytes)
    matrix = table.matrix(values.contiguous())
    updater = updater_from(state["updater"])
    shards = []
    for part in range(table.num_parts):
        start, stop = table.range(part)
        shard = Shard.new(table, part, updater, matrix[start:stop])
        for slot_name, fresh in shard.slots.items():
            slot: Tensor = state["slots"][slot_name]
            by_row = len(slot) == table.num_rows
            shard.slots[slot_name] = (slot[start:stop] if by_row else slot).clone().view_as(fresh)
        shards.append(shard)
    return shards
