"""The control protocol: every message between a task and the driver, and every question.

Pure values, used by both ends. Each message is one line of JSON on a `network.connection`, with the
`type` under which it stands in `FROM_TASK` or `FROM_DRIVER`. A question travels inside an `Ask`,
with the `what` under which it stands in `QUESTIONS`; the same connection carries the `Answer`.

A message that is not in these tables, or whose fields are not those of its class, raises
`ProtocolError`. For a question that is an error of the task that asks, and of no other: its `ask`
raises it, and the run continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_type_hints

from sparkdml.errors import ProtocolError
from sparkdml.network.connection import Message

# -- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockQuestion:
    """Timeline recorder → dispatcher: the driver's time, in seconds since 1970."""


@dataclass(frozen=True)
class FactsQuestion:
    """Context → dispatcher: what Spark knows of the rows; None where it can't tell."""


@dataclass(frozen=True)
class RowsReport:
    """Context → dispatcher: the rows that this worker has, where Spark can't count them."""

    num_rows: int


@dataclass(frozen=True)
class SpoolLost:
    """Context → the driver's spools: the one that was kept for this rank is gone."""


@dataclass(frozen=True)
class PartsReport:
    """Checkpointer → committer: this rank's parts of a checkpoint are written, or failed to be."""

    report: dict[str, Any]


@dataclass(frozen=True)
class CheckpointDamaged:
    """Checkpointer → checkpointed run: the checkpoint can't be read."""

    id: str
    why: str


@dataclass(frozen=True)
class ServiceQuestion:
    """`ctx.ask`, of a strategy or a user's function → its driver service."""

    about: str
    fields: dict[str, Any]


Question = (
    ClockQuestion
    | FactsQuestion
    | RowsReport
    | SpoolLost
    | PartsReport
    | CheckpointDamaged
    | ServiceQuestion
)
QUESTIONS: Mapping[str, type[Question]] = {
    "clock": ClockQuestion,
    "facts": FactsQuestion,
    "rows": RowsReport,
    "spool-lost": SpoolLost,
    "parts": PartsReport,
    "damaged": CheckpointDamaged,
    "driver_service": ServiceQuestion,
}


# -- from a task to the driver --------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message: which task this is."""

    role: str
    rank: int  # among the tasks of its role
    number: int  # among all tasks of the run; 0 is the first of those that train
    host: str
    pid: int
    attempt: int = 0  # how often Spark has started it before, where it does so by itself
    task_id: int | None = None  # Spark's own, of this attempt


@dataclass(frozen=True)
class Beat:
    """The task is alive."""


@dataclass(frozen=True)
class TaskEvent:
    """For the run's observers, and where a spool is for the driver."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A question. Its number is the connection's own, and is repeated in the answer."""

    number: int
    what: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The task's body has raised; sent before Spark learns of it."""

    error: str  # the exception's class
    reason: str
    traceback: str
    is_effect: bool  # most likely of another task's failure
    step: int


@dataclass(frozen=True)
class Done:
    """The task's body has returned: the end of the connection is no loss."""


# -- from the driver to a task --------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    number: int
    answer: Any = None
    error: str | None = None  # why the question is refused


@dataclass(frozen=True)
class StopRequest:
    """End after the step that is under way."""

    reason: str


@dataclass(frozen=True)
class RunIsOver:
    """For tasks that serve others, and for those that wait."""


FromTask = Hello | Beat | TaskEvent | Ask | Failed | Done
FromDriver = Answer | StopRequest | RunIsOver

FROM_TASK: Mapping[str, type[FromTask]] = {
    "hello": Hello,
    "beat": Beat,
    "event": TaskEvent,
    "ask": Ask,
    "failed": Failed,
    "done": Done,
}
FROM_DRIVER: Mapping[str, type[FromDriver]] = {
    "answer": Answer,
    "stop-request": StopRequest,
    "run-is-over": RunIsOver,
}


# -- to lines and back ----------------------------------------------------------------------------

_NAMES: Mapping[type, str] = {
    kind: name for table in (FROM_TASK, FROM_DRIVER, QUESTIONS) for name, kind in table.items()
}
Kind = TypeVar("Kind")


def _read_fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field, as `isinstance` takes it, and whether it must be there."""
    hints = get_type_hints(kind)
    return {
        field.name: (_plain(hints[field.name]), field.default is MISSING) for field in fields(kind)
    }


def _plain(hint: Any) -> Any:
    return object if hint is Any else getattr(hint, "__origin__", hint)


_FIELDS = {kind: _read_fields(kind) for kind in _NAMES}


def encode(message: FromTask | FromDriver) -> Message:
    return {"type": _NAMES[type(message)], **vars(message)}


def ask(number: int, question: Question) -> Ask:
    return Ask(number, _NAMES[type(question)], dict(vars(question)))


def decode(line: Message, table: Mapping[str, type[Kind]]) -> Kind:
    """The message that a line is; ProtocolError if the table has no such message."""
    values = {name: value for name, value in line.items() if name != "type"}
    return _build("message", line.get("type"), values, table)


def read_question(asked: Ask) -> Question:
    return _build("question", asked.what, asked.fields, QUESTIONS)


def _build(what: str, name: object, values: Message, table: Mapping[str, type[Kind]]) -> Kind:
    kind = table.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(map(repr, sorted(table)))
        raise ProtocolError(f"there is no {what} {name!r} in the control protocol, only {known}")
    allowed = _FIELDS[kind]
    for unknown in values.keys() - allowed.keys():
        raise ProtocolError(f"the {what} {name!r} has no field {unknown!r}")
    for field, (allowed_type, is_required) in allowed.items():
        if field not in values and is_required:
            raise ProtocolError(f"the {what} {name!r} lacks its field {field!r}")
        if field in values and not isinstance(values[field], allowed_type):
            raise ProtocolError(f"the {what} {name!r} has {field}={values[field]!r}")
    return kind(**values)
