"""The arithmetic of the comparison, on made-up times."""

from __future__ import annotations

import pytest

from benchmarks.aims import AIMS, FastEnough, SoonEnough, judge
from benchmarks.measurement import FIRST_EPOCH, FIRST_STEP, WHOLE_CALL, Measurement
from benchmarks.ratios import Round, Spread, best_in_round, metrics_in, seconds_of, times_as_fast


def took(**seconds_by_contender: float) -> Round:
    return {
        name: Measurement({WHOLE_CALL: seconds}, rows=100)
        for name, seconds in seconds_by_contender.items()
    }


def test_ratios_are_taken_within_a_round_and_not_of_medians() -> None:
    # The machine slows down threefold in the second round; within a round, ours is twice as fast
    # in two of three. The ratio of the medians would be 3.0 / 1.0.
    rounds = [took(ours=1, peer=2), took(ours=3, peer=6), took(ours=1, peer=3)]

    spread = times_as_fast(rounds, "ours", ["peer"], WHOLE_CALL)

    assert spread == Spread(median=2.0, low=2.0, high=3.0, count=3)


def test_the_best_of_several_peers_is_chosen_in_every_round() -> None:
    rounds = [took(ours=1, first=4, second=8), took(ours=1, first=9, second=5)]

    assert best_in_round(rounds[1], ["first", "second"], WHOLE_CALL) == 5
    assert times_as_fast(rounds, "ours", ["first", "second"], WHOLE_CALL) == Spread(4.5, 4, 5, 2)


def test_a_round_in_which_one_of_the_two_failed_counts_for_nothing() -> None:
    rounds = [took(ours=1, peer=2), took(ours=1), took(peer=100)]

    assert times_as_fast(rounds, "ours", ["peer"], WHOLE_CALL) == Spread(2, 2, 2, 1)
    assert seconds_of(rounds, "peer", WHOLE_CALL) == [2, 100]


@pytest.mark.parametrize("rounds", [[], [{}], [took(ours=1)], [took(peer=1)]])
def test_nothing_to_compare_gives_none(rounds: list[Round]) -> None:
    assert times_as_fast(rounds, "ours", ["peer"], WHOLE_CALL) is None


def test_a_metric_that_a_contender_lacks_gives_none() -> None:
    rounds = [{"ours": Measurement({WHOLE_CALL: 1}), "limit": Measurement({FIRST_EPOCH: 1})}]

    assert times_as_fast(rounds, "ours", ["limit"], WHOLE_CALL) is None
    assert metrics_in(rounds) == [WHOLE_CALL, FIRST_EPOCH]


def test_the_median_of_an_even_number_of_values_lies_between_the_middle_two() -> None:
    assert Spread.of([4, 1, 3, 2]) == Spread(2.5, 1, 4, 4)
    assert Spread.of([]) is None


def test_aims_look_at_the_side_that_they_promise() -> None:
    faster = FastEnough("W1", WHOLE_CALL, "ours", ("peer",), 3.0, "")
    sooner = SoonEnough("W1", WHOLE_CALL, "ours", 0.5, "")
    rounds = [took(ours=0.4, peer=1.3)]

    speed, start = faster.measured(rounds), sooner.measured(rounds)

    assert speed is not None
    assert start is not None
    assert faster.reached(speed)
    assert not faster.reached(Spread(2.9, 2.9, 2.9, 1))
    assert sooner.reached(start)
    assert not sooner.reached(Spread(0.6, 0.6, 0.6, 1))


def test_only_aims_with_measurements_are_judged() -> None:
    rounds = {"W3": [{"sparkdml-torch": Measurement({FIRST_STEP: 0.3}, rows=1000)}]}

    [(aim, spread)] = judge(rounds)

    assert isinstance(aim, SoonEnough)
    assert aim.reached(spread)


def test_aims_name_contenders_and_workloads_that_exist() -> None:
    from benchmarks.lineup import ALL
    from benchmarks.workloads import FULL

    for aim in AIMS:
        others = aim.others if isinstance(aim, FastEnough) else ()
        assert {aim.contender, *others} <= set(ALL)
        assert aim.workload in FULL
