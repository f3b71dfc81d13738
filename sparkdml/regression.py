"""TorchRegressor and its model: one number per row, like Spark's own regressors. Driver only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from sparkdml.errors import ParameterError
from sparkdml.estimator import TorchEstimator
from sparkdml.fitting.fit import Fit
from sparkdml.inference.outputs import Encoder, Output, Raw
from sparkdml.model import TorchModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class TorchRegressionModel(TorchModel):
    """Adds `predictionCol`, a double."""

    def _columns(self, outputs: tuple[Output, ...]) -> tuple[tuple[str, Encoder], ...]:
        if len(outputs) != 1 or not outputs[0].is_number:
            shapes = ", ".join(str(list(output.shape)) for output in outputs)
            raise ParameterError(
                "model",
                f"a module whose outputs for a row are of shape {shapes}",
                "one that returns one number per row",
                "Use TorchEstimator for other outputs.",
            )
        return ((self.value("predictionCol"), Raw(outputs[0], is_prediction=True)),)


class TorchRegressor(TorchEstimator):
    """A `TorchEstimator` for regression, a replacement for Spark's own regressors.

    The loss is MSELoss unless another is given; the model returns one number per row.

    >>> regressor = dml.TorchRegressor(model=Net, optimizer=partial(torch.optim.Adam, lr=1e-3))
    >>> RegressionEvaluator().evaluate(regressor.fit(df).transform(df))
    """

    _model_class = TorchRegressionModel

    def __init__(self, **params: Any) -> None:
        """Takes all arguments of `TorchEstimator`."""
        super().__init__(**params)
        self._setDefault(loss=nn.MSELoss())

    def _prepare(self, dataset: DataFrame) -> Fit:
        if self.value("step") is not None:
            raise ParameterError(
                "step", self.value("step"), "left out: a regressor needs a loss. Use TorchEstimator"
            )
        return super()._prepare(dataset)
