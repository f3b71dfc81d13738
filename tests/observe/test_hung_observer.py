"""A collector that stops for good in the middle of a real fit: the run is as it would have been."""

import threading

import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.observe.observers import Observers
from sparkdml.testing.models import TinyClassifier

pytestmark = pytest.mark.spark


class Stops:
    def __init__(self):
        self.num_events, self.over = 0, threading.Event()

    def handle(self, rank, event):
        self.num_events += 1
        if self.num_events > 3:
            self.over.wait()

    def close(self):
        """Never reached in time."""


def make_estimator(kind=dml.TorchEstimator):
    return kind(
        model=TinyClassifier,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        numWorkers=2,
        epochs=3,
        batchSize=16,
        heartbeatTimeout=2.0,
        verbose=0,
    )


def test_the_result_is_the_same(spark, monkeypatch):
    rows = [([float(i % 3 == k) for k in range(4)], i % 3) for i in range(300)]
    frame = spark.createDataFrame(rows, "features array<float>, label long")
    expected = make_estimator().fit(frame).module.state_dict()
    stops = Stops()

    class Unwatched(dml.TorchEstimator):
        def _observers(self, spark):
            return [stops]

    monkeypatch.setattr(Observers.__init__, "__defaults__", (None, 0.5))
    with pytest.warns(UserWarning, match=r"(Stops|Stragglers) has been blocked for 0.5 s"):
        found = make_estimator(Unwatched).fit(frame).module.state_dict()
    stops.over.set()
    assert stops.num_events >= 4
    assert all(torch.equal(found[name], expected[name]) for name in expected)
