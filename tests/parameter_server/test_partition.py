"""Parts on the ring: everyone agrees, and a change moves only its share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.parameter_server.partition import Ring, place_of

server_ids = st.sets(st.integers(0, 40), min_size=1, max_size=8)
POINTS = [place_of((7, part)) for part in range(600)]


@settings(deadline=None, max_examples=30)
@given(server_ids, st.integers(1, 4))
def test_every_key_has_as_many_owners_as_there_can_be(chosen: set[int], count: int) -> None:
    ring = Ring(chosen)
    for point in POINTS[:100]:
        owners = ring.owners(point, count)
        assert len(owners) == len(set(owners)) == min(count, len(chosen))
        assert set(owners) <= chosen


@settings(deadline=None, max_examples=30)
@given(server_ids, st.integers(50, 60))
def test_a_server_that_joins_moves_only_its_share(chosen: set[int], newcomer: int) -> None:
    before, after = Ring(chosen), Ring({*chosen, newcomer})
    moved = 0
    for point in POINTS:
        old, new = before.owners(point, 1)[0], after.owners(point, 1)[0]
        assert new in (old, newcomer)
        moved += new != old
    assert moved < 3 * len(POINTS) / (len(chosen) + 1)


@settings(deadline=None, max_examples=30)
@given(st.sets(st.integers(0, 40), min_size=3, max_size=8))
def test_the_successor_of_a_lost_server_already_has_a_replica(chosen: set[int]) -> None:
    lost = min(chosen)
    before, after = Ring(chosen), Ring(chosen - {lost})
    for point in POINTS:
        old = before.owners(point, 2)
        left = [server_id for server_id in old if server_id != lost]
        assert after.owners(point, 2)[: len(left)] == tuple(left)


def test_the_load_is_spread() -> None:
    ring = Ring(range(4))
    counts = [0] * 4
    for point in POINTS:
        counts[ring.owners(point, 1)[0]] += 1
    assert min(counts) > len(POINTS) / 4 * 0.5


def test_every_process_has_the_same_ring() -> None:
    """Python's own hash() differs from process to process: these were computed in another one."""
    ring = Ring(range(3))
    owners = [ring.owners(place_of((7, part)), 2) for part in range(8)]
    assert owners == [(1, 0), (0, 1), (1, 2), (2, 0), (2, 0), (2, 1), (0, 2), (1, 0)]
