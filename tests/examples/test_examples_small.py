"""What the examples do, in small, in the shared session. As scripts they are run by slow tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loading import load_example

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_mnist(spark: SparkSession) -> None:
    example = load_example("mnist.py")
    train, test = example.blow_up_digits(spark)
    fitted = example.train(train.limit(640), epochs=8)  # 40 steps
    assert fitted.evaluate(test.limit(200))["accuracy"] > 0.6


def test_mnist_reads_idx_files(spark: SparkSession, tmp_path: Path) -> None:
    import gzip

    example = load_example("mnist.py")
    images, labels = bytes(range(4)) * 196 * 3, bytes([7, 1, 9])
    for name, header, content in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
        with gzip.open(tmp_path / f"train-{name}-ubyte.gz", "wb") as file:
            file.write(bytes(header) + content)
    rows = example.read_mnist(spark, tmp_path, "train").collect()
    assert [row.label for row in rows] == [7, 1, 9]
    assert rows[2].features[:4] == pytest.approx([0, 1 / 255, 2 / 255, 3 / 255])


def test_movielens(spark: SparkSession) -> None:
    example = load_example("movielens.py")
    ratings = example.make_up_ratings(spark, 6_000).cache()
    fitted = example.train(ratings, epochs=4)
    variance = ratings.selectExpr("var_pop(rating)").first()[0]
    assert min(fitted.history.val_loss) < 0.95 * variance
    assert fitted.module.users.weight.shape == (300, 16)


def test_movielens_reads_the_file_with_its_header(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text(
        "user_id\titem_id\trating\ttime\n196\t242\t3\t88\n1\t2\t5\t9\n"
    )
    rows = load_example("movielens.py").read_movielens(spark, tmp_path)
    assert [tuple(row) for row in rows.collect()] == [(196, 242, 3.0), (1, 2, 5.0)]
    assert rows.dtypes == [("user", "bigint"), ("item", "bigint"), ("rating", "float")]


def test_shakespeare(spark: SparkSession) -> None:
    import sparkdml as dml

    example = load_example("shakespeare.py")
    losses = []

    def note(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "log":
            losses.append(event["values"]["loss"])

    results = dml.run(
        lambda ctx: example.train(ctx, epochs=4, batch_size=8),
        data=example.read_pieces(spark, None),
        num_workers=2,
        on_event=note,
    )
    assert losses[-1] < 0.8 * losses[0]
    model = example.CharacterModel()
    model.load_state_dict(results[0])
    assert results[1] == {}
    assert example.write(model, "The ", 10).startswith("The ")


def test_shakespeare_cuts_overlapping_pieces() -> None:
    example = load_example("shakespeare.py")
    pieces = example.cut("".join(chr(97 + i % 26) for i in range(200)))
    assert [len(piece) for piece in pieces] == [65, 65, 65]
    assert pieces[0][-1] == pieces[1][0]


@pytest.mark.slow
def test_pipeline(spark: SparkSession) -> None:
    example = load_example("pipeline.py")
    chosen = example.choose(example.make_rows(spark, 360).cache())
    slow, fast = chosen.avgMetrics
    assert fast > slow
    assert fast > 0.8
    assert chosen.bestModel.stages[-1].history


def test_autoencoder(spark: SparkSession) -> None:
    example = load_example("autoencoder.py")
    readings = example.make_readings(spark, 2_000).cache()
    fitted = example.train(readings, epochs=12)
    found = example.find_anomalies(fitted, readings).collect()
    broken = readings.where("broken").count()
    assert len(found) == pytest.approx(0.02 * 2_000, abs=3)
    assert sum(row.broken for row in found) > 0.5 * broken


def test_compare_strategies(spark: SparkSession) -> None:
    import sparkdml as dml

    example = load_example("compare_strategies.py")
    train, test = example.read_digits(spark)
    chosen = {name: example.STRATEGIES[name] for name in ("local, 8 steps", "L-BFGS")}
    found = dml.compare(example.make_estimator(epochs=4), train, chosen, on=test, single=False)
    assert [one.name for one in found] == list(chosen)
    assert all(one.metrics["accuracy"] > 0.5 for one in found)


def test_streaming(spark: SparkSession, tmp_path: Path) -> None:
    found = load_example("streaming.py").run(spark, tmp_path)
    assert found["before"] > 0.85
    assert found["changed"] < 0.2
    assert found["learnt"] > 0.7


def test_topics(spark: SparkSession) -> None:
    example = load_example("topics.py")
    words, vocabulary = example.number_words(spark, example.make_up_pages(60), 1, 0)
    topics = example.find_topics(words, vocabulary, num_topics=3, sweeps=30)
    subjects = [set(subject.split()) for subject in example.SUBJECTS]
    found = [set(text.split()) for text in example.describe(topics, vocabulary, 6)]
    # The six words that a topic has most of are of one subject, another one for each topic.
    assert all(sum(topic <= subject for topic in found) == 1 for subject in subjects)


def test_topics_reads_pages_of_a_text(spark: SparkSession, tmp_path: Path) -> None:
    example = load_example("topics.py")
    (tmp_path / "input.txt").write_text("The King! the king, " * 60 + "once")
    pages = example.read_text(tmp_path / "input.txt")
    assert [len(page) for page in pages] == [200, 41]
    rows, vocabulary = example.number_words(spark, pages, rarest=2, most_common=1)
    assert vocabulary in (["king"], ["the"])
    assert rows.count() == 120
