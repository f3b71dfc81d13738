"""Built wheels, kept for the user: the key that says what a wheel fits, and writing it whole.

A wheel of Horovod links against one torch build, one Python, one C library and one C++ ABI. All of
them are in the key, so a wheel that was found is a wheel that fits.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BuildKey:
    """Everything that a wheel of Horovod depends on."""

    horovod: str
    torch: str  # with its local part: 2.13.0+cpu and 2.13.0 are different builds
    python: str  # the interpreter's tag, such as cp311
    platform: str  # such as linux-x86_64
    libc: str
    cxx11_abi: bool
    flags: tuple[tuple[str, str], ...]

    def folder(self) -> str:
        """A folder name that a person can read; the build flags are in it as a short hash."""
        flags = hashlib.sha256(repr(sorted(self.flags)).encode()).hexdigest()[:10]
        parts = (
            f"horovod{self.horovod}",
            f"torch{self.torch}",
            self.python,
            self.platform,
            self.libc,
            f"cxx11abi{int(self.cxx11_abi)}",
            flags,
        )
        return "-".join(re.sub(r"[^A-Za-z0-9.+_]", "_", part) for part in parts)


def key_of_this_machine(horovod: str, flags: Mapping[str, str]) -> BuildKey:
    import torch

    return BuildKey(
        horovod=horovod,
        torch=torch.__version__,
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=sysconfig.get_platform(),
        libc="".join(platform.libc_ver()) or "libc",
        cxx11_abi=torch.compiled_with_cxx11_abi(),
        flags=tuple(sorted(flags.items())),
    )


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/sparkdml/wheels`, or below `~/.cache` where that isn't set."""
    # The XDG rule: a relative path counts as not set.
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(environment.get("HOME") or Path.home()) / ".cache"
    return base / "sparkdml" / "wheels"


class WheelCache:
    """One folder for each key, with one wheel in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: BuildKey) -> Path | None:
        wheels = sorted((self.root / key.folder()).glob("*.whl"))
        return wheels[-1] if wheels else None

    def store(self, key: BuildKey, wheel: Path) -> Path:
        """Copy a wheel in; another process sees all of it or nothing."""
        folder = self.root / key.folder()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{wheel.name}.{os.getpid()}.partial"
        try:
            shutil.copyfile(wheel, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, folder / wheel.name)
        finally:
            partial.unlink(missing_ok=True)
        return folder / wheel.name

    def discard(self, wheel: Path) -> None:
        wheel.unlink(missing_ok=True)

    @contextmanager
    def lock(self, key: BuildKey) -> Iterator[None]:
        """Held while a wheel is built: a second process waits, and then finds the wheel."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{key.folder()}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
