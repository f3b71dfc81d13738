"""`dml.compare`: one model, one set of rows, several strategies; what each costs and where it ends.

It answers the survey's questions of distributed learning: is the state of a single process reached,
how far from it, how fast, and where does each strategy lie between computation, communication and
accuracy?

An observer that adds up what the ranks of a run tell: their time, bytes and messages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdml.comparison.result import Comparison, Outcome, distance
from sparkdml.errors import ParameterError, SparkDMLError
from sparkdml.inference.reading import plan_reading
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.base import Strategy
from sparkdml.training.modules import floating_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.estimator import TorchEstimator
    from sparkdml.model import TorchModel


PARTS = ("compute_seconds", "communication_seconds", "sent_bytes", "messages")


class Tally:
    """Sums over the whole run, restarts included."""

    def __init__(self) -> None:
        self.workers = 0
        self._sums = dict.fromkeys(PARTS, 0.0)

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "submission":
            self.workers = int(event["workers"])
        elif event["kind"] == "rank":
            seconds = event["seconds"]
            self._sums["compute_seconds"] += seconds.get("compute", 0.0) + seconds.get("data", 0.0)
            self._sums["communication_seconds"] += seconds.get("communication", 0.0)
            self._sums["sent_bytes"] += event.get("bytes", 0)
            self._sums["messages"] += event.get("messages", 0)
        elif event["kind"] == "client":  # of a parameter server: what it sent to this worker
            self._sums["sent_bytes"] += event["bytes_pulled"]
            self._sums["messages"] += event["pulls"]
        elif event["kind"] == "communicator":  # of a group, which has no rows
            self._sums["sent_bytes"] += event["bytes"]
            self._sums["messages"] += event["messages"]

    def means(self) -> dict[str, Any]:
        """Of a worker: what helpers without rows (communicators, servers) sent is shared out."""
        return {name: total / max(1, self.workers) for name, total in self._sums.items()}

    def close(self) -> None:
        """Nothing to give back; the sums stay."""


SINGLE = "single process"


def compare(
    estimator: TorchEstimator,
    df: DataFrame,
    strategies: Mapping[str, Strategy] | Sequence[Strategy],
    *,
    on: DataFrame | None = None,
    single: bool = True,
) -> Comparison:
    """Train one model under several strategies, one after the other, and set them side by side.

    Args:
        estimator: everything but the strategy; its `optimizer` is left out where a strategy brings
            its own steps. It must have no `checkpoint`, which would make one run of several.
        df: the rows to train on. They are read once for each strategy: `cache()` them.
        strategies: by name, or a list, whose names are what they print as.
        on: the rows that the trained models are judged on; those of `df` if left out.
        single: whether to train in one process as well, with the same rows a step, for how far
            each strategy ends from there. (It reads the rows in another order than several workers
            do, so that even exact synchronous SGD ends at some distance: the yardstick.) It makes
            steps of SGD by the estimator's `optimizer`; where that has none, the first strategy
            trains on one worker.

    Raises:
        ParameterError: a strategy can't train this model; before any training.
    """
    named = _named(strategies)
    trained = {name: _with(estimator, strategy) for name, strategy in named.items()}
    # Without an optimizer there are no steps of SGD: all strategies bring their own.
    has_optimizer = estimator.isDefined("optimizer")
    alone = _with(estimator, AllReduce() if has_optimizer else next(iter(named.values())))
    alone._set(numWorkers=1)
    _check(estimator, df, on, [*trained.values(), *([alone] if single else [])])
    outcomes: list[Outcome] = []
    models: dict[str, TorchModel] = {}
    judged_on = df if on is None else on
    for name, changed in trained.items():
        outcomes.append(_train(name, changed, df=df, judged_on=judged_on, models=models))
    if not models:
        raise SparkDMLError("; ".join(f"{one.name}: {one.error}" for one in outcomes))
    if single:
        workers = max(one.workers for one in outcomes)
        alone._set(batchSize=workers * estimator.value("batchSize"))
        outcomes.append(_train(SINGLE, alone, df=df, judged_on=judged_on, models=models))
    return Comparison(_with_distances(outcomes, models), models)


def _named(strategies: Mapping[str, Strategy] | Sequence[Strategy]) -> dict[str, Strategy]:
    allowed = "a list of strategies, or a dict of them by name"
    if isinstance(strategies, Strategy) or not isinstance(strategies, Mapping | Sequence):
        raise ParameterError("strategies", strategies, allowed)
    if isinstance(strategies, Mapping):
        named = dict(strategies)
    else:
        named = {repr(strategy): strategy for strategy in strategies}
        if len(named) < len(strategies):
            raise ParameterError("strategies", list(named), "different from each other")
    if not named or not all(isinstance(strategy, Strategy) for strategy in named.values()):
        raise ParameterError("strategies", strategies, allowed)
    if SINGLE in named:
        raise ParameterError("strategies", SINGLE, "named differently from the reference run")
    return named


def _check(
    estimator: TorchEstimator,
    df: DataFrame,
    on: DataFrame | None,
    trained: Sequence[TorchEstimator],
) -> None:
    """Everything that can be found wrong before any job."""
    place = estimator.value("checkpoint")
    if place is not None:
        raise ParameterError("checkpoint", place, "left out: each strategy is a run of its own")
    fits = [changed._prepare(df) for changed in trained]
    if on is not None:
        plan_reading(
            estimator,
            on.schema,
            fits[0].feed.known(estimator.feature_columns()),
            floating_type(fits[0].module),
            with_targets=True,
            is_supervised=estimator.value("step") is None,
        )


def _with(estimator: TorchEstimator, strategy: Strategy) -> TorchEstimator:
    changed: TorchEstimator = estimator.copy()
    if strategy.has_own_optimizer:
        changed.clear(changed.getParam("optimizer"))
    changed._set(strategy=strategy)
    return changed


def _train(
    name: str,
    estimator: TorchEstimator,
    df: DataFrame,
    judged_on: DataFrame,
    models: dict[str, TorchModel],
) -> Outcome:
    """One strategy. What fails is told in its row: the others are worth having all the same."""
    tally, began = Tally(), time.monotonic()
    try:
        fitted = estimator.fit_watched(df, tally)
    except Exception as error:
        return Outcome(name, workers=tally.workers, error=_in_a_line(error))
    wall_seconds = time.monotonic() - began
    models[name] = fitted
    trained = Outcome(
        name=name,
        workers=tally.workers,
        epochs=len(fitted.history),
        steps=int(sum(fitted.history.steps)),
        seconds=sum(fitted.history.seconds),
        wall_seconds=wall_seconds,
        **tally.means(),
    )
    try:
        judged = fitted.evaluate(judged_on)
    except Exception as error:
        return replace(trained, error=f"it was trained, but not judged: {_in_a_line(error)}")
    metrics = {metric: value for metric, value in judged.items() if metric != "loss"}
    return replace(trained, loss=judged["loss"], metrics=metrics)


def _in_a_line(error: Exception) -> str:
    """Return the first line of one of our errors, or the last exception in Spark's traceback."""
    text = str(error).strip()
    if isinstance(error, SparkDMLError):
        return text.partition("\n")[0]
    _, found, stack = text.rpartition("Traceback (most recent call last):")
    raised = [line for line in stack.splitlines() if line and not line[0].isspace()]
    if found and raised:
        return raised[0]
    return f"{type(error).__name__}: {text}".partition("\n")[0]


def _with_distances(outcomes: list[Outcome], models: Mapping[str, TorchModel]) -> list[Outcome]:
    if SINGLE not in models:
        return outcomes
    reference = models[SINGLE].module.state_dict()
    return [
        replace(one, distance=distance(models[one.name].module.state_dict(), reference))
        if one.name in models
        else one
        for one in outcomes
    ]
