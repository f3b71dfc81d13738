"""The consistency models without a network: any order of events, and no endless wait."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP, Clocks, Consistency

MODELS: list[Consistency] = [BSP(), SSP(0), SSP(2), ASP(), TAP()]
events = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "die", "step"]), st.integers(0, 3)), max_size=60
)


class Group:
    """Workers that run when they may: each reads, computes and finishes its clock."""

    def __init__(self, model: Consistency) -> None:
        self.model, self.clocks = model, Clocks()
        self.alive: dict[int, int] = {}
        self.lead = 0  # the furthest that anyone was admitted ahead of the slowest

    def happen(self, what: str, worker: int) -> bool:
        """One event; whether a step was allowed."""
        if what == "join" and worker not in self.alive:
            self.alive[worker] = self.clocks.join(worker)
        elif what == "leave" and self.alive.pop(worker, None) is not None:
            self.clocks.leave(worker)
        elif what == "die" and self.alive.pop(worker, None) is not None:
            self.clocks.die(worker)
        elif what == "step" and worker in self.alive:
            clock = self.alive[worker]
            if not self.model.may_read(clock, self.clocks.slowest):
                return False
            self.lead = max(self.lead, clock - min(self.alive.values()))
            self.alive[worker] = clock + 1
            self.clocks.finish(worker, clock + 1)
            return True
        return False


@settings(deadline=None, max_examples=150)
@given(events, st.integers(0, 3))
def test_no_worker_is_over_s_clocks_ahead(history: list[tuple[str, int]], staleness: int) -> None:
    group = Group(SSP(staleness))
    for what, worker in history:
        group.happen(what, worker)
    assert group.lead <= staleness


@settings(deadline=None, max_examples=150)
@given(events)
def test_ssp_without_staleness_decides_as_bsp(history: list[tuple[str, int]]) -> None:
    bulk, stale = Group(BSP()), Group(SSP(0))
    for what, worker in history:
        assert bulk.happen(what, worker) == stale.happen(what, worker)
    assert bulk.alive == stale.alive


@settings(deadline=None, max_examples=150)
@given(events, st.sampled_from(MODELS))
def test_no_order_of_joins_leaves_and_deaths_stops_the_others(
    history: list[tuple[str, int]], model: Consistency
) -> None:
    group = Group(model)
    for what, worker in history:
        before = group.clocks.slowest
        group.happen(what, worker)
        assert group.clocks.slowest >= before, "the clock went back"
        if group.alive:
            assert any(
                model.may_read(clock, group.clocks.slowest) for clock in group.alive.values()
            ), "everyone waits"


def test_the_last_worker_to_go_leaves_nothing_unapplied() -> None:
    clocks = Clocks()
    clocks.join(0)
    clocks.finish(0, 3)
    clocks.die(0)
    assert clocks.slowest == 4  # it may have pushed in the clock that it didn't finish


def test_nothing_moves_on_before_everyone_who_is_expected_was_heard_of() -> None:
    clocks = Clocks()
    clocks.expect([0], started=False)
    clocks.finish(0, 3)
    assert clocks.slowest == 0
    clocks.expect([0, 1])
    assert clocks.slowest == 0
    assert clocks.join(1) == 0
    clocks.finish(1, 2)
    assert clocks.slowest == 2
    clocks.expect([0, 1, 2])
    clocks.finish(1, 5)
    assert clocks.slowest == 2
    clocks.die(2)  # it was never heard of
    assert clocks.slowest == 3


def test_late_news_change_nothing() -> None:
    clocks = Clocks()
    clocks.join(0)
    clocks.finish(0, 5)
    clocks.finish(0, 2)
    assert clocks.clock_of(0) == 5


def test_the_threshold_of_asp_decays() -> None:
    model = ASP(significance=0.1, decay=3.0)
    assert model.threshold(0) == 0.1
    assert model.threshold(1) == 0.05
    assert ASP(significance=0.1).threshold(1000) == 0.1


def test_a_cached_read_is_allowed_within_the_bound_alone() -> None:
    assert SSP(2).may_reuse(stamp=3, clock=5)
    assert not SSP(2).may_reuse(stamp=2, clock=5)
    assert not BSP().may_reuse(stamp=5, clock=5)
    assert not TAP().may_reuse(stamp=9, clock=5)
