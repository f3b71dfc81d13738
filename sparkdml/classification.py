"""TorchClassifier and its model: the columns, Params and checks of Spark's own classifiers.

Driver only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from sparkdml.errors import DataError, ParameterError
from sparkdml.estimator import TorchEstimator
from sparkdml.fitting.fit import Fit
from sparkdml.inference.outputs import SINGLE, Encoder, Output
from sparkdml.inference.probe import find_largest_label, try_one_row
from sparkdml.inference.scores import Link, Scores, find_link
from sparkdml.model import TorchModel
from sparkdml.params import ClassificationParams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class TorchClassificationModel(TorchModel, ClassificationParams):
    """Adds `rawPredictionCol`, `probabilityCol` (vectors) and `predictionCol` (a double).

    Probabilities follow from the loss: softmax for CrossEntropyLoss, the exponential for NLLLoss,
    the sigmoid for a model with one output (the second of two classes). With `thresholds` the class
    with the largest probability/threshold is predicted.
    """

    @property
    def numClasses(self) -> int:
        """The number of classes that the model distinguishes."""
        return count_classes(self._known_outputs())

    def _columns(self, outputs: tuple[Output, ...]) -> tuple[tuple[str, Encoder], ...]:
        classes = count_classes(outputs)
        thresholds = self.value("thresholds")
        if thresholds is not None and len(thresholds) != classes:
            raise ParameterError(
                "thresholds", thresholds, f"a list of {classes} numbers, one for each class"
            )
        link: Link = find_link(self._loss, is_one_number=outputs[0].is_number)
        limits = None if thresholds is None else tuple(thresholds)
        return (
            (self.value("rawPredictionCol"), Scores("raw", link)),
            (self.value("probabilityCol"), Scores("probability", link)),
            (self.value("predictionCol"), Scores("class", link, limits)),
        )


class TorchClassifier(TorchEstimator, ClassificationParams):
    """A `TorchEstimator` for classification, a replacement for Spark's own classifiers.

    The loss is CrossEntropyLoss unless another is given; the model has one output for each class,
    or a single one with BCEWithLogitsLoss. Labels are whole numbers from 0 on, as from
    StringIndexer; one pass over their column checks that before the workers start.

    >>> classifier = dml.TorchClassifier(
    ...     model=Net, optimizer=partial(torch.optim.Adam, lr=1e-3), epochs=5
    ... )
    >>> fitted = classifier.fit(df)        # a TorchClassificationModel
    >>> BinaryClassificationEvaluator().evaluate(fitted.transform(df))
    """

    _model_class = TorchClassificationModel

    def __init__(
        self,
        *,
        rawPredictionCol: str | None = None,
        probabilityCol: str | None = None,
        thresholds: list[float] | None = None,
        **params: Any,
    ) -> None:
        """Takes all arguments of `TorchEstimator` as well."""
        super().__init__(**params)
        self._setDefault(loss=nn.CrossEntropyLoss())
        given = {
            "rawPredictionCol": rawPredictionCol,
            "probabilityCol": probabilityCol,
            "thresholds": thresholds,
        }
        self._set(**{name: value for name, value in given.items() if value is not None})

    def _prepare(self, dataset: DataFrame) -> Fit:
        if self.value("step") is not None:
            raise ParameterError(
                "step",
                self.value("step"),
                "left out: a classifier needs a loss. Use TorchEstimator",
            )
        fit = super()._prepare(dataset)
        if self.value("preprocess") is None:  # which may make the labels
            name = self.value("labelCol")
            largest = find_largest_label(dataset, name)
            classes = try_one_row(fit.module, fit.feed, self.feature_columns(), dataset)
            if largest is not None and classes is not None and largest >= classes:
                raise DataError(
                    f"the label column {name!r} has the class {largest}, but the model has "
                    f"{classes} classes, 0 to {classes - 1}. Give it {largest + 1} outputs, "
                    "or number the classes from 0 on (StringIndexer)"
                )
        return fit


def count_classes(outputs: tuple[Output, ...]) -> int:
    if len(outputs) != 1 or outputs[0].name != SINGLE or len(outputs[0].shape) > 1:
        shapes = ", ".join(str(list(output.shape)) for output in outputs)
        raise ParameterError(
            "model",
            f"a module whose outputs for a row are of shape {shapes}",
            "one that returns one number for each class",
            "Use TorchEstimator for other outputs.",
        )
    return 2 if outputs[0].is_number else outputs[0].shape[0]
