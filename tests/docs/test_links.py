"""Every relative link and picture of the docs leads somewhere; every page is found in the index."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doc_pages import ROOT, Page, all_pages, anchor_of, read_page

PAGES = {page.name: page for page in all_pages()}


def dead_links(page: Page, root: Path = ROOT) -> list[str]:
    dead = []
    for link in page.links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (root / page.name).parent / path if path else root / page.name
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in read_page(target).anchors
        ):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_relative_links_lead_somewhere(page: Page) -> None:
    assert not dead_links(page)


def test_a_dead_link_and_a_dead_anchor_are_found() -> None:
    page = Page(
        "docs/x.md", (), "[a](no-such-page.md) [b](glossary.md#nothing) ![c](images/no.png)"
    )
    assert dead_links(page) == ["no-such-page.md", "glossary.md#nothing", "images/no.png"]


def test_anchors_are_githubs() -> None:
    assert anchor_of("What a checkpoint holds, `in short`") == "what-a-checkpoint-holds-in-short"


def test_the_index_names_every_page() -> None:
    index = PAGES["docs/README.md"]
    named = {(Path("docs") / link.partition("#")[0]).as_posix() for link in index.links}
    pages = {name for name in PAGES if Path(name).parent == Path("docs")} - {index.name}
    assert pages - named == set(), "pages that docs/README.md does not name"


def test_no_text_speaks_of_a_machine() -> None:
    """Paths of the machine on which something was written mean nothing to a reader."""
    found = [
        f"{name}: {word}"
        for name in PAGES
        for word in ("/work/", "/opt/", "/root/")
        if word in (ROOT / name).read_text()
    ]
    assert not found
