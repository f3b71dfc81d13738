"""The pages of the documentation, cut into fenced code blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[a-z]*)[ ]*$")
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)|<img[^>]+src=\"(?P<image>[^\"]+)\"")
SOURCE_SET = re.compile(r"srcset=\"(?P<target>[^\"]+)\"")
HEADING = re.compile(r"^#{1,6} (?P<title>.+)$")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of code, counted from 1."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A Markdown file, named by its path from the root of the repository."""

    name: str
    blocks: tuple[Block, ...]
    prose: str  # without the blocks

    @property
    def links(self) -> list[str]:
        found = [match["target"] or match["image"] for match in LINK.finditer(self.prose)]
        return found + [match["target"] for match in SOURCE_SET.finditer(self.prose)]

    @property
    def anchors(self) -> set[str]:
        titles = (HEADING.match(line) for line in self.prose.splitlines())
        return {anchor_of(match["title"]) for match in titles if match}


def anchor_of(title: str) -> str:
    """As GitHub makes them: lower case, punctuation dropped, spaces to hyphens."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def read_page(path: Path) -> Page:
    name = path.relative_to(ROOT).as_posix()
    blocks: list[Block] = []
    prose: list[str] = []
    fence, language, begin = "", "", 0
    code: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        opened = FENCE.match(line)
        if not fence and opened:
            fence, language, begin, code = opened["fence"], opened["language"], number + 1, []
        elif fence and line.strip() == fence:
            blocks.append(Block(name, begin, language, "\n".join(code) + "\n"))
            fence = ""
        elif fence:
            code.append(line)
        else:
            prose.append(line)
    if fence:
        raise ValueError(f"{name}:{begin - 1}: a code block that never ends")
    return Page(name, tuple(blocks), "\n".join(prose))


def all_pages() -> list[Page]:
    """README.md, everything under docs/, and what else a reader is sent to."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    paths += sorted((ROOT / "docs").rglob("*.md"))
    paths += [ROOT / "examples" / "README.md", ROOT / "jars" / "README.md"]
    return [read_page(path) for path in paths]
