"""The three columns of a classifier, as in Spark's own: scores, probabilities, the class.

The driver declares them; workers compute them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from sparkdml.inference.outputs import SINGLE, Outputs, to_lists

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

# How outputs become probabilities: as the loss interprets them.
Link = Literal["softmax", "exp", "sigmoid", "binary"]


def find_link(loss: object, is_one_number: bool) -> Link:
    if is_one_number:
        return "binary" if isinstance(loss, nn.BCELoss) else "sigmoid"
    return "exp" if isinstance(loss, nn.NLLLoss) else "softmax"


def to_scores(outputs: Tensor, link: Link) -> Tensor:
    """Return one for each class. A single output is the second of two classes, as in Spark."""
    scores = outputs.double()
    if link == "sigmoid":
        scores = scores.reshape(-1, 1)
        return torch.cat([-scores, scores], dim=1)
    if link == "binary":
        scores = scores.reshape(-1, 1)
        return torch.cat([1 - scores, scores], dim=1)
    return scores


def to_probabilities(scores: Tensor, link: Link) -> Tensor:
    if link == "softmax":
        return scores.softmax(dim=1)
    if link == "exp":
        return scores.exp()
    return scores.sigmoid() if link == "sigmoid" else scores


def choose_class(scores: Tensor, link: Link, thresholds: tuple[float, ...] | None) -> Tensor:
    """Return the most probable class; with thresholds, the largest probability/threshold."""
    if thresholds is None:
        return scores.argmax(dim=1).double()
    limits = torch.tensor(thresholds, dtype=torch.float64)
    scaled = to_probabilities(scores, link) / limits
    return torch.where(limits == 0, torch.inf, scaled).argmax(dim=1).double()


@dataclass(frozen=True)
class Scores:
    """One of the three columns."""

    column: Literal["raw", "probability", "class"]
    link: Link
    thresholds: tuple[float, ...] | None = None

    def spark_type(self) -> DataType:
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import DoubleType

        return DoubleType() if self.column == "class" else VectorUDT()

    def encode(self, outputs: Outputs) -> pa.Array:
        scores = to_scores(outputs[SINGLE], self.link)
        if self.column == "class":
            return pa.array(choose_class(scores, self.link, self.thresholds).numpy())
        if self.column == "probability":
            scores = to_probabilities(scores, self.link)
        return dense_vectors(scores.numpy())


def dense_vectors(matrix: np.ndarray) -> pa.Array:
    """Convert rows to Spark ML's vectors, as the structs in which Spark stores them."""
    rows = len(matrix)
    return pa.StructArray.from_arrays(
        [
            pa.array(np.ones(rows, dtype=np.int8)),
            pa.nulls(rows, pa.int32()),
            pa.nulls(rows, pa.list_(pa.int32())),
            to_lists(matrix),
        ],
        names=["type", "size", "indices", "values"],
    )
