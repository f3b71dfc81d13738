"""All orders of small cases of the failover protocol: no lost and no doubled update.

One part, a worker with two pushes, up to four servers, of which one may crash (or be taken for dead
though it lives) at any point, and one may come. Messages may arrive in any order, late, or never.
The judgements and the bookkeeping are those of `replication.py`; what a node does around them is
written down here once more, as short as it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from sparkdml.parameter_server.server.replication import (
    Stamp,
    Standing,
    Verdict,
    judge_change,
    judge_copy,
)

REPLICATION = 2
Pushes = tuple[int, ...]  # the numbers of the pushes that a copy has applied, in order
Message = tuple[object, ...]


@dataclass(frozen=True)
class View:
    generation: int
    servers: Pushes  # in the order of the ring, from the part's point on
    joining: Pushes = ()

    @property
    def replicas(self) -> tuple[int, ...]:
        owners = self.servers[:REPLICATION]
        future = tuple(sorted(self.servers + self.joining))[:REPLICATION]
        return owners + tuple(server_id for server_id in future if server_id in self.joining)


@dataclass(frozen=True)
class Server:
    view: View
    copy: tuple[Stamp, Pushes] | None = None
    replicas: tuple[tuple[int, int | None, int], ...] | None = None  # of a Standing
    waiting: tuple[tuple[int, int], ...] = ()

    def standing(self) -> Standing[int]:
        assert self.replicas is not None
        standing: Standing[int] = Standing(server_id for server_id, _, _ in self.replicas)
        for server_id, sent, acked in self.replicas:
            standing._replicas[server_id].sent, standing._replicas[server_id].acked = sent, acked
        standing._waiting.extend(self.waiting)
        return standing

    def with_standing(self, standing: Standing[int] | None) -> Server:
        if standing is None:
            return replace(self, replicas=None, waiting=())
        replicas = tuple((s, r.sent, r.acked) for s, r in standing._replicas.items())
        return replace(self, replicas=replicas, waiting=tuple(standing._waiting))


@dataclass(frozen=True)
class World:
    view: View
    servers: tuple[Server | None, ...]  # None: not running
    client: View
    acked: frozenset[int] = frozenset()
    messages: frozenset[Message] = frozenset()
    crashes: int = 1
    suspicions: int = 0
    joins: int = 0
    resends: int = 1
    copies: int = 0
    sent: int = 0

    def put(self, server_id: int, server: Server | None, *messages: Message) -> World:
        servers = (*self.servers[:server_id], server, *self.servers[server_id + 1 :])
        return replace(self, servers=servers, messages=self.messages | set(messages))


def start(num_servers: int, room: int, **budget: int) -> World:
    view = View(1, tuple(range(num_servers)))
    servers: list[Server | None] = [None] * room
    for server_id in range(num_servers):
        has_copy = server_id in view.replicas
        servers[server_id] = Server(view, ((1, 0), ()) if has_copy else None)
    primary = servers[0]
    assert primary is not None
    servers[0] = replace(primary, replicas=tuple((s, 0, 0) for s in view.replicas[1:]))
    return World(view, tuple(servers), view, **budget)


# What can happen ---------------------------------------------------------------------------------


def successors(world: World, num_pushes: int) -> Iterator[World]:
    yield from worker(world, num_pushes)
    yield from membership(world)
    for server_id, server in enumerate(world.servers):
        if server is not None:
            if server.view != world.view and server_id in world.view.servers + world.view.joining:
                yield adopt(world, server_id, server)
            if world.copies and server.waiting:
                left = world.copies - 1
                yield replace(send_copies(world, server_id, server, again=True), copies=left)
    for message in world.messages:
        yield deliver(replace(world, messages=world.messages - {message}), message)


def worker(world: World, num_pushes: int) -> Iterator[World]:
    """Sends the pushes in order, and any of them again: its messages may be lost or doubled."""
    primary = world.client.replicas[0]
    if world.sent < num_pushes:
        push = ("push", primary, world.sent + 1)
        yield replace(world, messages=world.messages | {push}, sent=world.sent + 1)
    for number in range(1, world.sent + 1):
        push = ("push", primary, number)
        if world.resends and push not in world.messages:
            left = world.resends - 1
            yield replace(world, messages=world.messages | {push}, resends=left)
    if world.client != world.view:
        yield replace(world, client=world.view)


def membership(world: World) -> Iterator[World]:
    view = world.view
    running = [server_id for server_id, server in enumerate(world.servers) if server is not None]
    whole = settled(world)
    for server_id in view.servers + view.joining:
        alive = world.servers[server_id] is not None
        # With two replicas a second loss before the first is mended is more than can be borne.
        if alive and world.crashes and (whole or server_id in view.joining):
            yield replace(world.put(server_id, None), crashes=world.crashes - 1)
        suspected = alive and world.suspicions and whole
        if (not alive or suspected) and len(view.servers) > 1:
            kept = View(
                view.generation + 1,
                tuple(s for s in view.servers if s != server_id),
                tuple(s for s in view.joining if s != server_id),
            )
            yield replace(world, view=kept, suspicions=world.suspicions - bool(suspected))
    for server_id in range(len(world.servers)):
        if (
            world.joins
            and server_id not in running
            and server_id not in view.servers + view.joining
        ):
            wider = replace(
                view, generation=view.generation + 1, joining=(*view.joining, server_id)
            )
            joined = replace(world, view=wider, joins=world.joins - 1)
            yield joined.put(server_id, Server(wider))
    if view.joining and whole:
        servers = tuple(sorted(view.servers + view.joining))
        yield replace(world, view=View(view.generation + 1, servers))


def settled(world: World) -> bool:
    """Whether the primary of the newest view has given its copies to all replicas."""
    primary = world.servers[world.view.replicas[0]]
    if primary is None or primary.view != world.view or primary.replicas is None:
        return False
    return all(primary.standing().has_copy(server_id) for server_id in world.view.replicas)


def adopt(world: World, server_id: int, server: Server) -> World:
    old, view = server.view, world.view
    server = replace(server, view=view)
    if server_id not in view.replicas:
        return world.put(server_id, replace(server, copy=None).with_standing(None))
    if server_id != view.replicas[0] or server.copy is None:
        return world.put(server_id, server.with_standing(None))
    if server.replicas is None:
        standing: Standing[int] = Standing(view.replicas[1:])
    else:
        standing = server.standing()
        for other in view.replicas[1:]:
            if other not in old.replicas:
                standing.lost_track(other)
        standing = standing.renewed(view.replicas[1:])
    return send_copies(world, server_id, server.with_standing(standing))


def send_copies(world: World, server_id: int, server: Server, again: bool = False) -> World:
    standing = server.standing()
    assert server.copy is not None
    (_, version), _ = server.copy
    if again:
        for other in standing.followers:
            standing.lost_track(other)
    messages: list[Message] = []
    for other in standing.without_copy:
        messages.append(("copy", other, server.view.generation, server_id, server.copy))
        standing.sent(other, version)
    world = acknowledge(world, standing.acknowledged(-1, -1))
    return world.put(server_id, server.with_standing(standing), *messages)


def acknowledge(world: World, numbers: list[int]) -> World:
    """At once: a worker that doesn't hear of it sends again, as it may do here at any time."""
    return replace(world, acked=world.acked | set(numbers)) if numbers else world


def deliver(world: World, message: Message) -> World:
    kind, to = message[0], message[1]
    assert isinstance(to, int)
    server = world.servers[to]
    if server is None:
        return world
    handle = {"push": take_push, "change": take_change, "copy": take_copy, "have": take_have}
    return handle[str(kind)](world, to, server, *message[2:])  # type: ignore[operator]


def take_push(world: World, server_id: int, server: Server, number: int) -> World:
    if server_id != server.view.replicas[0] or server.copy is None or server.replicas is None:
        return world  # "moved": the worker will look again
    (before, version), applied = server.copy
    standing = server.standing()
    last = max(applied, default=0)
    if number > last + 1:
        return world  # a gap: the worker will send both again
    messages: list[Message] = []
    if number == last + 1:
        version, stamp = version + 1, (before, version)
        server = replace(server, copy=((server.view.generation, version), (*applied, number)))
        for other in standing.followers:
            change = ("change", other, server.view.generation, server_id, stamp, number)
            messages.append(change)
            standing.sent(other, version)
    world = acknowledge(world, standing.wait(version, number))
    return world.put(server_id, server.with_standing(standing), *messages)


def take_change(
    world: World,
    server_id: int,
    server: Server,
    generation: int,
    primary: int,
    before: Stamp,
    n: int,
) -> World:
    have = server.copy[0] if server.copy else None
    verdict = judge_change(server.view.generation, generation, have, before)
    if verdict is Verdict.TAKE:
        assert server.copy is not None
        stamp = (generation, before[1] + 1)
        server = replace(server, copy=(stamp, (*server.copy[1], n)))
    taken = verdict in (Verdict.TAKE, Verdict.KNOWN)
    answer = ("have", primary, server.view.generation, server_id, before[1] + 1, taken)
    return world.put(server_id, server, answer)


def take_copy(
    world: World, server_id: int, server: Server, generation: int, primary: int, copy: object
) -> World:
    assert isinstance(copy, tuple)
    have = server.copy[0] if server.copy else None
    verdict = judge_copy(server.view.generation, generation, have, copy[0])
    if verdict is Verdict.TAKE:
        server = replace(server, copy=copy)
    taken = verdict in (Verdict.TAKE, Verdict.KNOWN)
    return world.put(
        server_id, server, ("have", primary, server.view.generation, server_id, copy[0][1], taken)
    )


def take_have(
    world: World,
    server_id: int,
    server: Server,
    generation: int,
    other: int,
    version: int,
    taken: bool,
) -> World:
    if generation != server.view.generation or server.replicas is None:
        return world
    standing = server.standing()
    if taken:
        world = acknowledge(world, standing.acknowledged(other, version))
        return world.put(server_id, server.with_standing(standing))
    standing.lost_track(other)
    return send_copies(world, server_id, server.with_standing(standing))


# What must hold ----------------------------------------------------------------------------------


def check(world: World) -> None:
    """The server that serves a part, or is about to, has every acknowledged push, once."""
    authority = next(
        (
            server
            for server_id in world.view.replicas
            if (server := world.servers[server_id]) is not None
            and server_id not in world.view.joining
        ),
        None,
    )
    assert authority is not None, world
    assert authority.copy is not None, world
    for server in world.servers:
        if server is not None and server.copy is not None:
            applied = server.copy[1]
            assert applied == tuple(range(1, len(applied) + 1)), world
    assert world.acked <= set(authority.copy[1]), world


def explore(first: World, num_pushes: int) -> tuple[int, int]:
    """How many states there are, and in how many all pushes are acknowledged."""
    seen = {first}
    todo = [first]
    finished = 0
    while todo:
        world = todo.pop()
        check(world)
        finished += len(world.acked) == num_pushes
        for after in successors(world, num_pushes):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), finished


@pytest.mark.parametrize(
    ("world", "num_pushes"),
    [
        pytest.param(start(3, 3, resends=1, copies=1), 1, id="crash, with everything sent twice"),
        pytest.param(start(3, 3, resends=0), 2, id="crash, with two pushes under way"),
        pytest.param(start(3, 3, crashes=0, suspicions=1), 1, id="taken for dead, pushed twice"),
        pytest.param(start(3, 3, crashes=0, suspicions=1, resends=0), 2, id="taken for dead"),
        pytest.param(start(2, 3, crashes=1, joins=1, resends=0), 1, id="crash while one joins"),
    ],
)
def test_no_push_is_lost_or_doubled_in_any_order(world: World, num_pushes: int) -> None:
    states, finished = explore(world, num_pushes)
    assert states > 1000
    assert finished > 0


def test_the_enumeration_finds_an_acknowledgement_that_came_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Standing, "committed", float("inf"))
    with pytest.raises(AssertionError, match="World"):
        explore(start(3, 3, resends=0), num_pushes=1)


def test_the_enumeration_finds_a_change_that_does_not_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "judge_change", lambda own, sender, have, before: Verdict.TAKE)
    with pytest.raises(AssertionError, match="World"):
        explore(start(3, 3, resends=0), num_pushes=2)
