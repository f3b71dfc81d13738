"""A worker's part in rows that move: it opens others' rows when asked to, and serves its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.comm.interface import address_towards
from sparkdml.feed.leased import LeaseReader, SpoolSource
from sparkdml.feed.order import Ints
from sparkdml.feed.pool import Pool, exchange_positions
from sparkdml.feed.shared_rows import SharedRows, share_among

if TYPE_CHECKING:
    from sparkdml.runtime.context import Context


class MovingRows:
    """Gone with the worker's feed."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._shared = SharedRows(ctx.data, ctx.rank, ctx.plan.token)
        self._know_each_other = False
        self._leases: LeaseReader | None = None

    def pool(self, epoch: int, shuffle: bool, position: Ints | None) -> Pool:
        """By way of the communicator; every rank calls it."""
        if not self._know_each_other:
            share_among(self._shared, self._ctx, self._serve)
            self._know_each_other = True
        positions = exchange_positions(position, self._ctx)
        return Pool(self._ctx.data, self._shared, epoch, shuffle, positions)

    @property
    def leases(self) -> LeaseReader:
        """By way of the desk at the driver; a worker that can't map its peers' rows may come."""
        if self._leases is None:
            if self._ctx.size > 1:
                self._serve()
            source = SpoolSource(self._ctx.data, self._shared, self._ctx.rank)
            self._leases = LeaseReader(self._ctx.ask, source, self._ctx.rank)
        return self._leases

    def _serve(self) -> None:
        host = address_towards(self._ctx.plan.driver_host) or self._ctx.host
        self._shared.serve(host, self._ctx.traffic)

    def close(self) -> None:
        self._shared.close()
