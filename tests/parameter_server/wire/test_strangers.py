"""Frames that are not ours: dropped and counted, and the servers go on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import zmq

from sparkdml.errors import CommunicationError
from sparkdml.parameter_server.consistency import TAP
from sparkdml.parameter_server.wire import sockets
from sparkdml.parameter_server.wire.frames import Entry, Kind, Message, encode
from sparkdml.parameter_server.wire.seal import JobKey, Sealer
from sparkdml.parameter_server.wire.sockets import check_bindable
from sparkdml.testing.server_cluster import ServerCluster
from sparkdml.testing.waiting import wait_until


@pytest.fixture
def raw() -> Any:
    context: Any = zmq.Context()
    made = []

    def connect(address: str, word: bytes | None = None) -> Any:
        end = context.socket(zmq.DEALER)
        if word is not None:
            end.plain_username, end.plain_password = sockets.USER, word
        end.connect(f"tcp://{address}")
        made.append(end)
        return end

    yield connect
    for end in made:
        end.close(linger=0)
    context.term()


def test_bad_frames_are_dropped_and_counted(raw: Any) -> None:
    with ServerCluster(1, consistency=TAP()) as cluster, cluster.client() as client:
        client.init("n", torch.zeros(4))
        client.push("n", torch.ones(4)).wait()
        node = cluster.nodes[0]
        table = client._book.find("n").table
        member = cluster.membership.view.servers[0]
        push = Message(Kind.PUSH, [Entry(table.number, 0, number=1, values=torch.ones(4))])
        word = cluster.config.key.word_for(member.number)
        stranger = raw(node.address, word)  # who has overheard the word, and has no key

        def frames_of(key: JobKey, receiver: int = member.number) -> list[bytes]:
            return [bytes(frame) for frame in encode(push, Sealer(key, 55, receiver))]

        good = frames_of(cluster.config.key)
        for frames, reason in (
            (frames_of(JobKey.new()), "tag"),
            ([good[0], good[1][:-4]], "length"),
            ([good[0], good[1], b"more"], "length"),
            ([b"GET / HTTP/1.1"], "length"),
            ([b"x" * 500], "magic"),
        ):
            before = node.stats.dropped[reason]
            stranger.send_multipart(frames)
            wait_until(lambda r=reason, b=before: node.stats.dropped[r] == b + 1)

        # Recorded when it went to another server.
        stranger.send_multipart(frames_of(cluster.config.key, member.number ^ 1))
        wait_until(lambda: node.stats.dropped["stranger"] == 1)

        stranger.send_multipart(good)  # the first time it is a message like any other
        stranger.send_multipart(good)
        raw(node.address, word).send_multipart(good)
        wait_until(lambda: node.stats.dropped["replay"] == 2)
        assert client.pull("n").wait().tolist() == [2.0] * 4


def test_who_does_not_know_the_word_is_not_let_in(raw: Any) -> None:
    with ServerCluster(1, consistency=TAP()) as cluster, cluster.client() as client:
        node = cluster.nodes[0]
        for word in (None, b"wrong", cluster.config.key.word_for(5)):
            with contextlib.suppress(zmq.Again):  # the door was shut already
                raw(node.address, word).send_multipart([b"x"] * 1000, zmq.NOBLOCK)
        wait_until(lambda: node.stats.dropped["door"] >= 2)
        client.init("n", torch.zeros(4))
        assert set(node.stats.dropped) == {"door"}, "not one of the frames came through"


def test_nonsense_from_someone_with_the_key_does_no_harm(raw: Any) -> None:
    with ServerCluster(1, consistency=TAP()) as cluster, cluster.client() as client:
        client.init("n", torch.zeros(4))
        node, number = cluster.nodes[0], client._book.find("n").table.number
        member = cluster.membership.view.servers[0]
        sender = raw(node.address, cluster.config.key.word_for(member.number))
        nonsense = [
            Message(Kind.INIT, [Entry(1, 0)], text={"table": 5}),
            Message(Kind.INIT, [Entry(1, 0, values=torch.ones(2))], text={}, flags=1),
            Message(Kind.INSTALL, []),
            Message(Kind.INSTALL, [Entry(1, 0)], text={"table": None}, generation=1),
            Message(Kind.HELLO, []),
            Message(Kind.PULL, [], flags=2),
            Message(Kind.ANSWER, [Entry(1, 0)]),
            Message(Kind.REPLICATE, [Entry(number, 0, version=1)], generation=1),
            Message(Kind.PULL, [Entry(number, 0, rows=torch.tensor([9], dtype=torch.int32))]),
            Message(Kind.PUSH, [Entry(number, 0, number=1, values=torch.ones(3))]),
        ]
        sealer = Sealer(cluster.config.key, 77, member.number)
        for message in nonsense:
            sender.send_multipart([bytes(frame) for frame in encode(message, sealer)])
        wait_until(lambda: node.stats.dropped["form"] >= 5 and node.stats.dropped["refused"] >= 1)
        client.push("n", torch.ones(4)).wait()
        assert client.pull("n").wait().tolist() == [1.0] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_dropped_if_so_configured(bad: float) -> None:
    settings: Any = {"consistency": TAP(), "finite_only": True}
    with ServerCluster(2, **settings) as cluster, cluster.client() as client:
        client.init("n", torch.zeros(4))
        client.push("n", torch.tensor([1.0, bad, 1.0, 1.0])).wait()
        client.push("n", torch.ones(4)).wait()
        assert client.pull("n").wait().tolist() == [1.0] * 4
        assert client.stats.dropped["not finite"] == 1
        assert sum(node.stats.dropped["not finite"] for node in cluster.nodes.values()) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "", "*", "::", "0", "0x0", "::0"])
def test_a_server_never_binds_to_every_interface(host: str) -> None:
    with pytest.raises(CommunicationError, match="interface"):
        check_bindable(host)


def test_a_frame_that_is_too_long_is_not_even_received(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 1000)
    context: Any = zmq.Context()
    key = JobKey.new()
    inbox = sockets.Inbox(context, "127.0.0.1", key)
    try:
        address = f"127.0.0.1:{inbox.port}"
        raw(address, key.word_for(inbox.own)).send(b"x" * 100_000)
        message = Message(Kind.HELLO, [Entry(0, 0)])
        sealed = [bytes(frame) for frame in encode(message, Sealer(key, 5, inbox.own))]
        raw(address, key.word_for(inbox.own)).send_multipart(sealed)
        while not inbox.socket.poll(10):
            inbox.authenticator.answer()
        received = inbox.receive()
        assert received is not None
        assert received.sender == 5
        assert not inbox.dropped
    finally:
        inbox.close()
        context.term()
