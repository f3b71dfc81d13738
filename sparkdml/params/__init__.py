"""The Spark ML Params of estimators and models, each defined in one place: see `params.param`."""

from __future__ import annotations

from sparkdml.params.data import DataParams
from sparkdml.params.objective import ObjectiveParams
from sparkdml.params.prediction import ClassificationParams, PredictionParams
from sparkdml.params.running import RunParams, WatchParams

__all__ = ["ClassificationParams", "PredictionParams", "TrainingParams"]


class TrainingParams(PredictionParams, ObjectiveParams, DataParams, RunParams, WatchParams):
    """All Params of an estimator."""

    def label_column(self) -> str | None:
        """The targets' column; a custom objective may need none."""
        if self.value("step") is not None and not self.isSet("labelCol"):
            return None
        name: str = self.value("labelCol")
        return name
