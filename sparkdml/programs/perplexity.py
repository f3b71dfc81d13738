"""Document completion: how well topics foretell the second half of a document from its first.

The topics may come from anywhere. A document's mixture is fitted to the words that are shown, the
topics staying as they are, and judged by the words that are not. (Wallach et al. 2009, "Evaluation
methods for topic models".)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkdml.programs.scheduling import Floats, Ints


def completion_perplexity(
    topics: Floats,
    shown: tuple[Ints, Ints],
    hidden: tuple[Ints, Ints],
    alpha: float = 0.1,
    iterations: int = 100,
) -> float:
    """The perplexity of hidden words; both halves are (document, word) of each word.

    `topics` has a row for each topic, a distribution over words.
    """
    mixtures = fit_mixtures(topics, shown, alpha, iterations)
    document, word = hidden
    likelihood = np.einsum("ik,ki->i", mixtures[document], topics[:, word])
    return float(np.exp(-np.log(likelihood).mean()))


def fit_mixtures(
    topics: Floats, shown: tuple[Ints, Ints], alpha: float, iterations: int
) -> NDArray[np.float64]:
    """Each document's mixture of topics, by expectation maximisation with `alpha` words a topic."""
    document, word = shown
    num_documents = int(document.max(initial=-1)) + 1
    of_words = topics[:, word].T
    order = np.argsort(document, kind="stable")
    document, of_words = document[order], of_words[order]
    with_words, starts = np.unique(document, return_index=True)
    mixtures = np.full((num_documents, len(topics)), 1.0 / len(topics))
    for _ in range(iterations):
        shares = mixtures[document] * of_words
        shares /= shares.sum(axis=1, keepdims=True)
        counts = np.full_like(mixtures, alpha)
        counts[with_words] += np.add.reduceat(shares, starts, axis=0)
        mixtures = counts / counts.sum(axis=1, keepdims=True)
    return mixtures


def split_documents(document: Ints, word: Ints) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Every other word of each document is shown, and the rest hidden."""
    order = np.argsort(document, kind="stable")
    document, word = document[order], word[order]
    _, starts, counts = np.unique(document, return_index=True, return_counts=True)
    place = np.arange(len(document)) - np.repeat(starts, counts)
    shown = place % 2 == 0
    return (document[shown], word[shown]), (document[~shown], word[~shown])
