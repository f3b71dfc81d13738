"""The history in a notebook: curves beside the table, safe, and of bounded size."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.history import History
from sparkdml.observe.curves import draw_panel, ticks


def make(epochs, **more):
    rows = [
        {
            "epoch": float(epoch),
            "loss": 1.0 / epoch,
            "accuracy": 1 - 0.5 / epoch,
            "val_loss": 1.1 / epoch,
            **more,
            "rows": 1000.0,
            "steps": 10.0,
            "seconds": 2.0,
            "rows_per_second": 500.0,
        }
        for epoch in range(1, epochs + 1)
    ]
    return History(rows)


def drawings(page):
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def test_a_panel_for_each_metric_with_its_validation():
    page = make(5)._repr_html_()
    loss, accuracy = drawings(page)
    names = {"{http://www.w3.org/2000/svg}" + tag for tag in ("title", "text")}
    words = ["".join(e.itertext()) for e in loss.iter() if e.tag in names]
    assert "loss" in words
    assert "validation" in words
    assert "training, epoch 2: 0.5" in words
    assert "validation, epoch 5: 0.22" in words
    assert "validation" not in "".join(accuracy.itertext())
    assert page.count("<tr>") == 6
    assert "currentColor" in page  # follows the page's theme


def test_names_and_reasons_come_out_escaped():
    evil = "<script>alert(1)</script>"
    history = History([{"epoch": 1.0, evil: 0.5}], stopped=evil)
    page = history._repr_html_()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 3
    assert len(drawings(page)) == 1


def test_long_histories_stay_small():
    history = make(100_000)
    page = history._repr_html_()
    assert len(page) < 400_000
    assert "… 99,970 epochs" in page
    assert page.count("<tr>") == 1 + 30 + 1


def test_nothing_to_show():
    assert drawings(History([])._repr_html_()) == []


def test_what_is_not_finite_is_a_gap():
    curve = [1.0, math.nan, 0.5, math.inf, 0.2]
    drawing = draw_panel("loss", [1, 2, 3, 4, 5], {"training": curve})
    assert "nan" not in drawing
    assert "inf" not in drawing
    (line,) = re.findall(r'd="([^"]*)" stroke="#3b82f6"', drawing)
    assert line.count("M") == 3
    assert drawing.count("<title>") == 3


@pytest.mark.parametrize("curve", [[0.0], [math.nan], [2.0, 2.0], [1e-30, 1e30], [-1e300, 1e300]])
def test_odd_values_are_drawn_inside(curve):
    drawing = draw_panel("loss", list(range(1, len(curve) + 1)), {"training": curve})
    ET.fromstring(drawing)
    for x, y in re.findall(r'<circle cx="([^"]+)" cy="([^"]+)"', drawing):
        assert 0 <= float(x) <= 330
        assert 0 <= float(y) <= 210


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_are_few_and_within(low, width, most):
    high = low + width
    found = ticks(low, high, most)
    assert len(found) <= most
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= tick <= high + slack for tick in found)


def test_ticks_of_epochs_are_whole():
    assert ticks(1, 3, most=6, whole=True) == [1, 2, 3]
    assert ticks(1, 100, most=6, whole=True) == [20, 40, 60, 80, 100]
    assert ticks(1, 1, most=6, whole=True) == [1]
