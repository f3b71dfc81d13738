"""Finds the ranks that can share memory, by trying: host names prove nothing.

Two containers may have the same name but no common memory, and a machine may have two names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkdml.comm.base import Communicator
from sparkdml.comm.shared_memory.exchange import Exchange
from sparkdml.comm.shared_memory.segment import Offer, Segment

_NOTHING = Offer(0, -1, 0)


@dataclass(frozen=True)
class Host:
    """This rank's host; `leaders` has the lowest rank that each rank shares memory with."""

    leaders: tuple[int, ...]
    exchange: Exchange | None  # None if this rank is alone on its host, or without memory
    has_threads: bool = False  # whether ranks are threads of one process

    @property
    def num_hosts(self) -> int:
        return len(set(self.leaders))

    @property
    def is_whole_world(self) -> bool:
        """Whether all ranks, more than one, share this rank's memory."""
        return self.exchange is not None and self.num_hosts == 1

    def close(self) -> None:
        """Release the memory if it will not be used."""
        if self.exchange is not None:
            self.exchange.close()


def find_host(comm: Communicator) -> Host:
    """Share one segment among the ranks of each host; every rank of `comm` calls it."""
    try:
        own, offer = Segment.create()
    except (OSError, AttributeError):  # no memfd on this platform: this rank will be alone
        own, offer = None, _NOTHING
    opened: list[Segment] = [] if own is None else [own]
    exchange = None
    try:
        offers = _exchange_offers(comm, offer)
        leader, segment = _first_in_reach(offers, comm.rank, own, opened)
        reached, pids = _gather(comm, leader), [each.pid for each in offers]
        leaders = grouped(reached, pids)
        ranks = [rank for rank, other in enumerate(leaders) if other == leaders[comm.rank]]
        exchange = _attach(comm, segment, ranks)
    finally:
        for each in opened:
            if exchange is None or each is not segment:
                each.close()
    return Host(leaders, exchange, has_threads=bool(_crowded(_led(reached), pids)))


def grouped(leaders: Sequence[int], pids: Sequence[int]) -> tuple[int, ...]:
    """Return each rank's final leader, from the lowest rank that each could reach.

    A rank is alone if its leader has another leader, or if its host has ranks that are threads of
    one process: they need no shared memory, and its locks could not show that one has ended.
    """
    led = _led(leaders)
    crowded = _crowded(led, pids)
    return tuple(rank if leader in crowded else leader for rank, leader in enumerate(led))


def _led(leaders: Sequence[int]) -> list[int]:
    return [leader if leaders[leader] == leader else rank for rank, leader in enumerate(leaders)]


def _crowded(led: Sequence[int], pids: Sequence[int]) -> set[int]:
    """Leaders of hosts with several ranks in one process."""
    pairs = list(zip(led, pids, strict=True))
    return {leader for leader, pid in pairs if pairs.count((leader, pid)) > 1}


def _first_in_reach(
    offers: Sequence[Offer], rank: int, own: Segment | None, opened: list[Segment]
) -> tuple[int, Segment | None]:
    """Find the lowest rank whose memory this one can open; opened segments go to `opened`."""
    for other in range(rank) if own is not None else ():
        segment = Segment.open(offers[other])
        if segment is not None:
            opened.append(segment)
            return other, segment
    return rank, own


def _attach(comm: Communicator, segment: Segment | None, ranks: Sequence[int]) -> Exchange | None:
    """Map the memory, the leader first, who prepares it; return None unless all ranks could."""
    local_rank, size = list(ranks).index(comm.rank), len(ranks)
    ready = size > 1 and segment is not None
    for takes_turn in (local_rank == 0, local_rank > 0):
        if ready and takes_turn:
            assert segment is not None
            try:
                if local_rank == 0:
                    segment.allocate(Exchange.num_bytes(size))
                segment.map(Exchange.num_bytes(size), local_rank)
                if local_rank == 0:
                    Exchange.initialise(segment, size)
            except (OSError, AttributeError):  # no memory, or a limit on it: use sockets
                ready = False
        answers = _gather(comm, int(ready))
        ready = all(answers[rank] for rank in ranks)
    if not ready:
        return None
    assert segment is not None
    return Exchange(segment, local_rank, size, comm.check)


def _exchange_offers(comm: Communicator, offer: Offer) -> list[Offer]:
    mine = torch.tensor([offer.pid, offer.fd, offer.nonce])
    return [Offer(*numbers.tolist()) for numbers in comm.allgather(mine)]


def _gather(comm: Communicator, number: int) -> list[int]:
    return [int(each.item()) for each in comm.allgather(torch.tensor([number]))]
