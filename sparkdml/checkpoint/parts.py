"""Reading a checkpoint's parts: only what has the size and the hash of its manifest is used."""

from __future__ import annotations

import hashlib

from sparkdml.checkpoint.manifest import Manifest, Part, part_name
from sparkdml.checkpoint.stores.base import Store
from sparkdml.errors import CheckpointError

REPLICATED_PART = "state.safetensors"


def rank_part(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def read_part(store: Store, manifest: Manifest, part: Part) -> bytes:
    """A part's bytes, if they are those that were written."""
    name = part_name(manifest.id, part.name)
    try:
        content = store.read(name)
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing from {store.url}") from None
    if len(content) != part.num_bytes:
        raise CheckpointError(
            f"{name} in {store.url} has {len(content):,} bytes, not {part.num_bytes:,}"
        )
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise CheckpointError(f"{name} in {store.url} is damaged: its SHA-256 differs")
    return content
