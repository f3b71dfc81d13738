"""What is Shakespeare about? Topics by LDA over word blocks: `python examples/topics.py`.

`--data`, or SPARKDML_DATA, names a folder that has `tinyshakespeare/input.txt`. Without it, pages
are made up from three hidden subjects. Documents stay on their workers, and counts by word are on
the servers. In each round every worker holds a different block of words: no worker ever holds all
of them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame, SparkSession

import sparkdml as dml
from sparkdml.programs.base import read_columns
from sparkdml.programs.lda import fit_lda

SUBJECTS = (
    "sail ship wind wave harbour captain anchor storm deck rope island crew",
    "crown king throne court sword battle knight castle banner siege duke war",
    "garden rose spring leaf bee orchard seed rain apple soil bloom meadow",
)


def read_text(path: Path) -> list[list[str]]:
    """Return pages of 200 words."""
    words = re.findall(r"[a-z]+", path.read_text().lower())
    return [words[start : start + 200] for start in range(0, len(words), 200)]


def make_up_pages(num_pages: int = 120) -> list[list[str]]:
    """Each mostly about one subject."""
    dice = np.random.default_rng(7)
    subjects = [subject.split() for subject in SUBJECTS]
    mixtures = dice.dirichlet([0.1] * len(subjects), num_pages)
    return [
        [str(dice.choice(subjects[dice.choice(len(subjects), p=mixture)])) for _ in range(40)]
        for mixture in mixtures
    ]


def number_words(
    spark: SparkSession, pages: list[list[str]], rarest: int, most_common: int
) -> tuple[DataFrame, list[str]]:
    """Return (document, word) of every word, and the vocabulary without rare or common words."""
    counts = Counter(word for page in pages for word in page).most_common()
    vocabulary = [word for word, count in counts if count >= rarest][most_common:]
    number = {word: place for place, word in enumerate(vocabulary)}
    rows = [(d, number[word]) for d, page in enumerate(pages) for word in page if word in number]
    return spark.createDataFrame(pd.DataFrame(rows, columns=["document", "word"])), vocabulary


def find_topics(
    words: DataFrame, vocabulary: list[str], num_topics: int, sweeps: int, num_workers: int = 2
) -> np.ndarray[Any, Any]:
    """Each topic's distribution over words."""
    vocabulary_size = len(vocabulary)

    def work(ctx: dml.Context, store: dml.KVStore) -> np.ndarray[Any, Any] | None:
        document, word = read_columns(ctx, "document", "word")
        topics = fit_lda(
            store, ctx.comm, document, word, vocabulary_size, num_topics, sweeps=sweeps
        )
        return topics.topic_words() if ctx.rank == 0 else None

    found: np.ndarray[Any, Any] = dml.run(
        dml.WithStore(work), data=words, num_workers=num_workers, seed=7
    )[0]
    return found


def describe(topics: np.ndarray[Any, Any], vocabulary: list[str], num_words: int) -> list[str]:
    best = np.argsort(-topics, axis=1)[:, :num_words]
    return [" ".join(vocabulary[word] for word in words) for words in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPARKDML_DATA"))
    parser.add_argument("--sweeps", type=int, default=100)
    options = parser.parse_args()
    spark = dml.session_builder("topics").getOrCreate()
    if options.data is not None:
        pages = read_text(Path(options.data) / "tinyshakespeare" / "input.txt")
        words, vocabulary = number_words(spark, pages, rarest=5, most_common=100)
        num_topics = 10
    else:
        words, vocabulary = number_words(spark, make_up_pages(), rarest=1, most_common=0)
        num_topics = len(SUBJECTS)
    topics = find_topics(words, vocabulary, num_topics, options.sweeps)
    for number, text in enumerate(describe(topics, vocabulary, 10), 1):
        print(f"topic {number}: {text}")
    spark.stop()


if __name__ == "__main__":
    main()
