"""Saving and loading: nothing is lost, no code runs unless allowed, damage is named."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from torch import nn
from torch.optim.lr_scheduler import StepLR

from sparkdml.errors import DataError, SetupError
from sparkdml.estimator import TorchEstimator
from sparkdml.feed.columns.kinds import ArrayColumn
from sparkdml.feed.ragged import pad
from sparkdml.history import History
from sparkdml.inference.outputs import Output
from sparkdml.model import TorchModel
from sparkdml.persistence import allow_packages, allow_pickle
from sparkdml.persistence.permission import is_pickle_allowed
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.models import (
    CountEpochs,
    TiedAutoencoder,
    TinyClassifier,
    accuracy,
    make_classifier,
    make_wider,
)
from sparkdml.training.callbacks import EarlyStopping, LearningRateSchedule
from sparkdml.training.task import build_module
from sparkdml.training.weights import encode_weights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def no_unexpected_warnings() -> Iterator[None]:
    """An unexpected pickle would show as a warning."""
    with warnings.catch_warnings(), allow_packages("tests", "sparkdml.testing"):
        warnings.filterwarnings("error", message="saved as a pickle")
        yield


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(24, 4, generator=generator).tolist()
    return spark.createDataFrame(
        [(*row, row, index % 3) for index, row in enumerate(values)],
        "a double, b double, c double, d double, features array<double>, label int",
    ).coalesce(2)


@pytest.fixture(scope="module")
def fitted_pipeline(rows: DataFrame) -> PipelineModel:
    """A real fit, behind a stage of the JVM."""
    assembler = VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="vector")
    return Pipeline(stages=[assembler, estimator(TinyClassifier, featuresCol="vector")]).fit(rows)


def estimator(model: Any, **params: Any) -> TorchEstimator:
    return TorchEstimator(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.99)),
        numWorkers=1,
        verbose=0,
        **params,
    )


def fitted(source: Any, loss: Any = None, metrics: dict[str, Any] | None = None) -> TorchModel:
    """As fit would leave it, without the time that a fit takes."""
    torch.manual_seed(3)
    module = build_module(source)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter))
    history = History([{"epoch": 1, "loss": 0.5, "val_loss": float("nan")}], "enough", 0.25)
    return TorchModel._make(
        module=module,
        source=source,
        weights=encode_weights(module),
        loss=loss or nn.CrossEntropyLoss(),
        metrics=metrics or {},
        features=(ArrayColumn("features", "float32"),),
        output_shape=[3],
        history=history,
    )


def outputs(model: TorchModel) -> torch.Tensor:
    result: torch.Tensor = model.module(torch.linspace(0, 1, 20).reshape(5, 4))
    return result


def predictions(model: Any, data: DataFrame) -> list[Any]:
    return sorted(model.transform(data).select("a", "prediction").collect())


def public(value: Any) -> dict[str, Any]:
    return {name: item for name, item in vars(value).items() if not name.startswith("_")}


def manifest_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "objects.json").read_text())
    return content


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        pytest.param(TinyClassifier, "import", id="class"),
        pytest.param(make_classifier, "import", id="function"),
        pytest.param(partial(TinyClassifier, hidden=5), "partial", id="partial class"),
        pytest.param(partial(make_wider, 5), "partial", id="partial function"),
        pytest.param(
            nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
            "module",
            id="sequential",
        ),
        pytest.param(TinyClassifier(7), "module", id="instance"),
        pytest.param(TiedAutoencoder(), "module", id="tied"),
    ],
)
def test_model_round_trip(spark: SparkSession, tmp_path: Path, source: Any, kind: str) -> None:
    before = fitted(source, metrics={"accuracy": accuracy}).setPredictionCol("guess")
    path = tmp_path / "model"
    before.save(str(path))
    assert list(manifest_of(path)["fitted"]["model"]) == [kind]
    assert not (path / "unsafe-pickle").exists()

    random_state = torch.random.get_rng_state()
    after = TorchModel.load(str(path))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert after.uid == before.uid
    assert after.getPredictionCol() == "guess"
    assert not after.isSet(after.getParam("labelCol"))
    assert torch.equal(outputs(after), outputs(before))
    assert not after.module.training
    assert str(after.history.to_dict()) == str(before.history.to_dict())  # NaN is not itself
    assert after._metrics == {"accuracy": accuracy}
    assert after._features == before._features


def test_weights_are_stored_once_and_ties_hold(spark: SparkSession, tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(4, 20_000), nn.Linear(20_000, 3))
    fitted(source).save(str(tmp_path / "large"))
    structure = tmp_path / "large/objects/model.structure.pt"
    assert structure.stat().st_size < 10_000
    assert sorted(p.name for p in (tmp_path / "large").rglob("*.safetensors")) == [
        "weights.safetensors"
    ]
    fitted(TiedAutoencoder()).save(str(tmp_path / "tied"))
    module: Any = TorchModel.load(str(tmp_path / "tied")).module
    assert module.up.weight is module.down.weight
    assert torch.equal(module.scale, torch.full((4,), 0.5))


def test_loss_keeps_its_class_weights(spark: SparkSession, tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    model = fitted(TinyClassifier, nn.CrossEntropyLoss(weight, label_smoothing=0.1))
    model.save(str(tmp_path / "model"))
    loss: Any = TorchModel.load(str(tmp_path / "model"))._loss
    assert torch.equal(loss.weight, weight)
    assert loss.label_smoothing == 0.1
    assert isinstance(loss, nn.CrossEntropyLoss)


class Hidden(nn.Module):
    """Cannot be imported: see `notebook_class`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(features)
        return result


@pytest.fixture
def notebook_class(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """A class as a notebook has it."""
    monkeypatch.setattr(Hidden, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Hidden", Hidden, raising=False)
    return Hidden


def refused_then_allowed(model: TorchModel, path: Path, reason: str) -> TorchModel:
    with pytest.warns(UserWarning, match=f"saved as a pickle.*model \\({reason}"):
        model.save(str(path))
    with pytest.raises(SetupError, match=rf"model was saved.*{reason}.*runs.*allow_pickle") as info:
        TorchModel.load(str(path))
    assert str(path / "unsafe-pickle/model.pkl") in str(info.value)
    with allow_pickle():
        loaded: TorchModel = TorchModel.load(str(path))
    assert not is_pickle_allowed()
    return loaded


def test_lambda_needs_permission(spark: SparkSession, tmp_path: Path) -> None:
    model = fitted(lambda: nn.Linear(4, 3))
    loaded = refused_then_allowed(model, tmp_path / "model", "it is a lambda")
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize("make", [lambda cls: cls, lambda cls: cls()], ids=["class", "instance"])
def test_notebook_class_needs_permission(
    spark: SparkSession,
    tmp_path: Path,
    notebook_class: type[nn.Module],
    make: Callable[[type[nn.Module]], Any],
) -> None:
    model = fitted(make(notebook_class))
    loaded = refused_then_allowed(model, tmp_path / "model", ".*defined in a notebook")
    assert torch.equal(outputs(loaded), outputs(model))


def test_environment_variable_allows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fitted(TinyClassifier, metrics={"odd/name": lambda o, t: o.mean()})
    with pytest.warns(UserWarning, match="metrics.odd/name"):
        model.save(str(tmp_path / "model"))
    monkeypatch.setenv("SPARKDML_ALLOW_PICKLE", "0")
    with pytest.raises(SetupError, match=r"metrics\.odd/name"):
        TorchModel.load(str(tmp_path / "model"))
    monkeypatch.setenv("SPARKDML_ALLOW_PICKLE", "1")
    assert list(TorchModel.load(str(tmp_path / "model"))._metrics) == ["odd/name"]


def test_permission_is_of_one_thread(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="lambda"):
        fitted(lambda: nn.Linear(4, 3)).save(str(tmp_path / "model"))
    errors: list[BaseException] = []

    def load() -> None:
        try:
            TorchModel.load(str(tmp_path / "model"))
        except SetupError as error:
            errors.append(error)

    with allow_pickle():
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize(
    "planted",
    [
        {"partial": {"of": "subprocess:call", "args": [["touch", "PLANTED"]], "kwargs": {}}},
        {"partial": {"of": "os:mkdir", "args": ["PLANTED"], "kwargs": {}}},
        {
            "object": {
                "class": "subprocess:Popen",
                "args": ["args"],
                "state": {"args": ["touch", "PLANTED"]},
            }
        },
    ],
    ids=["partial", "builtin", "object"],
)
def test_planted_calls_are_refused(spark: SparkSession, tmp_path: Path, planted: Any) -> None:
    path = tmp_path / "model"
    fitted(TinyClassifier).save(str(path))
    text = json.dumps(planted).replace("PLANTED", str(tmp_path / "planted"))
    manifest = manifest_of(path)
    manifest["fitted"]["model"] = json.loads(text)
    (path / "objects.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"model in .* is saved as"):
        TorchModel.load(str(path))
    assert not (tmp_path / "planted").exists()


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["SPARKDML_TEST_PLANTED"],)


@pytest.mark.parametrize("classes", [[], ["posix:mkdir"]], ids=["unnamed", "named"])
def test_planted_structure_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: list[str]
) -> None:
    monkeypatch.setenv("SPARKDML_TEST_PLANTED", str(tmp_path / "planted"))
    path = tmp_path / "model"
    fitted(TinyClassifier(7)).save(str(path))
    name = "objects/model.structure.pt"
    torch.save(Malice(), path / name)
    content = (path / name).read_bytes()
    manifest = manifest_of(path)
    manifest["files"][name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    manifest["fitted"]["model"]["module"]["structure"]["classes"] += classes
    (path / "objects.json").write_text(json.dumps(manifest))
    refusal = "is saved as posix:mkdir" if classes else "can't be read"
    with pytest.raises(DataError, match=rf"model\.structure\.pt {refusal}"):
        TorchModel.load(str(path))
    assert not (tmp_path / "planted").exists()


def test_estimator_round_trip(spark: SparkSession, tmp_path: Path) -> None:
    pretrained = TinyClassifier()
    counting = CountEpochs(start=2)
    counting.count = 5
    before = estimator(
        pretrained,
        featuresCol=["x", "y"],
        validation=0.25,
        metrics={"accuracy": accuracy, "nll": partial(F.cross_entropy, reduction="none")},
        callbacks=[EarlyStopping("val_accuracy", patience=4, mode="max"), counting],
        strategy=AllReduce("torch", bucket_bytes=1 << 10),
    )
    before.save(str(tmp_path / "estimator"))
    after = TorchEstimator.load(str(tmp_path / "estimator"))

    assert after.uid == before.uid
    set_before = {p.name: v for p, v in before._paramMap.items()}
    set_after = {p.name: v for p, v in after._paramMap.items()}
    objects = {"model", "loss", "optimizer", "metrics", "callbacks", "strategy"}
    assert set_after.keys() == set_before.keys()
    for name in set_before.keys() - objects:
        assert set_after[name] == set_before[name], name
    assert {p.name for p in after._defaultParamMap} == {p.name for p in before._defaultParamMap}

    optimizer = after.getOptimizer()
    assert (optimizer.func, optimizer.args) == (torch.optim.Adam, ())
    assert optimizer.keywords == {"lr": 0.01, "betas": (0.8, 0.99)}
    assert isinstance(after.getLoss(), nn.CrossEntropyLoss)
    assert after.getMetrics()["accuracy"] is accuracy
    assert after.getMetrics()["nll"].keywords == {"reduction": "none"}
    stopping, counted = after.getCallbacks()
    assert public(stopping) == public(before.getCallbacks()[0])
    assert vars(counted) == {"start": 2, "count": 5}
    assert vars(after.getStrategy()) == vars(before.getStrategy())
    assert after.getStrategy().bucket_bytes == 1024
    for name, tensor in pretrained.state_dict().items():
        assert torch.equal(after.getModel().state_dict()[name], tensor)


def tokens_of(batch: Any) -> dict[str, Any]:
    """As a preprocess function: importable, so saved by its name."""
    return {"features": batch.column("text")}


def reconstruct(modules: Any, batch: Any, ctx: Any) -> Any:
    return (modules.up(modules.down(batch["features"])) - batch["features"]).pow(2).mean()


def encode_only(modules: Any, batch: Any) -> Any:
    return modules.down(batch["features"])


def test_estimator_of_several_modules_round_trip(spark: SparkSession, tmp_path: Path) -> None:
    before = TorchEstimator(
        model={"down": partial(nn.Linear, 4, 2), "up": nn.Linear(2, 4)},
        step=reconstruct,
        optimizer={"down": torch.optim.SGD, "up": partial(torch.optim.SGD, lr=0.5)},
        metrics=["worst"],
        predict=encode_only,
        preprocess=tokens_of,
        inputCols=["text"],
        collate=pad(value=1, max_length=7),
        warmStart={"down.weight": torch.ones(2, 4)},
        compile={"backend": "eager"},
        callbacks=[LearningRateSchedule(partial(StepLR, step_size=3))],
        outputCols=["code"],
        precision="bf16",
    )
    before.save(str(tmp_path / "estimator"))
    assert not (tmp_path / "estimator/unsafe-pickle").exists()
    after = TorchEstimator.load(str(tmp_path / "estimator"))
    assert {p.name for p in after._paramMap} == {p.name for p in before._paramMap}
    for name in ("step", "predict", "preprocess", "inputCols", "compile", "outputCols", "metrics"):
        assert after.value(name) == before.value(name), name
    assert torch.equal(after.getModel()["up"].weight, before.getModel()["up"].weight)
    assert after.getOptimizer()["up"].keywords == {"lr": 0.5}
    assert public(after.getCollate()) == public(before.getCollate())
    assert torch.equal(after.getWarmStart()["down.weight"], torch.ones(2, 4))
    assert after.getCallbacks()[0].scheduler.keywords == {"step_size": 3}


def test_a_model_to_begin_from_is_saved_as_its_weights(spark: SparkSession, tmp_path: Path) -> None:
    start = fitted(TinyClassifier)
    estimator(TinyClassifier, warmStart=start).save(str(tmp_path / "estimator"))
    found = TorchEstimator.load(str(tmp_path / "estimator")).getWarmStart()
    for name, tensor in start.module.state_dict().items():
        assert torch.equal(found[name], tensor)


def test_model_of_several_modules_round_trip(spark: SparkSession, tmp_path: Path) -> None:
    source = {"down": nn.Linear(4, 2), "up": partial(nn.Linear, 2, 4)}
    module = build_module(source)
    before: TorchModel = TorchModel._make(
        module=module,
        source=source,
        weights=encode_weights(module),
        loss=None,
        metrics=["worst"],
        features=(ArrayColumn("features", "float32"),),
        output_shape=None,
        history=History([], None, None),
        step=reconstruct,
        loss_names=("down", "up"),
    )
    before.setPredict(encode_only)
    before._probed = (encode_only, (Output("", (2,), "float32"),))
    before.save(str(tmp_path / "model"))
    names = [path.name for path in (tmp_path / "model").rglob("*.safetensors")]
    assert names == ["weights.safetensors"]  # the first weights of an instance are not kept
    after: Any = TorchModel.load(str(tmp_path / "model"))
    assert (after._step, after._loss_names) == (reconstruct, ("down", "up"))
    assert list(after._metrics) == ["worst"]
    assert after._known_outputs() == (Output("", (2,), "float32"),)
    inputs = torch.rand(3, 4)
    assert torch.equal(after.module.down(inputs), module.down(inputs))  # type: ignore[operator]
    after.setPredict("up")
    assert after._found_outputs is None


def test_large_weights_are_copied_from_file_to_file(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sparkdml.inference.weights", "sparkdml.persistence.objects"):
        monkeypatch.setattr(f"{module}.LARGE_BYTES", 64)
    before = fitted(TinyClassifier)
    path = tmp_path / "model"
    before.save(str(path))
    after: TorchModel = TorchModel.load(str(path))
    own = after._weights.path
    assert own is not None
    assert own != path / "weights.safetensors"
    assert torch.equal(outputs(after), outputs(before))
    before.write().overwrite().save(str(path))  # under the nose of what was loaded
    assert torch.equal(outputs(after), outputs(before))
    content = bytearray((path / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "weights.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"weights\.safetensors is damaged: its SHA-256"):
        TorchModel.load(str(path))


def test_loaded_estimator_fits_the_same(
    rows: DataFrame, tmp_path: Path, fitted_pipeline: PipelineModel
) -> None:
    assembler, fitted_stage = fitted_pipeline.stages
    unfitted = Pipeline(stages=[assembler, estimator(TinyClassifier, featuresCol="vector")])
    unfitted.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline"))
    assert loaded.uid == unfitted.uid
    refitted = loaded.fit(rows).stages[1]
    assert refitted._weights == fitted_stage._weights


def test_pipeline_round_trip(
    rows: DataFrame, tmp_path: Path, fitted_pipeline: PipelineModel
) -> None:
    path = str(tmp_path / "pipeline")
    fitted_pipeline.write().overwrite().save(path)
    loaded = PipelineModel.load(path)
    assert predictions(loaded, rows) == predictions(fitted_pipeline, rows)
    before, after = fitted_pipeline.stages[1], loaded.stages[1]
    assert [stage.uid for stage in loaded.stages] == [s.uid for s in fitted_pipeline.stages]
    vectors = loaded.stages[0].transform(rows)
    assert after.evaluate(vectors) == before.evaluate(vectors)
    assert list(after.history) == list(before.history)


def test_pipeline_of_our_stage_alone(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="lambda"):
        PipelineModel([fitted(lambda: nn.Linear(4, 3))]).save(str(tmp_path / "pipeline"))
    with pytest.raises(SetupError, match="allow_pickle"):
        PipelineModel.load(str(tmp_path / "pipeline"))
    with allow_pickle():
        loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert loaded.copy().transform(rows).count() == 24


@pytest.mark.slow
def test_same_predictions_in_another_process(
    rows: DataFrame, tmp_path: Path, fitted_pipeline: PipelineModel
) -> None:
    model: Any = fitted_pipeline.stages[1].copy().setOutput("raw")
    model.save(str(tmp_path / "model"))
    vectors = fitted_pipeline.stages[0].transform(rows)
    vectors.write.parquet(str(tmp_path / "rows"))
    script = """
import json, sys
import sparkdml as dml
spark = dml.session_builder("load", "local[1]").config("spark.ui.enabled", "false").getOrCreate()
with dml.allow_packages("sparkdml.testing"):
    model = dml.TorchModel.load(sys.argv[1])
result = model.transform(spark.read.parquet(sys.argv[2])).select("a", "prediction").collect()
print("RESULT" + json.dumps(sorted([row.a, list(row.prediction)] for row in result)))
spark.stop()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model"), str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    expected = [[row.a, list(row.prediction)] for row in predictions(model, vectors)]
    assert json.loads(answer.removeprefix("RESULT")) == expected


def test_other_file_systems(spark: SparkSession, tmp_path: Path) -> None:
    """viewfs goes the way of hdfs: all bytes pass through the JVM, here in several chunks."""
    configuration = spark._jsc.hadoopConfiguration()
    configuration.set("fs.viewfs.mounttable.sparkdml.link./data", tmp_path.as_uri())
    model = fitted(nn.Sequential(nn.Linear(4, 150_000), nn.Linear(150_000, 3)))
    model.save("viewfs://sparkdml/data/model")
    assert (tmp_path / "model/weights.safetensors").read_bytes() == model._weights.content
    loaded = TorchModel.load("viewfs://sparkdml/data/model")
    assert torch.equal(outputs(loaded), outputs(model))
    assert torch.equal(outputs(TorchModel.load((tmp_path / "model").as_uri())), outputs(model))
    (tmp_path / "model/history.json").unlink()
    with pytest.raises(DataError, match=r"viewfs://sparkdml/data/model/history\.json is missing"):
        TorchModel.load("viewfs://sparkdml/data/model")


def cut(path: Path) -> None:
    file = path / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def flip(path: Path) -> None:
    file = path / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def remove(path: Path) -> None:
    (path / "weights.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, r"weights\.safetensors is damaged: it has \d+ bytes but \d+ were"),
        (flip, r"weights\.safetensors is damaged: its SHA-256"),
        (remove, r"weights\.safetensors is missing"),
        (lambda path: (path / "objects.json").write_text("{"), r"objects\.json is damaged"),
    ],
    ids=["truncated", "flipped", "missing", "manifest"],
)
def test_damage_is_named(
    spark: SparkSession, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    fitted(TinyClassifier).save(str(tmp_path / "model"))
    damage(tmp_path / "model")
    with pytest.raises(DataError, match=says):
        TorchModel.load(str(tmp_path / "model"))


def test_mismatches_are_explained(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "model"
    fitted(TinyClassifier).save(str(path))
    with pytest.raises(SetupError, match=r"holds a sparkdml\.model\.TorchModel.*TorchModel\.load"):
        TorchEstimator.load(str(path))

    def load_with(**changes: Any) -> None:
        manifest = manifest_of(path)
        (path / "objects.json").write_text(json.dumps({**manifest, **changes}))
        try:
            TorchModel.load(str(path))
        finally:
            (path / "objects.json").write_text(json.dumps(manifest))

    with pytest.raises(SetupError, match=r"objects\.json has format 99.*up to 1.*newer"):
        load_with(format=99)
    saved = manifest_of(path)["fitted"]
    gone = {**saved, "model": {"import": "gone_module:Net"}}
    with (
        allow_packages("gone_module"),
        pytest.raises(SetupError, match=r"model in .* gone_module:Net.*can't be imported"),
    ):
        load_with(fitted=gone)
    smaller = {"partial": {"of": "sparkdml.testing.models:make_wider", "args": [2], "kwargs": {}}}
    with pytest.raises(DataError, match=r"code has changed.*weights\.safetensors"):
        load_with(fitted={**saved, "model": smaller})


def test_overwrite_is_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "model"
    first, second = fitted(TinyClassifier), fitted(TinyClassifier(5))
    first.save(str(path))
    with pytest.raises(Exception, match="already exists"):
        second.save(str(path))
    assert torch.equal(outputs(TorchModel.load(str(path))), outputs(first))
    second.write().overwrite().save(str(path))
    loaded = TorchModel.read().session(spark).load(str(path))
    assert torch.equal(outputs(loaded), outputs(second))
    assert not list(path.glob("unsafe-pickle"))


def test_failed_save_leaves_the_older_one(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "model"
    first = fitted(TinyClassifier)
    first.save(str(path))
    lock = threading.Lock()
    unsavable = fitted(TinyClassifier, metrics={"locked": lambda o, t: lock and o.mean()})
    with pytest.raises(SetupError, match=r"metrics\.locked can't be saved.*lambda.*pickled either"):
        unsavable.write().overwrite().save(str(path))
    assert torch.equal(outputs(TorchModel.load(str(path))), outputs(first))
