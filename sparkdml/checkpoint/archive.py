"""The checkpoints of one run in a store: find, read, commit, prune.

Driver only; workers call `read_part` alone, which accepts a part only if it has the size and the
hash that its manifest records.
"""

from __future__ import annotations

import hashlib
import re
import uuid
import warnings
from collections.abc import Collection
from dataclasses import replace

from sparkdml.checkpoint.encoding import decode
from sparkdml.checkpoint.keep import Keep, to_prune
from sparkdml.checkpoint.manifest import (
    Manifest,
    Part,
    Submission,
    manifest_name,
    parse_id,
    part_name,
    submission_name,
)
from sparkdml.checkpoint.state import State
from sparkdml.checkpoint.stores.base import CheckpointStore
from sparkdml.errors import CheckpointError


class Archive:
    """Reads and writes the records; damaged ones are skipped with a warning."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._known: dict[str, Manifest] = {}  # a long run has many, and they hardly change

    # -- reading --------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        """Return all checkpoints of the run, pruned ones too, by step."""
        found = (self._manifest(id) for id in self._ids(set(self.store.names("checkpoints/"))))
        return [manifest for manifest in found if manifest is not None]

    def submissions(self) -> list[Submission]:
        found = []
        for name in self.store.names("submissions/"):
            try:
                found.append(Submission.from_json(self.store.read(name), name))
            except CheckpointError as error:
                warnings.warn(f"skipping a submission's record: {error}", stacklevel=2)
        return sorted(found, key=lambda submission: submission.number)

    def newest(self, rejected: Collection[str] = ()) -> Manifest | None:
        """Return the complete checkpoint to resume from: the last submission's last step."""
        names = set(self.store.names("checkpoints/"))
        for id in sorted(self._ids(names), key=_age, reverse=True):
            if id in rejected:
                continue
            manifest = self._manifest(id)
            if manifest is None or manifest.pruned:
                continue
            missing = [p.name for p in manifest.parts if part_name(id, p.name) not in names]
            if missing:
                warnings.warn(
                    f"skipping damaged checkpoint {id} in {self.store.url}, which lacks "
                    f"{', '.join(missing)}; resuming from an earlier one",
                    stacklevel=2,
                )
                continue
            return manifest
        return None

    def read(self, manifest: Manifest, rank: int = 0) -> State:
        """Return the state as one rank had it, if every byte of it is what was written."""
        state: State = {}
        for part in manifest.parts:
            if part.rank in (None, rank):
                state.update(decode(read_part(self.store, manifest, part), part.name))
        return state

    def _ids(self, names: set[str]) -> list[str]:
        ids = (name.split("/")[1] for name in names if name.endswith("/manifest.json"))
        return sorted(id for id in ids if parse_id(id) is not None)

    def _manifest(self, id: str) -> Manifest | None:
        if id in self._known:
            return self._known[id]
        name = manifest_name(id)
        try:
            manifest = Manifest.from_json(self.store.read(name), name)
        except (CheckpointError, FileNotFoundError) as error:
            warnings.warn(f"skipping checkpoint {id} in {self.store.url}: {error}", stacklevel=3)
            return None
        self._known[id] = manifest
        return manifest

    # -- writing --------------------------------------------------------------------------------

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on the checkpoint exists."""
        self.store.write(manifest_name(manifest.id), [manifest.to_json()])
        self._known[manifest.id] = manifest

    def record(self, submission: Submission) -> None:
        self.store.write(submission_name(submission.number), [submission.to_json()])

    def sweep(self, probe: str) -> None:
        """Remove unfinished files of drivers and workers that were killed.

        Only the driver that holds the lock may call it, and only while no worker writes.
        """
        names = self.store.names("checkpoints/")
        whole = set(self._ids(set(names)))
        for name in names:
            _, id, *rest = name.split("/")
            # Others may keep files of their own in a folder that is called `checkpoints`.
            if len(rest) == 1 and is_part(rest[0]) and parse_id(id) and id not in whole:
                self.store.remove(name)
        for name in self.store.names("probes/"):
            if name != probe and is_probe(name):
                self.store.remove(name)

    def prune(self, keep: Keep, protected: Collection[str] = ()) -> None:
        """Remove the checkpoints that `keep` doesn't keep. Manifests stay: they are the lineage."""
        for manifest in to_prune(self.manifests(), keep, protected):
            # First the mark, then the files: no reader takes a partly deleted checkpoint for whole.
            self.commit(replace(manifest, pruned=True))
            for part in manifest.parts:
                self.store.remove(part_name(manifest.id, part.name))


def _age(id: str) -> tuple[int, int, int]:
    age = parse_id(id)
    assert age is not None, id
    return age


REPLICATED_PART = "state.safetensors"


def rank_part(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def is_part(name: str) -> bool:
    return re.fullmatch(r"(state|rank-[0-9]+)\.safetensors", name) is not None


def new_probe() -> str:
    """The name of an object that a driver writes, and that its workers look for."""
    return f"probes/{uuid.uuid4().hex}"


def is_probe(name: str) -> bool:
    return re.fullmatch(r"probes/[0-9a-f]{32}", name) is not None


def read_part(store: CheckpointStore, manifest: Manifest, part: Part) -> bytes:
    """Return a part's bytes, if they are those that were written."""
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
