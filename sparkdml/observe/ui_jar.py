"""Puts sparkdml-ui.jar into a Spark application that already runs, and calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CLASS = "io.sparkdml.ui.TrainingUi"


class NoTrainingTab(Exception):
    """Why there can't be a Training tab. Never a reason not to train."""


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
            "Spark Connect gives no access to the driver's JVM. On the server: --jars "
            "sparkdml-ui.jar, and train in a classic session to fill it"
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
    except PySparkException as error:  # pyspark makes its own of some Java exceptions
        raise NoTrainingTab(
            f"sparkdml-ui.jar does not fit Spark {context.version}: {error}"
        ) from error
    except (Py4JError, TypeError, AttributeError) as error:
        # TypeError: py4j took the name for a package, as the class isn't there.
        raise NoTrainingTab(f"Spark's JVM did not take sparkdml-ui.jar: {error}") from error


def _is_loaded(jvm: Any) -> bool:
    from py4j.protocol import Py4JJavaError

    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        jvm.java.lang.Class.forName(_CLASS, True, loader)
    except Py4JJavaError:  # ClassNotFoundException
        return False
    return True


def _add_to_class_path(jvm: Any, jar: Path) -> None:
    """By Spark's own class loader, which takes jars at any time; --jars goes the same way."""
    mutable = jvm.java.lang.Class.forName("org.apache.spark.util.MutableURLClassLoader")
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    while loader is not None and not mutable.isInstance(loader):
        loader = loader.getParent()
    if loader is None:
        raise NoTrainingTab(
            f"this JVM takes no jar after its start. Start it with --jars {jar} "
            "--conf spark.plugins=io.sparkdml.ui.TrainingPlugin"
        )
    loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())
