"""The Params, frozen: a new one, or another default, is a deliberate change."""

import pytest
import torch

import sparkdml as dml
from sparkdml.params.param import (
    BY_LONE_WORKERS,
    BY_OWN_STEPS,
    BY_SEPARATE_STEPS,
    AccessibleParams,
    Fingerprint,
    definitions,
    flag,
    param,
)

ESTIMATOR = {
    "augment": None,
    "batchSize": 64,
    "callbacks": [],
    "checkFinite": False,
    "checkpoint": None,
    "clipNorm": None,
    "collate": None,
    "compile": False,
    "cpusPerWorker": None,
    "dropLast": False,
    "dryRun": False,
    "epochs": 1,
    "featuresCol": "features",
    "gpusPerWorker": 0,
    "gradientAccumulation": 1,
    "heartbeatTimeout": 8.0,
    "inputCols": None,
    "labelCol": "label",
    "logs": None,
    "loss": None,
    "maxRestarts": 3,
    "metrics": {},
    "minWorkers": 1,
    "model": None,
    "numWorkers": None,
    "onInterrupt": "raise",
    "optimizer": None,
    "output": "auto",
    "outputCols": None,
    "parameterGroups": None,
    "precision": "float32",
    "predict": None,
    "predictionCol": "prediction",
    "preprocess": None,
    "replacementSeconds": 60.0,
    "samplingCol": None,
    "seed": 0,
    "shuffle": True,
    "slotTimeout": 60.0,
    "step": None,
    "stratifyCol": None,
    "syncBatchNorm": False,
    "timeline": None,
    "tracker": None,
    "validation": None,
    "verbose": 1,
    "warmStart": None,
    "weightCol": None,
}
MODEL = {
    "batchSize": 64,
    "collate": None,
    "featuresCol": "features",
    "inputCols": None,
    "labelCol": "label",
    "output": "auto",
    "outputCols": None,
    "predict": None,
    "predictionCol": "prediction",
    "preprocess": None,
    "weightCol": None,
}
OF_CLASSIFIERS = {"probabilityCol": "probability", "rawPredictionCol": "rawPrediction"}


def values(stage):
    return {param.name: stage.value(param.name) for param in stage.params}


def test_the_estimators():
    found = values(dml.TorchEstimator())
    strategy = "AllReduce(backend='auto', bucket_bytes=8388608, topology='auto')"
    assert repr(found.pop("strategy")) == strategy
    assert found == ESTIMATOR


def test_the_models():
    assert values(dml.TorchModel()) == MODEL


def test_the_classifiers():
    found = values(dml.TorchClassifier())
    assert {name: found[name] for name in OF_CLASSIFIERS} == OF_CLASSIFIERS
    assert found.keys() == {*ESTIMATOR, *OF_CLASSIFIERS, "strategy", "thresholds"}
    assert values(dml.TorchClassificationModel()).keys() == {
        *MODEL,
        *OF_CLASSIFIERS,
        "thresholds",
    }


def test_the_regressors():
    assert values(dml.TorchRegressor()).keys() == {*ESTIMATOR, "strategy"}
    assert values(dml.TorchRegressionModel()).keys() == MODEL.keys()


def test_each_has_a_line_that_explains_it_and_accessors():
    estimator = dml.TorchEstimator()
    for one in estimator.params:
        assert len(one.doc) > 10, one.name
        title = one.name[0].upper() + one.name[1:]
        assert callable(getattr(estimator, f"get{title}"))
        assert callable(getattr(estimator, f"set{title}"))


# The states of a run don't depend on these. Any other Param belongs to its fingerprint: else a run
# that is resumed with another value would ignore it in silence.
NOT_IN_THE_FINGERPRINT = {
    *("checkFinite", "checkpoint", "cpusPerWorker", "dryRun", "epochs", "gpusPerWorker"),
    *("heartbeatTimeout", "logs", "maxRestarts", "minWorkers", "numWorkers", "onInterrupt"),
    *("output", "outputCols", "predict", "predictionCol", "replacementSeconds", "slotTimeout"),
    *("timeline", "tracker", "verbose"),
    *("probabilityCol", "rawPredictionCol", "thresholds"),
}


def test_each_says_whether_it_belongs_to_the_fingerprint():
    with pytest.raises(TypeError, match="fingerprint"):
        param("later", "a Param of the future", flag("later"))
    every = {one.name: one.fingerprint for one in definitions(dml.TorchClassifier)}
    assert every.keys() == {one.name for one in dml.TorchClassifier().params}
    left_out = {name for name, kind in every.items() if kind is Fingerprint.NEVER}
    assert left_out == NOT_IN_THE_FINGERPRINT


def test_a_new_param_is_in_the_fingerprint_once_it_is_used():
    class Later(AccessibleParams):
        one = param("one", "", flag("one"), default=False, fingerprint=Fingerprint.WHEN_USED)
        other = param("other", "", flag("other"), fingerprint=Fingerprint.ALWAYS)
        third = param("third", "", flag("third"), fingerprint=Fingerprint.NEVER)

    stage = Later()
    stage._set_defaults()
    assert stage._fingerprint({}) == {"other": "None"}
    stage.setOne(True).setThird(True)
    assert stage._fingerprint({}) == {"one": "True", "other": "None"}
    assert stage._fingerprint({"other": 3}) == {"one": "True", "other": "3"}


def test_what_strategies_refuse():
    refused = {one.name: one.refused for one in definitions(dml.TorchEstimator) if one.refused}
    assert refused == {
        "checkpoint": BY_LONE_WORKERS,
        "dropLast": BY_LONE_WORKERS,
        "onInterrupt": BY_LONE_WORKERS,
        "samplingCol": BY_LONE_WORKERS,
        "optimizer": BY_OWN_STEPS,
        "syncBatchNorm": BY_SEPARATE_STEPS,
    }


@pytest.mark.parametrize(
    ("strategy", "name", "value", "why"),
    [
        (dml.Averaging(), "checkpoint", "/runs/1", "whose workers train alone"),
        (dml.Averaging(), "samplingCol", "w", "whose workers train alone"),
        (dml.Averaging(), "dropLast", True, "whose workers train alone"),
        (dml.Averaging(), "onInterrupt", "stop-and-keep", "whose workers train alone"),
        (dml.LBFGS(), "optimizer", torch.optim.SGD, "which makes its own steps"),
        (dml.LocalSGD(), "syncBatchNorm", True, "whose workers don't step together"),
    ],
)
def test_a_refusal_names_param_value_and_strategy(strategy, name, value, why):
    estimator = dml.TorchEstimator(**{name: value})
    estimator._check_strategy(dml.AllReduce())
    with pytest.raises(dml.ParameterError) as caught:
        estimator._check_strategy(strategy)
    assert str(caught.value).startswith(name)
    assert f"with {type(strategy).__name__}, {why}" in str(caught.value)


def test_defaults_are_not_shared():
    one, other = dml.TorchEstimator(), dml.TorchEstimator()
    assert one.value("callbacks") is not other.value("callbacks")
    assert one.value("strategy") is not other.value("strategy")


def test_what_a_saved_stage_holds_as_objects():
    held = {one.name for one in definitions(dml.TorchClassifier) if one.is_object}
    assert held == {
        *("augment", "callbacks", "checkpoint", "collate", "compile", "loss", "metrics", "model"),
        *("optimizer", "parameterGroups", "predict", "preprocess", "step", "strategy", "tracker"),
        "warmStart",
    }
