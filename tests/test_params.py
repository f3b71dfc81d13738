"""The Params, frozen: a new one, or another default, is a deliberate change."""

import sparkdml as dml

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
    for param in estimator.params:
        assert len(param.doc) > 10, param.name
        title = param.name[0].upper() + param.name[1:]
        assert callable(getattr(estimator, f"get{title}"))
        assert callable(getattr(estimator, f"set{title}"))
