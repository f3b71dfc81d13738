"""Any data, on a real session: preprocess, collate, sampling, splits, bad rows before a step."""

import io
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from PIL import Image
from pyspark.sql import functions as F
from torch import nn

import sparkdml as dml
from sparkdml.testing.faults import FaultAt


def make_estimator(**changes):
    settings = {
        "model": partial(nn.Linear, 2, 2),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "batchSize": 16,
        "numWorkers": 2,
        "strategy": dml.AllReduce(backend="torch"),
        "seed": 3,
        "verbose": 0,
    }
    return dml.TorchEstimator(**{**settings, **changes})


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module.parameters()])


@pytest.fixture(scope="module")
def rows(spark):
    return spark.range(120).selectExpr(
        "id",
        "array(float(id % 7), float(id % 5)) as features",
        "id % 2 as label",
        "if(id % 4 = 0, 3.0D, 1.0D) as often",
        "if(id % 10 = 0, 'rare', 'common') as kind",
        "string(id) as text",
    )


# -- preprocess ---------------------------------------------------------------------------------


def png(value):
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def decode(batch):
    pixels = [np.asarray(Image.open(io.BytesIO(data))) for data in batch["image"].to_pylist()]
    return {"features": np.stack(pixels).reshape(-1, 16) / 255}


def test_images_are_decoded_on_the_workers(spark):
    images = spark.createDataFrame(
        [(png(200 if i % 2 else 20), i % 2) for i in range(60)], "image binary, label long"
    )
    estimator = make_estimator(
        model=partial(nn.Linear, 16, 2),
        preprocess=decode,
        inputCols=["image"],
        epochs=6,
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float()},
    )
    fitted = estimator.fit(images)
    assert [row["rows"] for row in fitted.history] == [60] * 6
    assert fitted.history[-1]["accuracy"] == 1.0
    # The same code prepares the rows for transform and evaluate.
    assert fitted.transform(images).filter("prediction = label").count() == 60
    assert fitted.evaluate(images)["accuracy"] == 1.0


def from_text(batch):
    numbers = np.array([int(text) for text in batch["text"].to_pylist()])
    features = np.stack([numbers % 7, numbers % 5], axis=1).astype(np.float32)
    return {"features": features, "label": numbers % 2}


def test_preprocess_gives_the_model_that_spark_would_have(rows):
    """The same numbers, once from Spark and once made from a string on the worker."""
    plain = make_estimator(epochs=2, numWorkers=1, batchSize=120).fit(rows)
    made = make_estimator(
        epochs=2, numWorkers=1, batchSize=120, preprocess=from_text, inputCols=["text"]
    ).fit(rows.select("text"))
    torch.testing.assert_close(weights(plain), weights(made))


def test_preprocess_is_given_the_named_columns_if_no_others_are_asked_for(rows):
    def double(batch):
        assert batch.schema.names == ["features", "label"]
        return {"features": np.stack(batch["features"].to_numpy(zero_copy_only=False)) * 2}

    doubled = make_estimator(preprocess=double).fit(rows)
    expected = make_estimator(batchSize=16).fit(
        rows.withColumn("features", F.transform("features", lambda x: x * 2))
    )
    assert doubled.history[0]["rows"] == expected.history[0]["rows"] == 120


def test_the_same_bits_however_the_rows_are_partitioned(rows):
    def fit(data):
        return weights(
            make_estimator(
                preprocess=from_text, inputCols=["text"], samplingCol="often", augment=jitter
            ).fit(data)
        )

    assert torch.equal(fit(rows), fit(rows.repartition(5)))


def jitter(batch):
    return {"features": batch["features"] + 0.1 * torch.randn(batch["features"].shape)}


# -- sequences ----------------------------------------------------------------------------------


class BagOfWords(nn.Module):
    """Counts on the lengths being right: padding is masked by them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens, lengths):
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        return self.head((self.embedding(tokens) * mask[..., None]).sum(1))


def sequences(spark, count=80):
    return spark.range(count).selectExpr(
        "transform(sequence(0, int(id % 6)), i -> int(i * 7 + id) % 50) as tokens",
        "int(id % 6 > 2) as label",
    )


def test_rows_of_different_lengths(spark):
    data = sequences(spark)
    estimator = make_estimator(
        model=BagOfWords,
        featuresCol=["tokens", "tokens_length"],
        collate=dml.pad(),
        optimizer=partial(torch.optim.Adam, lr=0.1),
        epochs=15,
        validation=0.2,
    )
    fitted = estimator.fit(data)
    assert fitted.history[-1]["loss"] < 0.5 * fitted.history[0]["loss"]
    assert fitted.transform(data).count() == 80
    assert "loss" in fitted.evaluate(data)


def test_padding_to_a_fixed_length_equals_padding_to_the_longest(spark):
    data = sequences(spark)

    def fit(collate):
        features = ["tokens", "tokens_length"]
        return weights(
            make_estimator(model=BagOfWords, featuresCol=features, collate=collate).fit(data)
        )

    def fixed(columns):
        tokens = columns["tokens"]
        return {"tokens": tokens.pad(9, 20), "tokens_length": tokens.lengths}

    torch.testing.assert_close(fit(dml.pad()), fit(fixed))


# -- ids that no float32 holds ------------------------------------------------------------------

FIRST_ID = 2**24  # from here on float32 knows only even numbers


class SmallTable(nn.Module):
    """An embedding of ids that lie close together, but far from 0."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 1)

    def forward(self, ids):
        assert ids.dtype == torch.int64
        return self.table(ids - FIRST_ID).reshape(len(ids), -1).sum(dim=1)


class LargeTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(FIRST_ID + 4, 1)

    def forward(self, ids):
        return self.table(ids).squeeze(-1)


def id_rows(spark, ids):
    """Neighbours have different labels: a model that rounds the ids can't learn them."""
    label = "float(array(-2, 5, 1, -4)[int(id % 4)]) as label"
    return spark.range(64).selectExpr(ids, label)


def fit_ids(data, **changes):
    estimator = make_estimator(
        **{
            "model": SmallTable,
            "loss": nn.MSELoss(),
            "optimizer": partial(torch.optim.Adam, lr=0.5),
            "featuresCol": "ids",
            "epochs": 60,
            **changes,
        }
    )
    fitted = estimator.fit(data)
    assert fitted.history[-1]["loss"] < 0.01
    return fitted


def test_an_embedding_of_ids_past_2_to_the_24(spark):
    data = id_rows(spark, f"id % 4 + {FIRST_ID} as ids")
    fitted = fit_ids(data)
    wrong = fitted.transform(data).filter("abs(prediction - label) > 0.5")
    assert wrong.count() == 0


def test_ids_past_2_to_the_24_in_lists_and_out_of_strings(spark):
    lists = id_rows(spark, f"array(id % 4 + {FIRST_ID}) as ids")
    fit_ids(lists, collate=dml.pad(FIRST_ID))
    strings = id_rows(spark, f"string(id % 4 + {FIRST_ID}) as name")
    fit_ids(
        strings,
        inputCols=["name"],
        preprocess=lambda rows: {"ids": pc.cast(rows["name"], pa.int64())},
    )


@pytest.mark.slow
def test_a_table_with_more_than_2_to_the_24_rows(spark):
    data = id_rows(spark, f"id % 4 + {FIRST_ID} as ids")
    fitted = fit_ids(
        data,
        model=LargeTable,
        numWorkers=1,
        epochs=10,
        optimizer=partial(torch.optim.SGD, lr=2.0),
        loss=nn.MSELoss(),
    )
    learned = fitted.module.table.weight[FIRST_ID:].flatten()
    torch.testing.assert_close(learned, torch.tensor([-2.0, 5, 1, -4]), atol=0.5, rtol=0)


# -- sampling, splits, the last batch -----------------------------------------------------------


def target(outputs, targets):
    return targets


def make_regressor(**changes):
    return make_estimator(
        model=partial(nn.Linear, 2, 1), loss=nn.MSELoss(), metrics={"target": target}, **changes
    )


def test_sampling_draws_in_proportion(rows):
    history = make_regressor(samplingCol="often", labelCol="often", epochs=8).fit(rows).history
    # 30 rows of weight 3 are drawn twice each, 90 rows of weight 1 two times out of three.
    drawn = sum(row["rows"] for row in history)
    assert abs(drawn - 8 * 120) < 80  # 6 standard deviations
    heavy = sum(row["rows"] * (row["target"] - 1) / 2 for row in history)
    assert heavy == pytest.approx(8 * 60)


def test_a_stratified_split_is_exact(rows):
    data = rows.withColumn("is_rare", (F.col("kind") == "rare").cast("double"))
    (row,) = (
        make_regressor(labelCol="is_rare", validation=0.25, stratifyCol="kind").fit(data).history
    )
    # Of 12 rare rows 3 are held out, of 108 others 27.
    assert row["rows"] == 90
    assert row["target"] * 90 == pytest.approx(9)
    assert row["val_target"] * 30 == pytest.approx(3)


def test_the_last_batch_can_be_dropped(rows):
    (row,) = make_estimator(dropLast=True, numWorkers=1, batchSize=50).fit(rows).history
    assert (row["rows"], row["steps"]) == (100, 2)
    with pytest.raises(
        dml.DataError, match="dropLast=True leaves no batch at all: no worker has 1"
    ):
        make_estimator(dropLast=True, batchSize=100).fit(rows)


@pytest.mark.filterwarnings("ignore:.*Resuming from step.*")
@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 9])
def test_a_run_that_fails_resumes_to_the_same_bits(rows, tmp_path, step):
    """With everything in it whose order depends on positions and draws; in epochs 1 and 3."""
    options = {
        "epochs": 3,
        "preprocess": from_text,
        "inputCols": ["text"],
        "samplingCol": "often",
        "augment": jitter,
        "validation": 0.25,
        "stratifyCol": "kind",
        "dropLast": True,
        "heartbeatTimeout": 2.0,
    }
    whole = make_estimator(**options).fit(rows)
    assert whole.history[-1]["steps"] >= 2
    failed = make_estimator(
        **options,
        checkpoint=dml.Checkpoints(f"{tmp_path}/run", every=2),
        callbacks=[FaultAt(1, step, "raise", str(tmp_path))],
    ).fit(rows)
    assert torch.equal(weights(failed), weights(whole))
    assert [row["val_loss"] for row in failed.history] == [row["val_loss"] for row in whole.history]


# -- what only the rows show --------------------------------------------------------------------


class Tattler(torch.optim.SGD):
    """Leaves a mark if it ever steps."""

    def __init__(self, parameters, mark):
        super().__init__(parameters, lr=0.1)
        self._mark = mark

    def step(self, closure=None):
        self._mark.touch()
        return super().step(closure)


def fails_late(batch):
    """On one row, which no first chunk has on both workers."""
    assert 77 not in batch["id"].to_pylist(), "a row like this"
    return {"features": np.stack(batch["features"].to_numpy(zero_copy_only=False))}


ARRAY = "array(float(id), 2.0f)"
BAD = [
    (
        "if(id = 77, array(array(1f), array(1f, 2f)), array(array(1f), array(2f))) as features",
        {},
        "'features' has 2 elements in the row",
    ),
    (
        f"{ARRAY} as features, if(id = 77, null, id % 2 = 0) as held",
        {"validation": "held"},
        "the validation column 'held' is null in the row",
    ),
    (
        f"{ARRAY} as features, if(id = 77, -1, 1) as often",
        {"samplingCol": "often"},
        r"samplingCol 'often' is -1.0 in the row",
    ),
    (
        f"{ARRAY} as features, if(id = 77, null, 'a') as kind",
        {"stratifyCol": "kind", "validation": 0.5},
        "stratifyCol 'kind' is null in some rows",
    ),
    (
        "if(id > 77, array(float('NaN'), 1f), if(id = 5, array(float('inf'), 1f), array(1f, 2f)))"
        " as features",
        {"checkFinite": True},
        "column 'features' has NaN or infinity in 23 of 100 rows",
    ),
    (
        f"{ARRAY} as features",
        {"preprocess": fails_late, "inputCols": ["id", "features"]},
        r"preprocess failed on the row \(id=77, .*AssertionError: a row like this",
    ),
    (
        f"{ARRAY} as features",
        {"preprocess": lambda b: {"x": np.zeros(b.num_rows)}, "featuresCol": "inputs"},
        "no column 'inputs': .*after preprocess and collate there is label, x",
    ),
]
ALSO_BAD = [  # each of a kind with one of those
    (f"if(id = 77, null, {ARRAY}) as features", {}, r"'features' is null in the row"),
    (f"if(id = 77, array(1.0f, null), {ARRAY}) as features", {}, "null inside the array"),
    (f"if(id = 77, array(1.0f), {ARRAY}) as features", {}, "'features' has 1 elements in the row"),
    (
        "if(id = 77, array(array(1f), array(float(null))), array(array(1f), array(2f)))"
        " as features",
        {},
        "'features' has a null inside the array in the row",
    ),
    (f"{ARRAY} as features, 0 as often", {"samplingCol": "often"}, "is 0 in every row"),
    (
        f"{ARRAY} as features",
        {
            "preprocess": lambda b: {"features": np.where(np.zeros((b.num_rows, 2)), 0, np.nan)},
            "checkFinite": True,
        },
        "column 'features' has NaN or infinity in 100 of 100 rows",
    ),
]


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [*BAD, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALSO_BAD)],
)
def test_bad_rows_are_found_before_the_first_step(spark, tmp_path, columns, options, words):
    mark = tmp_path / "stepped"
    data = spark.sql(f"select id, id % 2 as label, {columns} from range(100)")
    estimator = make_estimator(optimizer=partial(Tattler, mark=mark), batchSize=4, **options)
    with pytest.raises(dml.DataError, match=words):
        estimator.fit(data)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"featuresCol": "text"}, "column 'text' has the type string.*preprocess="),
        ({"inputCols": ["text"]}, "inputCols must be unset without preprocess="),
        ({"preprocess": from_text, "inputCols": ["txt"]}, "no column 'txt' for inputCols=: the"),
        (
            {"preprocess": from_text, "inputCols": ["places"]},
            "'places' in inputCols has the type map<.*use map_entries",
        ),
        (
            {"preprocess": from_text, "featuresCol": "a", "labelCol": "b"},
            "inputCols must be a list of columns for preprocess .*none of a, b",
        ),
        ({"samplingCol": "nothing"}, "no column 'nothing' for samplingCol="),
        ({"samplingCol": "text"}, "samplingCol 'text' is string, not a number"),
        ({"stratifyCol": "kind"}, "stratifyCol must be used with validation="),
        ({"stratifyCol": "features", "validation": 0.1}, "'features' has the type array<float>"),
    ],
)
def test_what_the_schema_or_the_settings_show(rows, options, words):
    data = rows.withColumn("places", F.create_map("text", "id"))
    with pytest.raises((dml.DataError, dml.ParameterError), match=words):
        make_estimator(**options)._prepare(data)


# -- datasets of one's own ----------------------------------------------------------------------


def read_dataset(ctx):
    rows = ctx.dataset().shuffle().filter(lambda row: row["id"] % 2 == 0).batch(8).prefetch(2)
    return [sorted(int(i) for batch in rows for i in batch["id"]) for _ in range(2)]


def test_a_dataset_in_a_function_of_ones_own(rows):
    ranks = dml.run(read_dataset, rows.select("id"), 2, backend="torch")
    for epoch in range(2):
        assert sorted(i for rank in ranks for i in rank[epoch]) == list(range(0, 120, 2))


def test_a_dataset_over_an_rdd(spark):
    rdd = spark.sparkContext.parallelize([{"id": i, "x": np.ones(3)} for i in range(40)], 3)
    ranks = dml.run(read_dataset, rdd, 2, backend="torch")
    assert sorted(i for rank in ranks for i in rank[1]) == list(range(0, 40, 2))
