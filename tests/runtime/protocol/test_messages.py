"""The control protocol's tables: every message can be read from its line, others are refused."""

import json

import pytest

from sparkdml.errors import ProtocolError
from sparkdml.runtime.protocol.messages import (
    FROM_DRIVER,
    FROM_TASK,
    QUESTIONS,
    Answer,
    Ask,
    Beat,
    CheckpointDamaged,
    ClockQuestion,
    Done,
    FactsQuestion,
    Failed,
    Hello,
    PartsReport,
    RowsReport,
    RunIsOver,
    ServiceQuestion,
    SpoolLost,
    StopRequest,
    TaskEvent,
    ask,
    decode,
    encode,
    read_question,
)

ASKED = [
    ClockQuestion(),
    FactsQuestion(),
    RowsReport(7),
    SpoolLost(),
    PartsReport({"id": "a", "parts": [1]}),
    CheckpointDamaged("a", "its hash is another"),
    ServiceQuestion("lease", {"shard": 3}),
]
FROM_TASKS = [
    Hello("server", 1, number=4, host="h", pid=7),
    Hello("worker", 0, number=0, host="h", pid=7, attempt=2, task_id=99),
    Beat(),
    TaskEvent("steps", {"loss": 0.5}),
    Ask(3, "rows", {"num_rows": 1}),
    Failed("ValueError", "why", "where", is_effect=False, step=3),
    Done(),
]
FROM_DRIVERS = [Answer(3, [1, 2]), Answer(3, error="no"), StopRequest("interrupted"), RunIsOver()]


def test_the_tables_are_whole():
    assert {type(question) for question in ASKED} == set(QUESTIONS.values())
    assert {type(message) for message in FROM_TASKS} == set(FROM_TASK.values())
    assert {type(message) for message in FROM_DRIVERS} == set(FROM_DRIVER.values())


@pytest.mark.parametrize("question", ASKED, ids=str)
def test_a_question_is_read_from_its_line(question):
    line = json.loads(json.dumps(encode(ask(5, question))))
    asked = decode(line, FROM_TASK)
    assert asked.number == 5
    assert read_question(asked) == question


@pytest.mark.parametrize("message", [*FROM_TASKS, *FROM_DRIVERS], ids=str)
def test_a_message_is_read_from_its_line(message):
    table = FROM_DRIVER if message in FROM_DRIVERS else FROM_TASK
    assert decode(json.loads(json.dumps(encode(message))), table) == message


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({}, "there is no message None in the control protocol, only 'ask', 'beat', "),
        ({"type": "song"}, "there is no message 'song'"),
        ({"type": ["beat"]}, r"there is no message \['beat'\]"),
        ({"type": "beat", "loud": True}, "the message 'beat' has no field 'loud'"),
        ({"type": "event", "kind": "log"}, "the message 'event' lacks its field 'fields'"),
        ({"type": "event", "kind": 3, "fields": {}}, "the message 'event' has kind=3"),
        ({"type": "answer", "number": 1}, "there is no message 'answer'"),
    ],
)
def test_what_is_not_in_the_table_is_refused(line, error):
    with pytest.raises(ProtocolError, match=error):
        decode(line, FROM_TASK)
