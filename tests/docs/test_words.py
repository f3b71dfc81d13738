"""The words: each has one meaning in the glossary, and retired ones are gone from code and docs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"

# Each had another name in the field, or is no noun: see the glossary for what to say instead.
RETIRED = (
    "anew",
    "anybody",
    "cargo",
    "consign",
    "courier",
    "depot",
    "desk",
    "everybody",
    "for ever",
    "gone on with",
    "meetings?",
    "nobody",
    "onlookers?",
    "parcel",
    "reception",
    "seats?",
    "sieve",
    "somebody",
    "whoever",
    "without a word",
)
# Where one of them is part of a format that stays.
KEPT = {
    "docs/reference-events.md": "seat",  # a field of the event "server"
    "sparkdml/observe/events.py": "seat",
    "sparkdml/parameter_server/server_task.py": "seat",
}
PAGES = sorted(
    path
    for pattern in ("sparkdml/**/*.py", "examples/**/*.py", "docs/**/*.md", "README.md")
    for path in ROOT.glob(pattern)
)


def words_of_the_glossary() -> list[str]:
    rows = re.findall(r"^\| \*\*(.+?)\*\*", GLOSSARY.read_text(), flags=re.MULTILINE)
    return [word.strip().lower() for row in rows for word in row.split(",")]


def test_the_glossary_has_each_word_once():
    counts = Counter(words_of_the_glossary())
    assert not [word for word, count in counts.items() if count > 1]


@pytest.mark.parametrize(
    "word", ["plan", "number", "peer", "wire", "control server", "dispatcher", "residual", "blob"]
)
def test_the_glossary_has_the_words_that_are_used_most(word):
    assert word in words_of_the_glossary()


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_gone(word):
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for match in pattern.finditer(line):
                if match[0] != KEPT.get(name):
                    found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
