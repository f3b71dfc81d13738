"""Latent Dirichlet allocation by collapsed Gibbs sampling over word blocks.

A worker keeps its documents, with the topic of each of their words and each document's counts of
topics. The counts of topics per word are on the servers, cut into as many blocks of words as there
are workers. In each round every worker holds a different block, and samples the words of that block
in its documents. After as many rounds as there are workers, every word has been sampled once.
(Griffiths and Steyvers 2004, "Finding scientific topics"; Lee et al. 2014, STRADS.)

Counts by document and by word are exact, since they have one owner during a round. The total counts
of each topic are those at the start of the round plus the worker's own changes: they lack the other
workers' changes of the round. Words are sampled in batches of vector operations, in which no
document occurs twice. So a document's counts are exact for each of its words, while a word that
occurs several times in a batch is sampled as if its other occurrences kept their topics (as between
the processors of Newman et al. 2009, "Distributed algorithms for topic models").

Topics are evaluated by document completion: how well they predict one half of a document from the
other. A document's mixture is fitted to its shown words, with fixed topics, and evaluated on its
hidden words. (Wallach et al. 2009, "Evaluation methods for topic models".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.errors import DataError, ParameterError
from sparkdml.parameter_server.kvstore.store import KVStore
from sparkdml.parameter_server.kvstore.tables import MatrixTable, Rows
from sparkdml.programs.base import Program, deal, run_program
from sparkdml.programs.scheduling import (
    Floats,
    Ints,
    disjoint_batches,
    place_in_block,
    rotate,
    rows_of_block,
)

ONLY_ROW = np.zeros(1, dtype=np.int64)


def sample_batch(
    documents: Rows,
    words: Rows,
    topics: NDArray[np.float32],
    document: Ints,
    word: Ints,
    topic: Ints,
    alpha: float,
    beta: float,
    vocabulary_size: int,
    dice: np.random.Generator,
) -> Ints:
    """Return new topics for words of different documents, and update all three counts in place."""
    places = np.arange(len(topic))
    documents[document, topic] -= 1
    by_word, by_topic = words[word], np.repeat(topics[None], len(topic), axis=0)
    by_word[places, topic] -= 1  # each word without itself
    by_topic[places, topic] -= 1
    weights = (documents[document] + alpha) * (by_word + beta)
    new = draw(weights / (by_topic + beta * vocabulary_size), dice)
    documents[document, new] += 1
    np.add.at(words, (word, topic), -1)
    np.add.at(words, (word, new), 1)
    topics += np.bincount(new, minlength=len(topics)) - np.bincount(topic, minlength=len(topics))
    return new


def draw(weights: NDArray[np.floating], dice: np.random.Generator) -> Ints:
    """Draw an index for each row of weights, with probabilities in proportion to them."""
    sums = np.cumsum(weights, axis=1)
    marks = dice.random(len(weights)) * sums[:, -1]
    places: Ints = (sums < marks[:, None]).sum(axis=1).clip(max=weights.shape[1] - 1)
    return places


def empty(table: MatrixTable, rows: Ints) -> None:
    """Clear the counts of an earlier run in the same tables."""
    with table.hold(rows) as counts:
        counts[:] = 0


@dataclass(frozen=True)
class Topics:
    """The trained topics."""

    words: MatrixTable  # how often each word has each topic, in the last sweep
    sums: MatrixTable  # the same, summed over the rounds that are averaged
    documents: Ints  # the documents of this worker
    document_topics: Rows  # how often each of them has each topic
    num_sums: int  # the number of these rounds
    beta: float

    def topic_words(self, words_at_once: int = 65_536) -> NDArray[np.float64]:
        """Return each topic's distribution over all words (topics x words)."""
        sums = np.concatenate([rows for _, rows in self.sums.blocks(words_at_once)])
        return topic_words(sums / self.num_sums, self.beta)


def fit_lda(
    store: KVStore,
    comm: Communicator,
    document: Ints,
    word: Ints,
    vocabulary_size: int,
    num_topics: int,
    name: str = "lda",
    beta: float = 0.01,
    **options: Any,
) -> Topics:
    """Return the topics of all documents; every worker calls it with its own words.

    Args:
        store, comm: this worker's.
        document, word: the document's number and the word's number of each word, both from 0. The
            words of a document may be on several workers: they are first redistributed, so that
            each document is on one worker.
        vocabulary_size, num_topics: the number of distinct words and of topics.
        name: a prefix of the names of the tables.
        beta: the prior of a topic's words.
        options: those of `LDA`.
    """
    if num_topics < 1:
        raise ParameterError("num_topics", num_topics, "at least 1")
    if len(word) and not (word.min() >= 0 and word.max() < vocabulary_size):
        raise DataError(f"words must be from 0 to {vocabulary_size - 1}, as vocabulary_size says")
    if len(document) and document.min() < 0:
        raise DataError("documents must be numbered from 0")
    most = torch.tensor([document.max(initial=-1)], dtype=torch.int64)
    num_documents = int(comm.allreduce_(most, "max")) + 1
    if not num_documents:
        raise DataError("no worker has a word")
    document, word = deal(comm, document % comm.size, document, word)
    kept = rows_of_block(comm.rank, comm.size, num_documents)
    block = -(-vocabulary_size // comm.size)
    words, sums = (
        MatrixTable(
            store, f"{name}.{what}", num_rows=vocabulary_size, width=num_topics, max_rows_held=block
        )
        for what in ("words", "sums")
    )
    topics = MatrixTable(store, f"{name}.topics", 1, num_topics)
    program = LDA(
        words,
        sums,
        topics=topics,
        document=place_in_block(document, comm.size),
        word=word,
        num_documents=len(kept),
        worker=comm.rank,
        num_workers=comm.size,
        beta=beta,
        **options,
    )
    run_program(program, comm)
    words.max_rows_held = sums.max_rows_held = None  # training is over: a reader may need all rows
    num_sums = program.num_samples * comm.size  # a block is held by every worker in each sweep
    return Topics(
        words, sums, documents=kept, document_topics=program.documents, num_sums=num_sums, beta=beta
    )


class LDA(Program):
    """One worker's documents.

    Args:
        words: counts by word and topic: a row for each word, as wide as there are topics.
        sums: like `words`: the sum of its values after each round of the last sweeps.
        topics: counts by topic: one row.
        document, word: the document's number (from 0 on this worker) and the word's number of each
            word of this worker's documents.
        num_documents: the number of this worker's documents.
        worker, num_workers: the worker's number and the number of workers.
        sweeps: how often each word is sampled.
        num_samples: the number of last sweeps that are averaged; the counts of one sweep are a
            single draw, and noisier.
        alpha, beta: the priors of a document's topics and of a topic's words.
        seed: the random seed.
    """

    def __init__(
        self,
        words: MatrixTable,
        sums: MatrixTable,
        topics: MatrixTable,
        document: Ints,
        word: Ints,
        num_documents: int,
        worker: int,
        num_workers: int,
        sweeps: int = 100,
        num_samples: int = 20,
        alpha: float = 0.1,
        beta: float = 0.01,
        seed: int = 0,
    ) -> None:
        if sweeps < 1:
            raise ParameterError("sweeps", sweeps, "at least 1")
        if not 1 <= num_samples <= sweeps:
            raise ParameterError("num_samples", num_samples, f"from 1 to sweeps ({sweeps})")
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not value > 0:
                raise ParameterError(name, value, "more than 0")
        if topics.num_rows != 1 or topics.width != words.width:
            raise ParameterError(
                "topics", (topics.num_rows, topics.width), f"a table of 1 row of {words.width}"
            )
        self._words, self._sums, self._topics = words, sums, topics
        self.num_samples = num_samples
        self._worker, self._num_workers, self._sweeps = worker, num_workers, sweeps
        self._alpha, self._beta, self._seed = alpha, beta, seed
        self.documents = np.zeros((num_documents, words.width), dtype=np.float32)
        self._blocks = [
            _Block(document[inside], word[inside], num_workers)
            for inside in (word % num_workers == block for block in range(num_workers))
        ]

    def schedule(self, round: int, num_workers: int) -> list[Tensor] | None:
        sweep = round // num_workers  # the first one gives each word a topic to begin with
        if round == 0:
            empty(self._topics, ONLY_ROW)
        if sweep > self._sweeps:
            return None
        return [
            torch.tensor([rotate(worker, round, num_workers), sweep])
            for worker in range(num_workers)
        ]

    def push(self, work: Tensor) -> Tensor:
        index, sweep = work.tolist()
        dice = np.random.default_rng([self._seed, sweep, self._worker, index])
        rows = rows_of_block(index, self._num_workers, self._words.num_rows)
        if sweep == 0 and index == self._worker:  # the first worker to hold this block
            empty(self._words, rows)
            empty(self._sums, rows)
        before = self._topics.get(ONLY_ROW)[0]
        topics = before.copy()
        with self._words.hold(rows) as words:
            work_on = self._sample if sweep else self._begin
            work_on(self._blocks[index], words, topics, dice)
        if sweep > self._sweeps - self.num_samples:
            self._sums.add(rows, words)
        return torch.from_numpy((topics - before).astype(np.float64))

    def _begin(
        self, block: _Block, words: Rows, topics: NDArray[np.float32], dice: np.random.Generator
    ) -> None:
        """Give each word a random topic: sampling from the first counts would commit too early."""
        for place, (document, word) in enumerate(block.batches):
            topic = dice.integers(words.shape[1], size=len(word))
            self.documents[document, topic] += 1
            np.add.at(words, (word, topic), 1)
            topics += np.bincount(topic, minlength=len(topics))
            block.topics[place] = topic

    def _sample(
        self, block: _Block, words: Rows, topics: NDArray[np.float32], dice: np.random.Generator
    ) -> None:
        for place in dice.permutation(len(block.batches)):
            document, word = block.batches[place]
            block.topics[place] = sample_batch(
                self.documents,
                words,
                topics=topics,
                document=document,
                word=word,
                topic=block.topics[place],
                alpha=self._alpha,
                beta=self._beta,
                vocabulary_size=self._words.num_rows,
                dice=dice,
            )

    def pull(self, works: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Topic counts change only between rounds, so all workers start a round with the same."""
        change = np.sum([part.numpy() for part in parts], axis=0)
        self._topics.add(ONLY_ROW, change[None])


class _Block:
    """A worker's words of one block of the vocabulary, in batches of different documents."""

    def __init__(self, document: Ints, word: Ints, num_blocks: int) -> None:
        word = place_in_block(word, num_blocks)
        self.batches = [(document[batch], word[batch]) for batch in disjoint_batches(document)]
        self.topics: list[Ints] = [np.empty(0, dtype=np.int64)] * len(self.batches)


def topic_words(counts: NDArray[np.floating], beta: float) -> NDArray[np.float64]:
    """Each topic's distribution over words (topics x words), from counts (words x topics)."""
    smoothed: NDArray[np.float64] = counts.T.astype(np.float64) + beta
    smoothed /= smoothed.sum(axis=1, keepdims=True)
    return smoothed


def completion_perplexity(
    topics: Floats,
    shown: tuple[Ints, Ints],
    hidden: tuple[Ints, Ints],
    alpha: float = 0.1,
    iterations: int = 100,
) -> float:
    """Return the perplexity of hidden words; both halves are (document, word) of each word.

    `topics` has a row for each topic, a distribution over words.
    """
    mixtures = fit_mixtures(topics, shown, alpha, iterations)
    document, word = hidden
    likelihood = np.einsum("ik,ki->i", mixtures[document], topics[:, word])
    return float(np.exp(-np.log(likelihood).mean()))


def fit_mixtures(
    topics: Floats, shown: tuple[Ints, Ints], alpha: float, iterations: int
) -> NDArray[np.float64]:
    """Fit each document's mixture of topics by EM, with `alpha` pseudo-words per topic."""
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
    """Show every other word of each document, and hide the rest."""
    order = np.argsort(document, kind="stable")
    document, word = document[order], word[order]
    _, starts, counts = np.unique(document, return_index=True, return_counts=True)
    place = np.arange(len(document)) - np.repeat(starts, counts)
    shown = place % 2 == 0
    return (document[shown], word[shown]), (document[~shown], word[~shown])
