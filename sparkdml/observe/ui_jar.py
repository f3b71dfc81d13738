"""Loads sparkdml-ui.jar into the JVM of a running Spark application, for the Training tab.

Runs in the driver, on the thread of `SparkUi`, and speaks to the JVM through py4j. It owns nothing:
the Java object that it returns belongs to the application, and lives as long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CLASS = "io.sparkdml.ui.TrainingUi"


class NoTrainingTab(Exception):
    """The reason why there can't be a Training tab. It never keeps a run from training."""


def jar_path() -> Path:
    """The jar inside the installed package, or in the checkout beside it."""
    package = Path(__file__).parents[1]
    for folder in (package / "jars", package.parent / "jars"):
        if (folder / "sparkdml-ui.jar").is_file():
            return folder / "sparkdml-ui.jar"
    raise NoTrainingTab(f"{package / 'jars' / 'sparkdml-ui.jar'} is missing; reinstall sparkdml")


def attach(spark: Any) -> Any:
    """The Java object that posts events, for this session's application; always the same one."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise NoTrainingTab(
            "Spark Connect gives no access to the driver's JVM; train in a classic session to see "
            "runs in the tab"
        )
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        context = spark.sparkContext
        jvm = context._jvm
        if not _is_loaded(jvm):
            _add_to_class_path(jvm, jar_path())
        return jvm.io.sparkdml.ui.TrainingUi.attach(context._jsc.sc())
    except Py4JJavaError as error:
        raise NoTrainingTab(
            f"sparkdml-ui.jar does not fit Spark {context.version}: {error.java_exception}"
        ) from error
    except PySparkException as error:  # pyspark converts some Java exceptions
        raise NoTrainingTab(
            f"sparkdml-ui.jar does not fit Spark {context.version}: {error}"
        ) from error
    except (Py4JError, TypeError, AttributeError) as error:
        # TypeError: the class isn't there, so py4j took its name for a package.
        raise NoTrainingTab(f"Spark's JVM could not load sparkdml-ui.jar: {error}") from error


def _is_loaded(jvm: Any) -> bool:
    from py4j.protocol import Py4JJavaError

    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        jvm.java.lang.Class.forName(_CLASS, True, loader)
    except Py4JJavaError:  # ClassNotFoundException
        return False
    return True


def _add_to_class_path(jvm: Any, jar: Path) -> None:
    """Add the jar to Spark's own class loader, as --jars does, which is possible at any time."""
    mutable = jvm.java.lang.Class.forName("org.apache.spark.util.MutableURLClassLoader")
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    while loader is not None and not mutable.isInstance(loader):
        loader = loader.getParent()
    if loader is None:
        raise NoTrainingTab(
            f"this JVM can't load a jar after its start. Start it with --jars {jar} "
            "--conf spark.plugins=io.sparkdml.ui.TrainingPlugin"
        )
    loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())
