"""Params with accessors: what every group of Params is built from."""

from __future__ import annotations

from typing import Any, ClassVar

from pyspark.ml.param import Param, Params

from sparkdml.params.converters import Converter


def param(name: str, doc: str, convert: Converter) -> Param[Any]:
    return Param(Params._dummy(), name, doc, convert)


class AccessibleParams(Params):
    """Spark's `setX` and `getX` for every Param that a class has, without writing out each."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in [name for name, value in vars(cls).items() if isinstance(value, Param)]:
            _add_accessors(cls, name)

    def value(self, name: str) -> Any:
        """A Param's value, or None if it has none."""
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None


def _add_accessors(cls: type, name: str) -> None:
    title = name[0].upper() + name[1:]

    def setter(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    def getter(self: Any) -> Any:
        return self.value(name)

    setter.__doc__ = f"Set `{name}`."
    getter.__doc__ = f"The value of `{name}`, or None."
    for prefix, method in (("set", setter), ("get", getter)):
        method.__name__ = f"{prefix}{title}"
        if not hasattr(cls, method.__name__):
            setattr(cls, method.__name__, method)
