"""Which checkpoints pruning leaves: nothing is deleted that can't be replaced."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.checkpoint.keep import Keep, parse_keep, to_prune
from sparkdml.checkpoint.manifest import Manifest, checkpoint_id
from sparkdml.errors import ParameterError


def node(step, submission=1, kind="step", epoch=0, pruned=False, **metrics):
    return Manifest(
        id=checkpoint_id(step, submission, kind),
        parent=None,
        submission=submission,
        step=step,
        epoch=epoch,
        kind=kind,
        num_workers=2,
        global_batch=64,
        plan={},
        plan_hash="",
        data={},
        parts=(),
        metrics=metrics,
        pruned=pruned,
    )


def steps(manifests):
    return [manifest.step for manifest in manifests]


@st.composite
def runs(draw):
    """Manifests of a few submissions, in any order."""
    found = []
    for submission in range(1, draw(st.integers(1, 3)) + 1):
        for step in sorted(draw(st.sets(st.integers(0, 60), max_size=12))):
            kind = (
                "root" if step == 0 else draw(st.sampled_from(["step", "epoch", "step", "final"]))
            )
            value = draw(st.sampled_from([None, math.nan, 0.1, 0.2, 0.3]))
            metrics = {} if value is None else {"val_loss": value}
            pruned = draw(st.integers(0, 4)) == 0 and kind in ("step", "epoch")
            found.append(node(step, submission, kind, step // 10, pruned, **metrics))
    return draw(st.permutations(found))


keeps = st.builds(
    Keep,
    last=st.integers(1, 5),
    best=st.sampled_from([None, "val_loss", "unknown"]),
    mode=st.sampled_from(["min", "max"]),
    each_epoch=st.booleans(),
)


@given(runs(), keeps, st.data())
def test_what_can_not_be_replaced_stays(manifests, keep, data):
    ids = [manifest.id for manifest in manifests]
    protected = data.draw(st.sets(st.sampled_from(ids)) if ids else st.just(set()))
    pruned = to_prune(manifests, keep, protected)
    gone = {manifest.id for manifest in pruned}
    left = [m for m in manifests if m.id not in gone and not m.pruned]
    there = [m for m in manifests if not m.pruned]

    assert not gone & protected
    assert not any(m.pruned or m.kind in ("root", "final") for m in pruned)
    newest = sorted(there, key=lambda m: (m.submission, m.step))[-keep.last :]
    assert all(m in left for m in newest)
    if keep.each_epoch:
        epochs = {m.epoch for m in there if m.kind == "epoch"}
        assert epochs == {m.epoch for m in left if m.kind == "epoch"}
    if keep.best == "val_loss":
        values = [m.metrics["val_loss"] for m in there if "val_loss" in m.metrics]
        values = [value for value in values if not math.isnan(value)]
        if values:
            best = min(values) if keep.mode == "min" else max(values)
            assert best in [m.metrics.get("val_loss") for m in left]


@given(runs(), keeps)
def test_pruning_twice_prunes_nothing_more(manifests, keep):
    gone = {manifest.id for manifest in to_prune(manifests, keep)}
    after = [dataclasses.replace(m, pruned=m.pruned or m.id in gone) for m in manifests]
    assert to_prune(after, keep) == []


@given(runs(), keeps)
def test_all_else_goes(manifests, keep):
    """Pruning does prune: what is left has a reason."""
    gone = {manifest.id for manifest in to_prune(manifests, keep)}
    left = [m for m in manifests if m.id not in gone and not m.pruned]
    reasons = [m for m in left if m.kind in ("root", "final")]
    epochs = {m.epoch for m in left} if keep.each_epoch else ()
    assert len(left) <= len(reasons) + keep.last + len(epochs) + (keep.best is not None)


def test_the_last_ones_stay():
    run = [node(0, kind="root"), *(node(step) for step in (10, 20, 30, 40))]
    assert steps(to_prune(run, Keep(last=2))) == [10, 20]
    assert to_prune(run, parse_keep(None)) == []


def test_the_last_ones_are_those_of_the_newest_submission():
    """A resume from an older checkpoint reaches old steps again: these are the newer ones."""
    run = [node(0, kind="root"), node(80), node(90), node(50, 2), node(60, 2)]
    assert steps(to_prune(run, Keep(last=2))) == [80, 90]


def test_nan_is_never_the_best():
    run = [node(10, loss=math.nan), node(20, loss=3.0), node(30, loss=2.0), node(40, loss=9.0)]
    assert steps(to_prune(run, Keep(last=1, best="loss"))) == [10, 20]
    assert steps(to_prune(run, Keep(last=1, best="loss", mode="max"))) == [10, 20, 30]
    only_nan = [node(10, loss=math.nan), node(20, loss=math.nan)]
    assert steps(to_prune(only_nan, Keep(last=1, best="loss"))) == [10]


def test_the_best_is_the_state_that_was_measured():
    """Within an epoch, checkpoints carry the metrics of the epoch before."""
    run = [
        node(100, kind="epoch", epoch=1, val_loss=0.5),
        node(120, epoch=1, val_loss=0.5),
        node(200, kind="epoch", epoch=2, val_loss=0.9),
    ]
    assert steps(to_prune(run, Keep(last=1, best="val_loss"))) == [120]
    assert steps(to_prune(run[1:], Keep(last=1, best="val_loss"))) == []
    same = [node(120, epoch=1, val_loss=0.5), node(200, kind="epoch", epoch=2, val_loss=0.5)]
    assert steps(to_prune([*same, node(220)], Keep(last=1, best="val_loss"))) == [120]


def test_an_epoch_that_was_trained_again_replaces_the_first():
    run = [
        node(0, kind="root"),
        node(100, kind="epoch", epoch=1),
        node(200, kind="epoch", epoch=2),
        node(250, epoch=2),
        node(200, 2, kind="epoch", epoch=2),
        node(300, 2, kind="final", epoch=3),
    ]
    gone = to_prune(run, Keep(last=1, each_epoch=True))
    assert [(m.step, m.submission) for m in gone] == [(200, 1), (250, 1)]


def test_keep_is_understood():
    assert parse_keep(5) == Keep(last=5)
    assert parse_keep(None).last is None
    keep = Keep(best="val_loss", mode="max")
    assert parse_keep(keep) is keep
    assert keep.needs_epoch_ends
    assert Keep(each_epoch=True).needs_epoch_ends
    assert not Keep().needs_epoch_ends


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "all", "3", []])
def test_keep_names_what_is_allowed(wrong):
    with pytest.raises(ParameterError, match="keep must be at least 1"):
        parse_keep(wrong)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("last", 0), ("last", False), ("last", "3"), ("best", ""), ("best", 5)),
        *(("mode", "least"), ("each_epoch", 1)),
    ],
)
def test_each_field_of_keep_is_checked(field, wrong):
    with pytest.raises(ParameterError, match=f"keep.{field} must be"):
        Keep(**{field: wrong})
