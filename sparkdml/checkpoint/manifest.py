"""The manifest of a checkpoint and the record of a submission: plain JSON, one small object each.

`checkpoints/<id>/manifest.json` is written after all of its parts, so a checkpoint that has one is
complete. `submissions/<number>.json` has the workers, the checkpoint that they resumed from, and
the outcome. The driver writes and reads both; a worker is shipped the manifest it resumes from.

Each ends with a hash of all that stands before it, so that damage to it is noticed. Records of
earlier versions have none; in these, only what contradicts itself is noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdml.errors import CheckpointError

VERSION = 1

Kind = Literal["root", "step", "epoch", "final"]
KINDS: tuple[Kind, ...] = ("root", "step", "epoch", "final")  # as they come at one step


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint."""

    name: str  # within the checkpoint's folder
    rank: int | None  # None: the state that is the same on every rank
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A node of the lineage: where a state came from, and what it consists of."""

    id: str
    parent: str | None
    submission: int
    step: int  # optimizer steps behind this state
    epoch: int  # whole epochs behind this state
    kind: Kind
    num_workers: int
    global_batch: int
    plan: dict[str, str]  # the fingerprint: a description of each thing that the state depends on
    plan_hash: str
    data: dict[str, Any]  # files, schema, number of rows, sum of their hashes
    parts: tuple[Part, ...]
    workers: tuple[
        dict[str, Any], ...
    ] = ()  # by rank: host, threads, CPU capability, device, torch
    metrics: dict[str, float] = field(default_factory=dict)  # the history's last row
    created: float = 0.0  # seconds since 1970
    copy_seconds: float = 0.0  # of the training thread, on the slowest rank
    write_seconds: float = 0.0  # in the background, on the slowest rank
    pruned: bool = False  # the parts are removed; the node stays in the graph
    version: int = VERSION

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def to_json(self) -> bytes:
        return _dump(self)

    @classmethod
    def from_json(cls, content: bytes, name: str) -> Manifest:
        fields = _load(content, name)
        try:
            fields["parts"] = tuple(Part(**part) for part in fields["parts"])
            fields["workers"] = tuple(fields["workers"])
            manifest = cls(**fields)
            manifest._check(name)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{name} is not a checkpoint's manifest: {error}") from error
        return manifest

    def _check(self, name: str) -> None:
        """Raise a ValueError unless its fields fit its name and each other."""
        for key in ("plan", "data", "metrics"):
            if not isinstance(getattr(self, key), dict):
                raise ValueError(f"its {key} is no object")
        if manifest_name(self.id) != name or parse_id(self.id) is None:
            raise ValueError(f"it is that of {self.id!r}")
        if parse_id(self.id) != (self.submission, self.step, KINDS.index(self.kind)):
            raise ValueError(f"its submission, step or kind is not that of {self.id!r}")
        if self.workers and len(self.workers) != self.num_workers:
            raise ValueError(f"it has {self.num_workers} workers and lists {len(self.workers)}")
        ranks = {part.rank for part in self.parts if part.rank is not None}
        if not ranks <= set(range(self.num_workers)):
            raise ValueError(f"it has {self.num_workers} workers and parts of ranks {ranks}")


@dataclass(frozen=True)
class Submission:
    """One attempt at the run: from a checkpoint (or from nothing) until it ended."""

    number: int
    reason: Literal["start", "restart", "resume"]  # restart: by the driver itself, after a failure
    resumed_from: str | None
    num_workers: int
    started: float
    ended: float | None = None
    outcome: Literal["running", "finished", "failed", "lost"] = "running"
    cause: str | None = None  # the failure, in one line
    failed_at_step: int | None = None
    driver: str = ""  # host and process, to find out whether it is alive
    beats: int = 0  # grows while the driver is alive
    version: int = VERSION

    def to_json(self) -> bytes:
        return _dump(self)

    @classmethod
    def from_json(cls, content: bytes, name: str) -> Submission:
        try:
            return cls(**_load(content, name))
        except TypeError as error:
            raise CheckpointError(f"{name} is not a submission's record: {error}") from error


def checkpoint_id(step: int, submission: int, kind: Kind) -> str:
    """Return an id that sorts by step; a step repeated by a later submission has another id."""
    return f"{step:010d}-{submission:04d}-{kind}"


def parse_id(id: str) -> tuple[int, int, int] | None:
    """Return submission, step and kind, which sort by age; None if the id is not a checkpoint's."""
    found = re.fullmatch(rf"([0-9]+)-([0-9]+)-({'|'.join(KINDS)})", id)
    if found is None:
        return None
    step, submission, kind = found.groups()
    return int(submission), int(step), KINDS.index(kind)


def manifest_name(id: str) -> str:
    return f"checkpoints/{id}/manifest.json"


def part_name(id: str, part: str) -> str:
    return f"checkpoints/{id}/{part}"


def submission_name(number: int) -> str:
    return f"submissions/{number:04d}.json"


def _dump(record: Manifest | Submission) -> bytes:
    return _sealed(json.dumps(dataclasses.asdict(record), indent=1).encode())


_SEAL = b',\n "sha256": "'  # at this depth there is no other


def _sealed(content: bytes) -> bytes:
    """The same JSON object, with the hash of its bytes as its last field."""
    sha256 = hashlib.sha256(content).hexdigest()
    return content.removesuffix(b"\n}") + _SEAL + sha256.encode() + b'"\n}'


def _unsealed(content: bytes, name: str) -> bytes:
    fields, seal, _ = content.rpartition(_SEAL)
    if not seal:
        return content  # of an earlier version, or the seal is damaged: no record has such a field
    if _sealed(fields + b"\n}") != content:
        raise CheckpointError(f"{name} is damaged: its SHA-256 differs")
    return fields + b"\n}"


def _load(content: bytes, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(_unsealed(content, name))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: it is not JSON ({error})") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"{name} has version {version!r}, and this sparkdml reads version {VERSION}. Use the "
            "sparkdml that wrote it, or a new path"
        )
    return dict(fields)
