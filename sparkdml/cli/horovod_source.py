"""Horovod's source: which release, where it comes from, and the one change that it needs.

Horovod 0.28.1 asks for C++14 in its CMake files; the headers of torch 2.1 and later need C++17.
Upstream has made no release since, so we change the number in a copy of the source and build that.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

from sparkdml.errors import SetupError

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# What Horovod needs when it runs. Its build asks for the same ones.
RUNTIME_REQUIREMENTS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4.0")

_CMAKE_FILES = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
_CXX14 = re.compile(r"(CMAKE_CXX_STANDARD\s+)14\b")


def pinned_requirement() -> str:
    """A line for a requirements file: pip refuses an archive with another hash."""
    return f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n"


def unpack(archive: Path, into: Path) -> Path:
    """Unpack the source archive and return the folder that holds setup.py."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            target = (into / member.name).resolve()
            if not target.is_relative_to(into.resolve()) or not (member.isfile() or member.isdir()):
                raise SetupError(
                    f"{archive.name} contains {member.name!r}, which is not a regular file below "
                    "the target folder. Delete the archive and download it again."
                )
        tar.extractall(into)
    root = into / f"horovod-{HOROVOD_VERSION}"
    if not (root / "setup.py").is_file():
        raise SetupError(f"{archive.name} does not contain the source of Horovod {HOROVOD_VERSION}")
    return root


def raise_cxx_standard(text: str) -> tuple[str, int]:
    """Replace C++14 by C++17 in a CMake file's text; also return the number of replacements."""
    return _CXX14.subn(r"\g<1>17", text)


def patch(root: Path) -> None:
    """Make the unpacked source use C++17. A second call raises, as there is nothing to replace."""
    for name in _CMAKE_FILES:
        path = root / name
        text, changes = raise_cxx_standard(path.read_text())
        if not changes:
            raise SetupError(
                f"{name} of Horovod {HOROVOD_VERSION} does not set CMAKE_CXX_STANDARD 14: sparkdml"
                " can't build this source"
            )
        path.write_text(text)
