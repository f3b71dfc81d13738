"""A worker's prints on their way to the driver: tee'd, bounded, and given back at the end."""

import io
import logging
import os
import sys
import threading
import time

import pytest

from sparkdml.observe import worker_output
from sparkdml.observe.observers import OutputPrinter
from sparkdml.observe.worker_output import MAX_LINE_CHARACTERS, WorkerOutput
from sparkdml.testing.waiting import wait_until


class ControlClient:
    """Keeps what would be sent."""

    def __init__(self):
        self.events, self.num_flushes = [], 0

    def event(self, kind, **fields):
        self.events.append({"kind": kind, **fields})

    def flush(self):
        self.num_flushes += 1

    def lines(self, stream=None):
        return [
            line
            for event in self.events
            if stream in (None, event["stream"])
            for line in event["lines"]
        ]

    @property
    def dropped(self):
        return sum(event["dropped"] for event in self.events)


def test_lines_go_both_ways(capsys):
    client, before = ControlClient(), (sys.stdout, sys.stderr)
    with WorkerOutput(client, "host-a"):
        print("one", 1)
        print("two", end="")
        print(" three")
        print("trouble", file=sys.stderr)
        print("no end", end="")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("one 1\ntwo three\nno end", "trouble\n")
    assert client.lines("stdout") == ["one 1", "two three", "no end"]
    assert client.lines("stderr") == ["trouble"]
    assert {event["host"] for event in client.events} == {"host-a"}
    assert client.num_flushes == 1


def test_lines_come_while_the_task_runs(capsys, monkeypatch):
    monkeypatch.setattr(worker_output, "SEND_SECONDS", 0.01)
    client = ControlClient()
    with WorkerOutput(client, "a"):
        print("now")
        wait_until(lambda: client.events)
        assert client.lines() == ["now"]


def test_lines_before_a_failure_are_sent(capsys):
    client = ControlClient()

    def fail():
        with WorkerOutput(client, "a"):
            print("last words")
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert client.lines() == ["last words"]


def test_a_flood_is_bounded_and_counted(capsys):
    client = ControlClient()
    num_lines = 20_000
    with WorkerOutput(client, "a"):
        for number in range(num_lines):
            print(number)
    assert len(client.lines()) + client.dropped == num_lines
    assert client.dropped > num_lines / 2
    assert client.lines()[-1] == str(num_lines - 1)  # the newest are worth most
    assert len(capsys.readouterr().out.splitlines()) == num_lines  # the executor's log has all
    assert all(len(event["lines"]) <= worker_output.LINES_PER_SEND for event in client.events)


def test_long_lines_and_lines_without_end_are_bounded(capsys):
    client = ControlClient()
    with WorkerOutput(client, "a") as output:
        print("x" * 10_000_000)
        for _ in range(1000):
            sys.stdout.write("y" * 1000)
        assert sum(map(len, output._tees["stdout"]._partial.values())) <= MAX_LINE_CHARACTERS + 1
    assert [line[:1] for line in client.lines()] == ["x", "y"]
    assert all(len(line) == MAX_LINE_CHARACTERS + 1 for line in client.lines())


def test_a_bar_that_redraws_its_line_is_one_line(capsys):
    client = ControlClient()
    with WorkerOutput(client, "a"):
        for percent in range(101):
            sys.stderr.write(f"\r{percent}%")
        sys.stderr.write("\n")
        for percent in range(101):
            sys.stderr.write(f"{percent}% again\r")
    assert client.lines() == ["100%", "100% again"]


def test_threads_do_not_mix_their_lines(capsys):
    client = ControlClient()

    def say(word):
        for _ in range(30):
            print(word, word)

    with WorkerOutput(client, "a"):
        threads = [threading.Thread(target=say, args=(word,)) for word in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(client.lines()) == sorted(f"{word} {word}" for word in "abc" for _ in range(30))


def test_a_connection_that_raises_does_no_harm(capsys, monkeypatch):
    monkeypatch.setattr(worker_output, "SEND_SECONDS", 0.01)

    class Broken(ControlClient):
        def event(self, kind, **fields):
            raise OSError("the driver is gone")

    with WorkerOutput(Broken(), "a"):
        for _ in range(5):
            print("still here")
            time.sleep(0.02)
    assert capsys.readouterr().out == "still here\n" * 5


def test_a_forked_child_only_prints(capsys):
    client = ControlClient()
    with WorkerOutput(client, "a"):
        pid = os.fork()
        if pid == 0:
            print("from the child")
            os._exit(0 if capsys.readouterr().out == "from the child\n" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.lines() == []


@pytest.fixture
def logger():
    logger = logging.getLogger("tests.worker_output")
    logger.propagate = False
    yield logger
    logger.handlers.clear()


def test_logging_handlers_follow_and_go_back(capsys, logger):
    old = logging.StreamHandler(sys.stderr)
    logger.addHandler(old)
    links = [ControlClient(), ControlClient()]
    with WorkerOutput(links[0], "a"):
        logger.warning("first task")
        new = logging.StreamHandler(sys.stderr)
        logger.addHandler(new)
    assert old.stream is new.stream is sys.stderr
    logger.removeHandler(old)
    with WorkerOutput(links[1], "a"):  # the process is used again: its handlers are still there
        logger.warning("second task")
    logger.warning("afterwards")
    assert links[0].lines() == ["first task"]
    assert links[1].lines() == ["second task"]
    assert capsys.readouterr().err == "first task\nsecond task\nafterwards\n"


def test_logging_that_is_not_configured(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    client = ControlClient()
    with WorkerOutput(client, "a"):
        logging.getLogger("unused").warning("a warning")
    assert client.lines("stderr") == ["a warning"]
    assert logging.getLogger().handlers == []  # a later basicConfig still works


def test_a_stream_that_outlives_its_task_passes_on(capsys):
    client = ControlClient()
    with WorkerOutput(client, "a"):
        kept = sys.stdout
        sys.stdout.writelines(["in time\n"])
    print("too late", file=kept)
    assert kept.encoding == sys.stdout.encoding
    assert client.lines() == ["in time"]
    assert capsys.readouterr().out == "in time\ntoo late\n"


def test_a_foreign_stream_is_left_in_place(monkeypatch):
    theirs = io.StringIO()
    with monkeypatch.context() as patch:
        with WorkerOutput(ControlClient(), "a"):
            patch.setattr(sys, "stdout", theirs)
        assert sys.stdout is theirs


def test_the_driver_prints_rank_and_host(capsys):
    printer = OutputPrinter()
    output = {"kind": "output", "host": "host-b", "dropped": 0}
    printer.handle(1, {**output, "stream": "stdout", "lines": ["a", "b"]})
    printer.handle(0, {**output, "stream": "stderr", "lines": ["c"], "dropped": 1200})
    printer.handle(0, {"kind": "epoch", "row": {}})
    printer.handle(2, {**output, "stream": "stdout", "lines": ["d"], "task": "server 0"})
    printer.close()
    said = capsys.readouterr()
    assert said.out == "[rank 1 on host-b] a\n[rank 1 on host-b] b\n[server 0 on host-b] d\n"
    assert said.err.startswith("[rank 0 on host-b] c\n[rank 0 on host-b] … 1,200 more lines")
