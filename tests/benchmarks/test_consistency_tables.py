"""The arithmetic of benchmarks/consistency.py; no run."""

from dataclasses import replace

import pytest
import torch

from benchmarks.consistency import AIMS, DIGITS, LINE_UP, MODELS, Found, Run, judge_looks, network

WORK = replace(DIGITS, target=0.5, within=0.5)


def run(seconds_to_target: float, accuracy: float = 0.9) -> Run:
    """A look a second; the loss falls below the target two looks before it counts."""
    losses = [2.0] * int(seconds_to_target - 3) + [0.1] * 5
    return Run([float(n) for n in range(1, len(losses) + 1)], losses, accuracy)


def test_one_lucky_look_does_not_count():
    lucky = Run([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 0.4, 2.0, 2.0, 2.0], 0.9)
    assert lucky.reached(0.5) is None
    assert run(7).reached(0.5) == 7.0


def test_ratios_are_of_the_same_round_and_aims_are_judged_by_their_median():
    bsp, ssp = [run(20), run(40), run(30)], [run(10), run(20), run(30)]
    found = Found("rotating", WORK, {"BSP": bsp, "SSP(3)": ssp})
    sooner = found.sooner("SSP(3)")
    assert sooner is not None
    assert (sooner.median, sooner.low, sooner.high) == (2.0, 1.0, 2.0)
    assert found.missed() == []
    assert "| SSP(3) | 20.0 (10.0 to 30.0) | 2.00 (1.00 to 2.00) |" in found.to_markdown()


def test_what_is_too_late_never_there_or_too_far_off_is_missed():
    never = Run([1.0], [2.0], 0.9)
    found = Found(
        "rotating", WORK, {"BSP": [run(20, 0.9)], "SSP(3)": [never], "TAP": [run(9, 0.8)]}
    )
    late, far = found.missed()
    assert late == "rotating: SSP(3) is not 1.5 times as fast as BSP"
    assert far == "rotating: TAP is -10.00 points away"
    assert "| SSP(3) | never | never |" in found.to_markdown()


def test_models_are_judged_in_the_order_in_which_they_were_seen(tmp_path):
    module = network()
    inputs, targets = torch.zeros(4, 784), torch.tensor([3, 3, 3, 3])
    for seconds, bias in ((10.5, 9.0), (2.25, 0.0)):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
            module[2].bias[3] = bias
        torch.save(module.state_dict(), tmp_path / f"{seconds:012.4f}.pt")
    judged = judge_looks(tmp_path, (inputs, targets))
    assert judged.seconds == [2.25, 10.5]
    assert judged.losses[0] == pytest.approx(2.3026, abs=1e-3)
    assert judged.losses[1] < 0.01
    assert judged.accuracy == 1.0


def test_contenders_with_an_aim_take_part():
    assert all(name in LINE_UP[pattern] for pattern, name in AIMS)
    assert all(name in MODELS for names in LINE_UP.values() for name in names)
