"""Metadata lives in pyproject.toml; here is only what it can't say: the jar goes into the wheel."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

JAR = Path("jars/sparkdml-ui.jar")


class BuildWithJar(build_py):
    """Copies the built jar to sparkdml/jars/; a checkout (an editable install) uses it in place."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "sparkdml", "jars")
            self.mkpath(str(target))
            self.copy_file(str(JAR), str(target / JAR.name))


setup(cmdclass={"build_py": BuildWithJar})
