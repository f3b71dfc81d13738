"""Saving and loading (placeholder while it is written)."""


class EstimatorPersistence: ...


class ModelPersistence: ...
