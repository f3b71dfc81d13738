"""Every file and folder that the maps of the code name is there: the pages', and the drawing's."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAPS = ("docs/architecture.md", "CONTRIBUTING.md")
DRAWING = ROOT / "docs" / "images" / "architecture.svg"
PLACE = re.compile(r"[\w./*-]+(?:/|\.py)$")


def places_of(text: str) -> list[str]:
    """What looks like a path: `feed/`, `runtime/driver/jobs.py`, `checkpoint/stores/relay*.py`."""
    return [word for quoted in text for word in re.split(r"[\s,]+", quoted) if PLACE.match(word)]


def is_there(place: str) -> bool:
    """By its path in the repository or in the package; a file's bare name, anywhere in it."""
    pattern = place.rstrip("/") if "/" in place else f"**/{place}"
    return any(True for top in (ROOT, ROOT / "sparkdml") for _ in top.glob(pattern))


@pytest.mark.parametrize("page", MAPS)
def test_the_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    places = places_of(re.findall(r"`([^`\n]+)`", text))
    assert places
    assert [place for place in places if not is_there(place)] == []


def test_the_files_that_the_drawing_names_are_there() -> None:
    places = places_of(re.findall(r"monospace[^>]*>([^<]+)<", DRAWING.read_text()))
    assert len(places) > 15
    assert [place for place in places if not is_there(place)] == []


def test_the_drawing_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    draw = import_module("draw_architecture")
    monkeypatch.setattr(draw, "PICTURE", tmp_path / "drawn.svg")
    draw.main()
    drawn = (tmp_path / "drawn.svg").read_text()
    assert drawn == DRAWING.read_text(), "run: python scripts/draw_architecture.py"


def test_a_place_that_is_not_there_is_found() -> None:
    assert places_of(["", "a", " and ", "feed/ no/such.py", " and ", "x = 1 / 2", ""]) == [
        "feed/",
        "no/such.py",
    ]
    assert is_there("feed/")
    assert not is_there("no/such.py")
