"""Strategies are saved with an estimator by their arguments, as plain JSON."""

import json

import pytest

import sparkdml as dml
from sparkdml.persistence.references import decode_reference, encode_reference


@pytest.mark.parametrize(
    "strategy",
    [
        dml.Gossip([(0, 1), (1, 2)]),
        dml.Gossip("random", degree=6, seed=3),
        dml.ADPSGD(every=7, seed=2),
        dml.AdaptiveBalance(every=3, topology="ring"),
        dml.BackupWorkers(backup=2, max_lag=5, backend="torch"),
    ],
)
def test_round_trip(strategy):
    saved = json.loads(json.dumps(encode_reference(strategy)))
    assert repr(decode_reference(saved, "strategy")) == repr(strategy)
