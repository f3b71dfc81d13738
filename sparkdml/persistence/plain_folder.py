"""Files of a saved model where there is no Spark at all: a folder of this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pyspark

from sparkdml.persistence.connect_folder import ConnectFolder


class PlainFolder(ConnectFolder):
    """The same layout; Spark's version in the metadata is that of the installed package."""

    def __init__(self, path: str) -> None:
        super().__init__(SimpleNamespace(version=pyspark.__version__), path)
