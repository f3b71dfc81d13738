"""A cache of built wheels in the user's home, and the key under which a wheel is stored.

A wheel of Horovod links against one build of torch, one Python, one C library and one C++ ABI. All
of them are in the key, so a cached wheel always matches.
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
    torch: str  # with its local version: 2.13.0+cpu and 2.13.0 are different builds
    python: str  # the interpreter's tag, such as cp311
    platform: str  # such as linux-x86_64
    libc: str
    cxx11_abi: bool
    flags: tuple[tuple[str, str], ...]

    def folder(self) -> str:
        """Return a readable folder name, which includes a short hash of the build flags."""
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
    """Return `$XDG_CACHE_HOME/sparkdml/wheels`, or `~/.cache/sparkdml/wheels` if it isn't set."""
    # As XDG specifies, a relative path counts as not set.
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
        """Copy a wheel into the cache atomically."""
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
        """Lock out other builds of the same wheel; they wait and then find it in the cache."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{key.folder()}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
