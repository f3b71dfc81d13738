"""The kinds of events that a run sends: one table, from which all who handle events in bulk work.

Each entry names the sender, the fields with their meaning, and how the event reaches the Training
tab. The driver's `EventBatch` merges and drops events by this table, and the table of
docs/reference-events.md is written from it (scripts/make_reference.py; a test compares). So a new
kind of event takes an entry here and a call of `ctx.event`: the tab shows kinds without a drawing
of their own as a table with a column for each field.

Constants only, imported at the driver; workers send events without knowing this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Posting = Literal["each", "steps", "sums", "newest", "none"]
"""How events of a kind are posted to the Training tab, and so to Spark's event log.

each: one by one.
steps: those of one epoch are merged, their losses joined and thinned.
sums: those of one rank are merged; the fields named in `sums` are added up.
newest: of one rank only the newest between two posts.
none: not at all; the tab has no use for them.
"""


@dataclass(frozen=True)
class EventKind:
    """A row of the table. `fields` maps each name to its meaning, "" where the name says it."""

    sender: str
    fields: Mapping[str, str]
    posting: Posting = "each"
    sums: tuple[str, ...] = field(default=())


EVENTS: dict[str, EventKind] = {
    "run-start": EventKind(
        "driver",
        {
            "name": "",
            "strategy": "",
            "backend": "",
            "workers": "null where Spark's slots decide",
            "epochs": "",
            "batch_size": "",
            "global_batch": "null where Spark's slots decide",
            "seed": "",
            "plan": "what the run's states depend on",
        },
    ),
    "submission": EventKind(
        "driver",
        {
            "number": "1 for the first start of the workers, 2 for the first restart, …",
            "workers": "",
            "from_step": "",
            "backend": "`horovod`, `torch`, `mpi` or `single`; null where workers share no sums",
        },
    ),
    "topology": EventKind(
        "rank 0",
        {
            "asked": "the topology that was asked for",
            "used": "the topology that sums tensors in this run",
        },
    ),
    "steps": EventKind(
        "rank 0, at most 4 a second",
        {
            "epoch": "",
            "step": "",
            "losses": "`[[step, loss], …]`, at most 50",
            "rows": "done in this epoch",
            "of": "rows per epoch, or null",
            "loss": "the epoch's mean so far",
        },
        "steps",
    ),
    "rank": EventKind(
        "each rank, at most 1 a second",
        {
            "host": "",
            "steps": "",
            "rows": "",
            "seconds": "`data`, `compute`, `communication`, `checkpoint`, `other`",
            "bytes": "sent to other ranks",
            "messages": "sent to other ranks; all numbers are sums since the last such event",
        },
        "sums",
        sums=("steps", "rows", "seconds", "bytes", "messages"),
    ),
    "epoch": EventKind("rank 0", {"row": "the row of the history"}),
    "checkpoint": EventKind(
        "driver",
        {
            "id": "",
            "parent": "",
            "ckpt_kind": "",
            "step": "",
            "bytes": "",
            "copy_seconds": "",
            "write_seconds": "",
        },
    ),
    "failure": EventKind(
        "driver",
        {
            "cause": "in one line",
            "failed_role": "`worker`, `server`, …",
            "failed_rank": "among the tasks of that role",
            "host": "",
            "traceback": "",
            "step": "",
        },
    ),
    "restart": EventKind(
        "driver",
        {
            "cause": "",
            "from_step": "",
            "workers": "",
            "without_progress": "restarts since the last new checkpoint",
            "allowed": "the limit of these",
        },
    ),
    "already-trained": EventKind(
        "driver", {"step": "of the finished run that was found; nothing is trained"}
    ),
    "evaluation": EventKind(
        "the evaluator of a parameter server",
        {
            "values": "`val_loss` and the metrics of a snapshot",
            "step": "of the snapshot",
            "epoch": "of the snapshot",
            "clock": "of the snapshot",
            "seconds": "that the evaluation took",
        },
    ),
    "communicator": EventKind(
        "each communicator of `LayeredSGD`, at the end",
        {"bytes": "sent", "messages": "sent"},
        "newest",
    ),
    "client": EventKind(
        "each worker of a parameter server, at the end of an epoch",
        {
            "bytes_pushed": "in this epoch, like all that follow",
            "bytes_pulled": "",
            "pushes": "of partitions",
            "pulls": "of partitions",
            "cached_pulls": "answered from memory, or computed on while a pull was under way",
            "repeated": "partitions that had received the push before a restart",
            "resent": "",
            "wait_seconds": "",
            "longest_queue": "",
            "staleness": "clocks behind → reads",
            "dropped": "reason → frames",
        },
    ),
    "server": EventKind(
        "each server of a parameter server (numbered after the workers), every 2 seconds and at "
        "the end",
        {
            "seat": "the server's number",
            "pushes": "of partitions, since it started, like all that follow",
            "pulls": "of partitions",
            "bytes_pushed": "",
            "bytes_pulled": "",
            "repeated": "",
            "queue": "reads that wait for the clock now",
            "longest_queue": "",
            "installs": "partitions sent to other servers",
            "rows_named": "",
            "dropped": "reason → frames",
        },
        "newest",
    ),
    "log": EventKind("any rank", {"values": "what a function passed to `ctx.log`"}),
    "note": EventKind("rank 0", {"text": "what a user should know, as a changed learning rate"}),
    "output": EventKind(
        'any rank, with `logs="driver"`',
        {
            "host": "",
            "stream": "",
            "lines": "printed or logged",
            "dropped": "lines left out",
            "task": "such as `server 0`, where it is no worker",
        },
        "none",
    ),
    "spans": EventKind(
        "any rank, with `timeline=`",
        {
            "host": "",
            "origin": "nanoseconds on the driver's clock, from which the spans count",
            "uncertainty": "microseconds, or null",
            "every": "only one of this many steps is recorded",
            "spans": "`[[track, name, begin, duration, step, args], …]`, in microseconds",
        },
        "none",
    ),
    "run-end": EventKind(
        "driver",
        {
            "outcome": "`finished`, `failed` or `interrupted`",
            "cause": "",
            "seconds": "",
            "stopped": "why, if before the last epoch",
            "stragglers": "",
        },
    ),
}


def as_markdown() -> str:
    """The table of docs/reference-events.md."""
    lines = ["| kind | sent by | fields | in the Training tab |", "|---|---|---|---|"]
    for name, kind in EVENTS.items():
        fields = "; ".join(
            f"`{each}`: {meaning}" if meaning else f"`{each}`"
            for each, meaning in kind.fields.items()
        )
        lines.append(f"| `{name}` | {kind.sender} | {fields} | {kind.posting} |")
    return "\n".join(lines) + "\n"
