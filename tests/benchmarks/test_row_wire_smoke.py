"""Rows by our wire and by Flight, in one small case: both give the same rows."""

from __future__ import annotations

import pytest

from benchmarks import row_wire


def test_a_quick_run_prints_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert row_wire.main(["--quick", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 + len(row_wire.QUICK)
