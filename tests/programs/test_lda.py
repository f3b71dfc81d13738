"""LDA over word blocks, beside scikit-learn's."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import LatentDirichletAllocation

from sparkdml.errors import DataError, ParameterError
from sparkdml.programs.lda import (
    completion_perplexity,
    fit_lda,
    fit_mixtures,
    sample_batch,
    split_documents,
    topic_words,
)
from sparkdml.testing.server_cluster import run_workers

TOPICS, WORDS = 10, 120


def make_corpus(num_documents, seed=0, length=40):
    """Documents of hidden topics: (document, word) of each word, and the topics."""
    dice = np.random.default_rng(7)
    topics = dice.dirichlet(np.full(WORDS, 0.2), TOPICS)
    dice = np.random.default_rng(seed)
    mixtures = dice.dirichlet(np.full(TOPICS, 0.2), num_documents)
    words = [dice.choice(WORDS, length, p=mixture @ topics) for mixture in mixtures]
    return np.repeat(np.arange(num_documents), length), np.concatenate(words), topics


def fit(num_workers, document, word, **options):
    def work(comm, store):
        own = np.arange(len(word)) % num_workers == comm.rank  # documents are torn apart
        found = fit_lda(store, comm, document[own], word[own], WORDS, TOPICS, beta=0.05, **options)
        most_held = found.words.most_rows_held
        comm.barrier()
        by_word = found.words.get(np.arange(WORDS))
        return found.topic_words(), most_held, found.document_topics, by_word, found.documents

    return run_workers(num_workers, work)


@pytest.mark.slow
def test_its_topics_foretell_as_well_as_scikit_learns():
    document, word, true = make_corpus(120)
    shown, hidden = split_documents(*make_corpus(60, seed=1)[:2])
    ours = fit(2, document, word, sweeps=100, num_samples=30, alpha=0.2)[0][0]
    counts = np.zeros((120, WORDS))
    np.add.at(counts, (document, word), 1)
    reference = LatentDirichletAllocation(
        TOPICS, doc_topic_prior=0.2, topic_word_prior=0.05, max_iter=15, random_state=0
    ).fit(counts)
    theirs = reference.components_ / reference.components_.sum(axis=1, keepdims=True)
    found, expected, best = (
        completion_perplexity(topics, shown, hidden, alpha=0.2) for topics in (ours, theirs, true)
    )
    assert found < 1.05 * expected
    assert best < found < 0.9 * WORDS


TEXT = Path(os.environ.get("SPARKDML_DATA", "nowhere"), "tinyshakespeare", "input.txt")


@pytest.mark.slow
@pytest.mark.skipif(not TEXT.is_file(), reason="SPARKDML_DATA has no tinyshakespeare/")
def test_shakespeares_topics_foretell_as_well_as_scikit_learns():
    words = re.findall(r"[a-z]+", TEXT.read_text().lower())
    known = [word for word, count in Counter(words).most_common() if count >= 5][60:]
    number = {word: place for place, word in enumerate(known)}
    at = np.array([place for place, word in enumerate(words) if word in number])
    document, word = at // 200, np.array([number[words[place]] for place in at])
    judged = document % 5 == 0
    shown, hidden = split_documents(document[judged] // 5, word[judged])
    document, word = document[~judged], word[~judged]

    def work(comm, store):
        own = np.arange(len(word)) % 2 == comm.rank
        found = fit_lda(store, comm, document[own], word[own], len(known), 10, beta=0.05, sweeps=60)
        comm.barrier()
        return found.topic_words()

    ours = run_workers(2, work)[0]
    counts = np.zeros((document.max() + 1, len(known)))
    np.add.at(counts, (document, word), 1)
    reference = LatentDirichletAllocation(
        10, doc_topic_prior=0.1, topic_word_prior=0.05, max_iter=20, random_state=0
    ).fit(counts[counts.any(axis=1)])
    theirs = reference.components_ / reference.components_.sum(axis=1, keepdims=True)
    found, expected = (completion_perplexity(topics, shown, hidden) for topics in (ours, theirs))
    print(f"perplexity {found:.1f}, scikit-learn's {expected:.1f}")
    assert found < 1.05 * expected


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_word_is_counted_once_and_no_worker_holds_all_words(num_workers):
    document, word, _ = make_corpus(20)
    for _, most_held, _, counts, _ in (
        results := fit(num_workers, document, word, sweeps=2, num_samples=2)
    ):
        assert most_held == WORDS // num_workers
        np.testing.assert_array_equal(counts.sum(axis=1), np.bincount(word, minlength=WORDS))
        assert (counts >= 0).all()
    by_topic = sum(documents.sum(axis=0) for _, _, documents, _, _ in results)
    np.testing.assert_array_equal(by_topic, results[0][3].sum(axis=0))
    assert all((documents.sum(axis=1) == 40).all() for _, _, documents, _, _ in results)
    assert sorted(np.concatenate([kept for *_, kept in results])) == list(range(20))


def test_a_second_run_in_the_same_tables_starts_over():
    document, word, _ = make_corpus(10)

    def work(comm, store):
        own = document % 2 == comm.rank
        for _ in range(2):
            found = fit_lda(
                store, comm, document[own], word[own], WORDS, TOPICS, sweeps=2, num_samples=2
            )
            comm.barrier()
        sums = found.sums.get(np.arange(WORDS)).sum()
        return found.words.get(np.arange(WORDS)).sum(), sums / found.num_sums

    assert run_workers(2, work) == [(400.0, 400.0)] * 2


def test_a_worker_without_documents_takes_its_turns():
    document, word, _ = make_corpus(1)
    results = fit(2, document, word, sweeps=1, num_samples=1)
    assert results[1][2].shape == (0, TOPICS)
    assert results[0][3].sum() == 40


def test_a_draw_follows_the_conditional_distribution():
    """One word of a document of its own: the textbook's formula, against many draws."""
    alpha, beta = 0.3, 0.1
    document, words = np.array([2.0, 1.0, 0.0]), np.array([[1.0, 4.0, 0.0], [3.0, 0.0, 2.0]])
    topics = words.sum(axis=0)
    dice, drawn = np.random.default_rng(0), np.zeros(3)
    expected = np.array([1 + alpha, 1 + alpha, alpha])  # without the word itself, of topic 0
    expected *= np.array([0 + beta, 4 + beta, beta]) / (topics - [1, 0, 0] + 2 * beta)
    size = 6_000
    documents = np.tile(document, (size, 1)).astype(np.float32)
    at = np.zeros(size, dtype=np.int64)
    big = words.astype(np.float32)
    new = sample_batch(
        documents, big, topics.astype("f4"), np.arange(size), at, at, alpha, beta, 2, dice
    )
    drawn = np.bincount(new, minlength=3) / size
    np.testing.assert_allclose(drawn, expected / expected.sum(), atol=0.03)
    assert (documents.sum(axis=1) == 3).all()
    assert big.sum() == words.sum()


def test_mixtures_of_clear_topics_are_found():
    topics = np.array([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]) + 1e-9
    shown = np.array([0, 0, 0, 0, 2]), np.array([0, 1, 0, 2, 3])
    mixtures = fit_mixtures(topics, shown, alpha=1e-6, iterations=20)
    np.testing.assert_allclose(mixtures, [[0.75, 0.25], [0.5, 0.5], [0, 1]], atol=1e-4)


def test_halves_of_documents():
    document, word = np.array([1, 0, 1, 1, 0]), np.array([10, 11, 12, 13, 14])
    shown, hidden = split_documents(document, word)
    assert [shown[1].tolist(), hidden[1].tolist()] == [[11, 10, 13], [14, 12]]
    assert [shown[0].tolist(), hidden[0].tolist()] == [[0, 1, 1], [0, 1]]


def test_the_perplexity_of_knowing_nothing_is_the_vocabulary():
    shown = hidden = np.array([0, 0, 1]), np.array([3, 1, 2])
    assert completion_perplexity(np.full((2, 8), 1 / 8), shown, hidden) == pytest.approx(8)


def test_topics_are_distributions():
    found = topic_words(np.array([[3.0, 0.0], [1.0, 0.0]]), beta=1.0)
    np.testing.assert_allclose(found, [[4 / 6, 2 / 6], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sweeps": 0}, "sweeps"),
        ({"num_samples": 200}, "num_samples"),
        ({"alpha": 0}, "alpha"),
        ({"beta": 0}, "beta"),
    ],
)
def test_bad_arguments(options, word):
    def work(comm, store):
        fit_lda(store, comm, np.arange(3), np.arange(3), 5, 2, **options)

    with pytest.raises(ParameterError, match=word):
        run_workers(1, work)


def test_bad_words():
    at = np.zeros(1, dtype=np.int64)
    with pytest.raises(DataError, match="words must be from 0 to 4"):
        run_workers(1, lambda comm, store: fit_lda(store, comm, at, at + 5, 5, 2))
    with pytest.raises(DataError, match="numbered from 0"):
        run_workers(1, lambda comm, store: fit_lda(store, comm, at - 1, at, 5, 2))
    with pytest.raises(DataError, match="no worker has a word"):
        run_workers(1, lambda comm, store: fit_lda(store, comm, at[:0], at[:0], 5, 2))
