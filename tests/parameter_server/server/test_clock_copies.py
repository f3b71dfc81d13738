"""Copies after a clock, without a network: whatever comes in which order, they are one model."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.parameter_server.consistency import Clocks
from sparkdml.parameter_server.optimizers import Add
from sparkdml.parameter_server.partition import Table
from sparkdml.parameter_server.server.clock_copies import ClockCopies
from sparkdml.parameter_server.stored_partition import Partition, Push
from sparkdml.parameter_server.wire.frames import Entry, Status

WORKERS, CLOCKS, SERVERS = 3, 4, 2


class Server:
    """One part, in which each push of each worker has a place of its own."""

    def __init__(self, aggregates):
        table = Table.of("pushes", torch.zeros(WORKERS * CLOCKS), False)
        self.partition = Partition.new(table, 0, Add(), torch.zeros(WORKERS * CLOCKS))
        self.key, self.aggregates = table.key(0), aggregates
        self.clocks = Clocks()
        self.clocks.expect(range(WORKERS))
        for worker in range(WORKERS):
            self.clocks.join(worker)
        self.copies = ClockCopies(self.clocks, aggregates)
        self.sessions = set(range(WORKERS))
        self.pushes = [0] * WORKERS  # that have come, of each

    def push(self, worker, clock):
        self.pushes[worker] += 1
        values = torch.zeros(WORKERS * CLOCKS, 1)
        values[worker * CLOCKS + clock] = 1.0
        push = Push(worker, worker, self.pushes[worker], clock, 1.0, None, values)
        self.partition.take(push, self.aggregates)
        self.copies.pushed(self.key, push)

    def finish(self, worker, clock):
        self.clocks.finish(worker, clock)
        self.step()

    def leave(self, worker):
        self.clocks.leave(worker)
        self.sessions.discard(worker)
        self.partition.forget(worker)
        self.step()

    def step(self):
        while self.aggregates and self.partition.stepped < self.clocks.slowest:
            self.partition.step()
            self.copies.stepped(self.key, self.partition)

    def ask(self, clock, wants_values=False):
        answer = Entry(*self.key)
        self.copies.answer(answer, 99, self.partition, clock, self.sessions, wants_values)
        return answer


class Run:
    """Workers that push to all servers, each message when it is drawn, in order on each line.

    A worker tells a clock when all servers have had its pushes of it, and leaves after its last.
    """

    def __init__(self, aggregates):
        self.servers = [Server(aggregates) for _ in range(SERVERS)]
        self.lines = {(w, s): [] for w in range(WORKERS) for s in range(SERVERS)}
        self.clock = [0] * WORKERS
        self.is_pushing = [False] * WORKERS
        self.has_left = [False] * WORKERS

    def move(self, worker):
        """What a worker does next, if it can."""
        if self.has_left[worker]:
            return
        if not self.is_pushing[worker] and self.clock[worker] == CLOCKS:
            self.has_left[worker] = True
            self._send(worker, "leave")
        elif not self.is_pushing[worker]:
            self.is_pushing[worker] = True
            self._send(worker, "push", self.clock[worker])
        elif all(server.pushes[worker] > self.clock[worker] for server in self.servers):
            self.is_pushing[worker] = False
            self.clock[worker] += 1
            self._send(worker, "finish", self.clock[worker])

    def _send(self, worker, what, *arguments):
        for server in range(SERVERS):
            self.lines[worker, server].append((what, *arguments))

    def deliver(self, worker, server):
        line = self.lines[worker, server]
        if line:
            what, *arguments = line.pop(0)
            getattr(self.servers[server], what)(worker, *arguments)


class Look:
    """Like the snapshot reader, one question at a time."""

    def __init__(self, run):
        self.run, self.clock, self.margin = run, 0, 0
        self.answers = {}
        self.found = None

    def ask(self, server):
        if self.found is not None:
            return
        answer = self.run.servers[server].ask(self.clock)
        self.answers[server] = answer
        if len(self.answers) < SERVERS:
            return
        status = {answer.status for answer in self.answers.values()}
        if Status.LATE in status:
            lowest = max(answer.clock for answer in self.answers.values())
            self.clock, self.margin = lowest + self.margin, 2 * self.margin or 1
        elif status == {Status.OK}:
            parts = [each.ask(self.clock, wants_values=True) for each in self.run.servers]
            self.found = [part.values for part in parts]
        self.answers = {}


def of_first_clocks(clock):
    values = torch.zeros(WORKERS, CLOCKS)
    values[:, :clock] = 1.0
    return values.view(-1)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.integers(0, WORKERS - 1)),
        st.tuples(st.just("deliver"), st.integers(0, WORKERS - 1), st.integers(0, SERVERS - 1)),
        st.tuples(st.just("ask"), st.integers(0, SERVERS - 1)),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(moves=moves, aggregates=st.booleans())
def test_all_parts_have_the_pushes_of_the_same_clocks(moves, aggregates):
    run = Run(aggregates)
    look = Look(run)
    for what, *arguments in moves:
        getattr(look if what == "ask" else run, what)(*arguments)
    # Whatever was left open comes to its end, and the look with it.
    for _ in range(4 * CLOCKS * (SERVERS + 1)):
        for worker in range(WORKERS):
            run.move(worker)
            for server in range(SERVERS):
                run.deliver(worker, server)
        for server in range(SERVERS):
            look.ask(server)
    if look.found is None:  # it had aimed at a clock that no worker reached
        assert look.clock > CLOCKS
        look = Look(run)
        for _ in range(3):
            for server in range(SERVERS):
                look.ask(server)
    for values in look.found:
        assert torch.equal(values, of_first_clocks(look.clock))
