"""docs/reference.md is what the docstrings say now."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "make_reference.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current(maker: ModuleType) -> None:
    made = maker.make_reference()
    assert maker.PAGE.read_text() == made, "run: python scripts/make_reference.py"


def test_the_table_of_events_is_current(maker: ModuleType) -> None:
    made = maker.make_events_page()
    assert maker.EVENTS_PAGE.read_text() == made, "run: python scripts/make_reference.py"
    assert made.count("| `run-end` |") == 1


def test_every_public_name_and_every_param_is_there() -> None:
    import sparkdml as dml
    from sparkdml import extending

    text = (ROOT / "docs" / "reference.md").read_text()
    names = [*dml.__all__, *extending.__all__]
    missing = [name for name in names if f"### {name}\n" not in text]
    assert missing == ["__version__"]
    for param in dml.TorchEstimator().params:
        assert f"| `{param.name}` |" in text


def test_check_says_what_to_do(tmp_path: Path, maker: ModuleType) -> None:
    copy = tmp_path / "scripts" / SCRIPT.name
    copy.parent.mkdir()
    copy.write_text(SCRIPT.read_text())
    done = subprocess.run(
        [sys.executable, str(copy), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "docs/reference.md is not current: python" in done.stdout


def test_a_name_without_a_section_is_an_error(maker: ModuleType) -> None:
    with pytest.raises(SystemExit, match="Unknown has no section"):
        maker.section_of("Unknown")


def test_docstrings_become_lists(maker: ModuleType) -> None:
    doc = """One line.

    Args:
        first: goes on
            here: with a colon.
        second: short.

    Raises:
        A, B: sometimes.
    """
    assert maker.describe_doc(doc).splitlines() == [
        "One line.",
        "",
        "**Args**",
        "",
        "- `first`: goes on",
        "  here: with a colon.",
        "- `second`: short.",
        "",
        "**Raises**",
        "",
        "- `A, B`: sometimes.",
    ]
