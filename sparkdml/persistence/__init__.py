"""Saving and loading of estimators and models, without executing code unless allowed."""

from __future__ import annotations

from sparkdml.persistence.permission import allow_packages as allow_packages
from sparkdml.persistence.permission import allow_pickle as allow_pickle
from sparkdml.persistence.spark_ml import EstimatorPersistence as EstimatorPersistence
from sparkdml.persistence.spark_ml import ModelPersistence as ModelPersistence

__all__ = ["EstimatorPersistence", "ModelPersistence", "allow_packages", "allow_pickle"]
