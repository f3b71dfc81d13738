"""Training on a stream: an object for `foreachBatch` of Structured Streaming. Driver only.

Spark calls it at least once for every batch, and again with the same batch number after a failure.
With a path, the model and the batch number are saved atomically, so that each batch is trained on
exactly once despite restarts.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, NoReturn

from sparkdml.checkpoint.stores.places import StoreAccess, resolve_place
from sparkdml.errors import ParameterError, SetupError
from sparkdml.session import find_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdml.estimator import TorchEstimator
    from sparkdml.model import TorchModel

KEPT = 2  # saved models: the newest, and the previous one


class OnlineTrainer:
    """Fits the estimator to each batch of a stream, starting from the weights of the last.

    >>> trainer = OnlineTrainer(estimator, path="file:/models/clicks")
    >>> query = stream.writeStream.foreachBatch(trainer).start()
    >>> trainer.model.transform(df)

    Batches without rows leave the model unchanged. The optimizer restarts with every batch: only
    weights and buffers are carried over.
    """

    def __init__(
        self,
        estimator: TorchEstimator,
        path: str | None = None,
        *,
        model: TorchModel | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        """
        Args:
            estimator: what to fit; `epochs` counts passes over each batch.
            path: where the model is saved after every batch, and loaded from after a restart; None
                to keep it in memory only.
            model: initial weights if `path` holds no model yet; None for the estimator's own.
            spark: the session that reads `path`; None for the active one.
        """
        from sparkdml.estimator import TorchEstimator

        if not isinstance(estimator, TorchEstimator):
            raise ParameterError("estimator", estimator, "a TorchEstimator")
        if estimator.value("checkpoint") is not None:
            raise ParameterError(
                "estimator",
                "one with checkpoint=",
                "one without: every batch would be a different run in the same place",
                "Pass path= to OnlineTrainer instead",
            )
        self._estimator = estimator
        self._path = None if path is None else path.rstrip("/")
        self.model = model
        self.last_batch = -1  # its number, as Spark counts
        self.num_rows = 0  # trained on since this object was made
        if self._path is not None:
            self._restore(find_session(None, spark))

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Train on a batch; called by Spark. A batch number that was seen already is skipped."""
        if number <= self.last_batch:
            return
        if not batch.isEmpty():
            estimator = self._estimator
            if self.model is not None:
                estimator = estimator.copy({estimator.getParam("warmStart"): self.model})
            fitted = estimator.fit(batch)
            if self._path is not None:
                fitted.write().overwrite().save(f"{self._path}/{_name(number)}")
                self._prune(batch.sparkSession, number)
            self.model = fitted
            self.num_rows += int(fitted.history[-1]["rows"]) if len(fitted.history) else 0
        self.last_batch = number

    def _restore(self, spark: SparkSession) -> None:
        from sparkdml.persistence.folder import open_folder
        from sparkdml.persistence.spark_ml import ModelReader, find_model_class

        with self._open(spark) as access:
            saved = _whole_batches(access)
        if saved:
            self.last_batch = saved[-1]
            # With its own class: a classifier's model, for instance, is not a plain TorchModel.
            folder = open_folder(spark, f"{self._path}/{_name(saved[-1])}")
            self.model = ModelReader(find_model_class(folder)).load_from(folder)

    def _prune(self, spark: SparkSession, newest: int) -> None:
        """Remove all models but the last two; warn of those that can't be removed."""
        try:
            with self._open(spark) as access:
                old = [number for number in _whole_batches(access) if number < newest]
                store = access.driver_store()
                for number in old[: -(KEPT - 1)]:
                    for name in store.names(f"{_name(number)}/"):
                        store.remove(name)
        except OSError as error:
            warnings.warn(f"could not remove old models from {self._path}: {error}", stacklevel=2)

    def _open(self, spark: SparkSession) -> StoreAccess:
        assert self._path is not None
        return resolve_place(self._path, None, spark)

    def __reduce__(self) -> NoReturn:
        raise SetupError(
            "an OnlineTrainer can't be pickled: on Spark Connect foreachBatch runs at the server, "
            "and the model would stay there. Use a classic session"
        )


def _name(number: int) -> str:
    return f"batch-{number:010d}"


def _whole_batches(access: StoreAccess) -> list[int]:
    """Return the batch numbers of the models that were saved completely."""
    found = (
        re.search(r"batch-(\d+)/metadata/_SUCCESS$", name)
        for name in access.driver_store().names("batch-")
    )
    return sorted(int(match[1]) for match in found if match is not None)
