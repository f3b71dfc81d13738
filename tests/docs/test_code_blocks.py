"""Every code block of the docs is run: Python in the shared session, shell through `bash -n`.

The blocks of a page share a namespace, in which its set-up (page_setups.py) has put what the page
takes for granted. They run in a folder of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doc_pages import Block, Page, all_pages, read_page
from page_setups import FOLDER, NOT_RUN, PLACES, SETUPS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LANGUAGES = {"python", "bash", "sh", "console", "text", "json", "html", ""}
PAGES = {page.name: page for page in all_pages()}


def with_language(*languages: str) -> list[Block]:
    return [
        block for page in PAGES.values() for block in page.blocks if block.language in languages
    ]


def runnable(page: Page) -> list[Block]:
    skipped = {first_line for name, first_line, _ in NOT_RUN if name == page.name}
    return [b for b in page.blocks if b.language == "python" and first_line(b) not in skipped]


def first_line(block: Block) -> str:
    return block.text.splitlines()[0]


def run_blocks(blocks: list[Block], namespace: dict[str, Any], folder: Path) -> None:
    for block in blocks:
        code = block.text
        for place, local in PLACES.items():
            code = code.replace(place, local.format(folder=folder))
        # Blank lines before the code, so that a traceback names the line of the page.
        exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), namespace)


@pytest.mark.spark
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if runnable(page)])
def test_the_python_of_a_page_runs(
    name: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # Not the name of a module: functions then travel to the workers by value, as a script's do.
    namespace: dict[str, Any] = {"__name__": "a_page", "spark": spark}
    if name in SETUPS:
        setup = FOLDER / SETUPS[name]
        exec(compile(setup.read_text(), str(setup), "exec"), namespace)
    run_blocks(runnable(PAGES[name]), namespace, tmp_path)


def test_set_ups_belong_to_pages_with_code() -> None:
    assert {name for name in SETUPS if not runnable(PAGES[name])} == set()
    assert set(SETUPS.values()) == {path.name for path in FOLDER.glob("*.py")}


def test_what_is_not_run_is_listed_with_its_reason() -> None:
    """A deliberate list: one more needs a reason, and this number."""
    listed = {(name, line) for name, line, _ in NOT_RUN}
    there = {(block.page, first_line(block)) for block in with_language("python")}
    assert listed <= there, "NOT_RUN names blocks that are not there"
    assert all(len(reason) > 20 for _, _, reason in NOT_RUN)
    assert len(NOT_RUN) == 0


@pytest.mark.parametrize("block", with_language("bash", "sh"), ids=lambda block: block.place)
def test_the_shell_parses(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{block.place}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_blocks_say_what_they_are(page: Page) -> None:
    """Python must not hide in a block that is never run."""
    for block in page.blocks:
        assert block.language in LANGUAGES, f"{block.place}: {block.language}"
        if block.language in ("", "text", "console"):
            lines = block.text.splitlines()
            assert "import sparkdml as dml" not in lines, f"{block.place} looks like Python"


def test_a_broken_block_is_reported_with_its_line(tmp_path: Path) -> None:
    block = Block("docs/x.md", 17, "python", "fine = 1\nraise KeyError('here')\n")
    with pytest.raises(KeyError) as caught:
        run_blocks([block], {}, tmp_path)
    last = caught.traceback[-1]
    assert (str(last.path).endswith("docs/x.md"), last.lineno + 1) == (True, 18)


def test_an_unfinished_block_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doc_pages.ROOT", tmp_path)
    page = tmp_path / "x.md"
    page.write_text("```python\n1\n")
    with pytest.raises(ValueError, match=r"x\.md:1: a code block that never ends"):
        read_page(page)


@pytest.mark.parametrize("block", with_language("json"), ids=lambda block: block.place)
def test_json_is_json(block: Block) -> None:
    """Up to the ellipses that stand for more of the same."""
    if "…" not in block.text:
        json.loads(block.text)
