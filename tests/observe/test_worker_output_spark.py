"""Workers' prints in real Spark tasks: at the driver with rank and host, and gone afterwards."""

import logging
import os
import sys

import pytest

import sparkdml as dml
from sparkdml.errors import WorkerError
from sparkdml.observe.observers import OutputPrinter
from sparkdml.observe.worker_output import WorkerOutput

pytestmark = pytest.mark.spark


def talk(ctx):
    with WorkerOutput(ctx._client, ctx.world.hosts[ctx.rank]):
        print(f"hello from {ctx.rank}")
        logging.getLogger("mine").warning("careful")
        if ctx.rank == 1:
            for number in range(50_000):
                print("flood", number)
    return os.getpid(), type(sys.stdout).__name__


def talk_and_fail(ctx):
    with WorkerOutput(ctx._client, ctx.world.hosts[ctx.rank]):
        print(f"last words of {ctx.rank}")
        raise ValueError("a mistake")


def say_nothing(ctx):
    print("not to be heard at the driver")
    return os.getpid(), type(sys.stdout).__name__


class Heard:
    """What came to the driver."""

    def __init__(self):
        self.lines, self.num_dropped = {}, 0
        self.printer = OutputPrinter()

    def __call__(self, rank, event):
        if event["kind"] == "output":
            self.lines.setdefault(rank, []).extend(event["lines"])
            self.num_dropped += event["dropped"]
        self.printer.handle(rank, event)


def test_prints_and_warnings_come_with_rank_and_host(spark, capsys):
    heard = Heard()
    first = dml.run(talk, num_workers=2, spark=spark, on_event=heard)
    assert heard.lines[0] == ["hello from 0", "careful"]
    assert heard.lines[1][-1] == "flood 49999"
    assert len(heard.lines[1]) + heard.num_dropped == 50_002
    said = capsys.readouterr()
    assert "] hello from 0\n" in said.out
    assert "[rank 0 on " in said.out
    assert "] careful\n" in said.err
    assert "more lines were dropped" in said.out + said.err

    for _ in range(20):  # until Spark takes a process of the first run again, not another idle one
        heard = Heard()
        second = dml.run(say_nothing, num_workers=2, spark=spark, on_event=heard)
        assert heard.lines == {}
        assert {kind for _, kind in first + second} == {"TextIOWrapper"}  # as Spark had it
        if {pid for pid, _ in first} & {pid for pid, _ in second}:
            return
    pytest.fail("no process of the first run was used again in 20 runs")


def test_what_was_printed_before_a_failure_arrives(spark):
    heard = Heard()
    with pytest.raises(WorkerError, match="a mistake"):
        dml.run(talk_and_fail, num_workers=2, spark=spark, on_event=heard)
    said = [line for lines in heard.lines.values() for line in lines]
    assert any(line.startswith("last words of") for line in said)


def test_asked_for_by_a_parameter(spark, capsys):
    dml.run(lambda ctx: print("hello"), num_workers=2, spark=spark, logs="driver")
    said = capsys.readouterr().out
    assert said.count("] hello\n") == 2
    dml.run(lambda ctx: print("hello"), num_workers=2, spark=spark)
    assert "] hello" not in capsys.readouterr().out
    with pytest.raises(dml.ParameterError, match="logs must be 'driver' or None"):
        dml.run(lambda ctx: None, num_workers=1, logs="yes")
