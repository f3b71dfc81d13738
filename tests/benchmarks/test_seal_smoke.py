"""What a seal costs, at two sizes, and which of them copies."""

from __future__ import annotations

import pytest

from benchmarks import seal


def test_a_quick_run_prints_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert seal.main(["--quick", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 + len(seal.QUICK) + 1
    assert lines[-1] == "| copies of the payload | 0 | 0 | | 2 | |"
