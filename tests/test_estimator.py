"""The estimator and its model on a real session: results, Spark's own manners, clear errors."""

from functools import partial

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from torch import nn

import sparkdml as dml
from sparkdml.comm.backends import horovod_available

needs_horovod = pytest.mark.skipif(not horovod_available(), reason="Horovod isn't installed")
BACKENDS = ["torch", pytest.param("horovod", marks=needs_horovod)]


def make_net():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def make_estimator(**changes):
    settings = {
        "model": make_net,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
        "batchSize": 16,
        "numWorkers": 2,
        "seed": 3,
        "verbose": 0,
    }
    return dml.TorchEstimator(**{**settings, **changes})


def make_rows(count, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0).astype(int)


@pytest.fixture(scope="module")
def rows(spark):
    x, y = make_rows(300)
    frame = spark.createDataFrame(
        [(row.tolist(), int(label)) for row, label in zip(x, y, strict=True)],
        "features array<float>, label long",
    )
    return frame.cache()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module.parameters()])


# -- the mathematics ----------------------------------------------------------------------------


def record_batches(ctx):
    """What each rank is fed in two epochs, for a reference in one process."""
    return [[{n: b[n].clone() for n in b} for b in ctx.feed(16, epoch)] for epoch in range(2)]


@pytest.mark.parametrize(
    ("backend", "num_workers"),
    [
        ("torch", 1),
        ("torch", 3),
        pytest.param("horovod", 2, marks=needs_horovod),
        pytest.param("horovod", 4, marks=needs_horovod),
        pytest.param("torch", 2, marks=pytest.mark.slow),
        pytest.param("torch", 4, marks=pytest.mark.slow),
        pytest.param("horovod", 1, marks=[needs_horovod, pytest.mark.slow]),
        pytest.param("horovod", 3, marks=[needs_horovod, pytest.mark.slow]),
    ],
)
def test_workers_equal_one_process_with_the_combined_batch(rows, backend, num_workers):
    fitted = make_estimator(
        numWorkers=num_workers, epochs=2, strategy=dml.AllReduce(backend=backend)
    ).fit(rows)
    fed = dml.run(record_batches, rows, num_workers, seed=3, backend=backend)
    torch.manual_seed(3)
    module = make_net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(2):
        ranks = [rank[epoch] for rank in fed]
        for step in range(max(map(len, ranks))):
            batches = [rank[step] for rank in ranks if step < len(rank)]
            x, y = (torch.cat([b[name] for b in batches]) for name in ("features", "label"))
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(module(x), y).backward()
            optimizer.step()
    reference = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(weights(fitted), reference, rtol=1e-4, atol=1e-6)
    assert [row["rows"] for row in fitted.history] == [300, 300]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runs_give_the_same_bits(rows, backend):
    def fit(data, bucket_bytes):
        strategy = dml.AllReduce(backend=backend, bucket_bytes=bucket_bytes)
        return weights(make_estimator(numWorkers=3, epochs=2, strategy=strategy).fit(data))

    one_bucket = fit(rows, 1 << 20)
    assert torch.equal(one_bucket, fit(rows.repartition(5), 1 << 20))
    many_buckets = fit(rows, 64)
    assert torch.equal(many_buckets, fit(rows, 64))


def test_another_seed_is_another_run(rows):
    assert not torch.equal(
        weights(make_estimator(seed=1).fit(rows)), weights(make_estimator(seed=2).fit(rows))
    )


def test_more_workers_than_rows(spark):
    data = spark.createDataFrame([([0.1, 0.2, 0.3, 0.4], 1)], "features array<float>, label long")
    fitted = make_estimator(numWorkers=4, epochs=2).fit(data)
    assert [row["rows"] for row in fitted.history] == [1, 1]


# -- columns ------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """An embedding of ids that no float32 holds, beside a dense input."""

    OFFSET = 2**53

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.head = nn.Linear(8 + 2, 1)

    def forward(self, ids, dense):
        assert ids.dtype == torch.int64
        assert dense.dtype == torch.float32
        return self.head(torch.cat([self.embedding(ids - self.OFFSET), dense], dim=1))


def test_several_inputs_keep_their_types(spark):
    data = spark.range(64).select(
        (F.col("id") % 4 + TwoInputs.OFFSET).alias("id"),
        F.array(F.lit(1.0), F.lit(-1.0)).alias("dense"),
        (F.col("id") % 4).cast("double").alias("label"),
    )
    estimator = make_estimator(
        model=TwoInputs,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=0.05),
        featuresCol=["id", "dense"],
        epochs=40,
    )
    fitted = estimator.fit(data)
    assert fitted.history[-1]["loss"] < 0.05
    predicted = fitted.transform(data)
    assert predicted.schema["prediction"].dataType.simpleString() == "double"
    worst = predicted.select(F.max(F.abs(F.col("prediction") - F.col("label")))).first()[0]
    assert worst < 1


@pytest.mark.parametrize("sparse", [False, True])
def test_spark_ml_vectors(spark, sparse):
    x, y = make_rows(40)
    make = (lambda v: Vectors.sparse(4, range(4), v)) if sparse else Vectors.dense
    data = spark.createDataFrame(
        [(make(row.tolist()), float(label)) for row, label in zip(x, y, strict=True)],
        ["features", "label"],
    )
    fitted = make_estimator(epochs=2).fit(data)
    assert fitted.transform(data).count() == 40


def test_images_as_nested_arrays(spark):
    data = spark.range(20).select(
        F.array(*[F.array(*[F.rand(i + 3 * j) for i in range(3)]) for j in range(3)]).alias(
            "image"
        ),
        (F.col("id") % 2).alias("label"),
    )
    net = partial(nn.Sequential, nn.Flatten(), nn.Linear(9, 2))
    fitted = make_estimator(model=net, featuresCol="image").fit(data)
    assert fitted.transform(data).schema["prediction"].dataType.simpleString() == "double"


# -- what a Spark user expects ------------------------------------------------------------------


def test_in_a_pipeline_with_sparks_own_stages(spark):
    x, y = make_rows(200)
    data = spark.createDataFrame(
        [(*map(float, row), "abc"[label]) for row, label in zip(x, y, strict=True)],
        ["a", "b", "c", "d", "kind"],
    )
    pipeline = Pipeline(
        stages=[
            StringIndexer(inputCol="kind", outputCol="label"),
            VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="features"),
            make_estimator(epochs=12),
        ]
    )
    predicted = pipeline.fit(data).transform(data)
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predicted)
    assert accuracy > 0.9
    assert predicted.columns == ["a", "b", "c", "d", "kind", "label", "features", "prediction"]


def test_history_metrics_and_validation(rows):
    fitted = make_estimator(
        epochs=3,
        validation=0.2,
        metrics={"accuracy": lambda outputs, targets: outputs.argmax(1) == targets},
    ).fit(rows)
    frame = fitted.history.to_pandas()
    assert list(frame["epoch"]) == [1, 2, 3]
    assert frame["loss"].is_monotonic_decreasing
    assert {"accuracy", "val_loss", "val_accuracy", "seconds", "rows_per_second"} <= set(frame)
    assert 200 < frame["rows"][0] < 280
    assert 0 < fitted.history.first_step_seconds < 60
    assert fitted.history.backend == ("horovod" if horovod_available() else "torch")
    assert fitted.history.topology == "shared-memory"
    assert fitted.history.val_loss == list(frame["val_loss"])
    assert "<table>" in fitted.history._repr_html_()


def test_validation_by_a_column(rows):
    marked = rows.withColumn("is_test", F.xxhash64("features") % 3 == 0)
    fitted = make_estimator(validation="is_test").fit(marked)
    assert fitted.history[0]["rows"] == marked.where("not is_test").count()
    held_out = fitted.evaluate(marked.where("is_test"))
    assert held_out["loss"] == pytest.approx(fitted.history[0]["val_loss"], rel=1e-5)


def test_early_stopping(rows):
    fitted = make_estimator(
        epochs=50,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        validation=0.3,
        callbacks=[dml.EarlyStopping("val_loss", patience=1)],
    ).fit(rows)
    assert len(fitted.history) == 3
    assert "val_loss was best in epoch 1" in fitted.history.stopped


def test_transform_equals_the_module(rows):
    fitted = make_estimator(output="raw").fit(rows)
    predicted = fitted.transform(rows)
    assert predicted.schema["prediction"].dataType.simpleString() == "array<float>"
    for row in predicted.limit(20).collect():
        expected = fitted.module(torch.tensor([row.features]))[0]
        torch.testing.assert_close(torch.tensor(row.prediction), expected)
    classes = fitted.copy({fitted.output: "class"}).transform(rows).limit(20).collect()
    for row in classes:
        assert row.prediction == fitted.module(torch.tensor([row.features])).argmax().item()


def test_evaluate_is_over_all_rows(rows):
    metrics = {"accuracy": lambda outputs, targets: outputs.argmax(1) == targets}
    fitted = make_estimator(metrics=metrics).fit(rows)
    collected = rows.collect()
    x = torch.tensor([row.features for row in collected])
    y = torch.tensor([row.label for row in collected])
    found = fitted.evaluate(rows.repartition(3))
    assert found["loss"] == pytest.approx(
        nn.CrossEntropyLoss()(fitted.module(x), y).item(), rel=1e-5
    )
    assert found["accuracy"] == pytest.approx(
        (fitted.module(x).argmax(1) == y).float().mean().item()
    )


def test_params_are_sparks(rows):
    estimator = make_estimator()
    copied = estimator.copy({estimator.epochs: 7})
    assert (estimator.getEpochs(), copied.getEpochs()) == (1, 7)
    assert estimator.setEpochs(2) is estimator
    text = estimator.explainParams()
    for param in estimator.params:
        assert f"{param.name}: " in text
        assert len(param.doc) > 10
    fitted = estimator.fit(rows, {estimator.predictionCol: "p"})
    assert fitted.uid == estimator.uid
    assert "p" in fitted.transform(rows).columns


def test_progress_is_said_in_lines_where_there_is_no_terminal(rows, capsys):
    make_estimator(verbose=1, epochs=2).fit(rows)
    said = capsys.readouterr().err
    assert "epoch 1/2: loss" in said
    assert "epoch 2/2: loss" in said
    assert "samples/s" in said


# -- bad input ----------------------------------------------------------------------------------


def test_a_shape_error_comes_with_rank_and_traceback(rows):
    with pytest.raises(dml.WorkerError, match="mat1 and mat2 shapes") as raised:
        make_estimator(model=lambda: nn.Linear(5, 3)).fit(rows)
    assert "Traceback of rank" in str(raised.value)


def test_a_nan_loss_stops_the_run(rows):
    with pytest.raises(dml.NonFiniteLoss, match=r"at step \d+ \(epoch \d\) on rank \d"):
        make_estimator(
            loss=nn.MSELoss(),
            model=lambda: nn.Linear(4, 1),
            optimizer=partial(torch.optim.SGD, lr=1e30),
            epochs=5,
        ).fit(rows)


def test_transform_checks_the_schema_first(spark, rows):
    fitted = make_estimator().fit(rows)
    with pytest.raises(dml.DataError, match="no column 'features'"):
        fitted.transform(rows.drop("features"))
    with pytest.raises(dml.DataError, match="already has a column 'prediction'"):
        fitted.transform(rows.withColumn("prediction", F.lit(1)))
    with pytest.raises(dml.DataError, match="trained on array of float32"):
        fitted.transform(rows.withColumn("features", F.lit(1.0)))


# -- watching -----------------------------------------------------------------------------------


def test_a_fit_is_traced_tracked_and_heard(rows, tmp_path, capsys):
    import json

    from sparkdml.observe.timeline.trace_file import find_faults

    class Tracker:
        def __init__(self):
            self.logged, self.closed = [], False

        def log(self, step, metrics):
            self.logged.append((step, metrics))

        def close(self):
            self.closed = True

    class Speaks(dml.Callback):
        def on_epoch_end(self, training, row):
            print("an epoch is over")

    tracker, path = Tracker(), tmp_path / "trace.json"
    make_estimator(
        epochs=2,
        numWorkers=2,
        timeline=str(path),
        tracker=tracker,
        logs="driver",
        callbacks=[Speaks()],
        verbose=2,
    ).fit(rows)
    said = capsys.readouterr()
    assert said.out.count("] an epoch is over") == 4
    assert "rank 1 on" in said.err
    assert tracker.closed
    assert any("loss" in metrics for _, metrics in tracker.logged)
    trace = json.loads(path.read_text())
    assert find_faults(trace["traceEvents"]) == []
    assert {"forward", "backward", "communication", "optimizer"} <= {
        event["name"] for event in trace["traceEvents"]
    }
