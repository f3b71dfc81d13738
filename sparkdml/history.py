"""The history of a fit: one row per epoch, as numbers, as a table, as curves."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparkdml.errors import SetupError
from sparkdml.history_columns import NOT_CURVES, VALIDATION, WHOLE
from sparkdml.observe.curves import draw_panel

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_MAX_TABLE_ROWS = 30  # in a notebook
_RIGHT = ' style="text-align:right;padding:2px 8px"'


class History(Sequence[dict[str, float]]):
    """The measurements of each epoch; the same numbers that callbacks saw.

    `evaluations` has what an evaluator measured during training (see `ParameterServer`): dicts with
    `step`, `epoch`, `clock` and `seconds` besides `val_loss` and the metrics; empty without one.
    `backend` and `topology` say how the workers computed their sums (see `AllReduce`); None if they
    computed none.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, float]],
        stopped: str | None = None,
        first_step_seconds: float | None = None,
        evaluations: Sequence[dict[str, float]] = (),
        *,
        backend: str | None = None,
        topology: str | None = None,
    ) -> None:
        self._rows = [
            {name: int(value) if name in WHOLE else value for name, value in row.items()}
            for row in rows
        ]
        self.stopped = stopped  # why the run ended before its last epoch, if it did
        self.first_step_seconds = first_step_seconds  # from the call of fit until the first step
        self.evaluations = list(evaluations)
        self.backend, self.topology = backend, topology

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self._rows)

    @property
    def columns(self) -> list[str]:
        return list(self._rows[0]) if self._rows else []

    def __getattr__(self, name: str) -> list[float]:
        """A column by its name: `history.val_loss`."""
        if name.startswith("_"):  # also called during unpickling, before there are rows
            raise AttributeError(name)
        if name not in self.columns:
            raise AttributeError(f"the history has no {name!r}: it has {', '.join(self.columns)}")
        return [row[name] for row in self._rows]

    def to_pandas(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self._rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "stopped": self.stopped,
            "first_step_seconds": self.first_step_seconds,
            "evaluations": self.evaluations,
            "backend": self.backend,
            "topology": self.topology,
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> History:
        return cls(
            saved["rows"],
            saved.get("stopped"),
            saved.get("first_step_seconds"),
            saved.get("evaluations", ()),
            backend=saved.get("backend"),
            topology=saved.get("topology"),
        )

    def plot(self, ax: Sequence[Axes] | None = None) -> Any:
        """Plot curves over the epochs, one panel for the loss and one for each metric."""
        try:
            import matplotlib.pyplot as plt
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise SetupError("plots need matplotlib: pip install 'sparkdml[plot]'") from error
        names = self._curve_names()
        if ax is None:
            figure, made = plt.subplots(
                1, max(1, len(names)), figsize=(5 * max(1, len(names)), 3.5), squeeze=False
            )
            ax = list(made[0])
            figure.set_layout_engine("constrained")
        for panel, name in zip(ax, names, strict=False):
            panel.plot(self.epoch, getattr(self, name), marker="o", label="training")
            if f"{VALIDATION}{name}" in self.columns:
                panel.plot(
                    self.epoch, getattr(self, f"{VALIDATION}{name}"), marker="o", label="validation"
                )
                panel.legend(frameon=False)
            panel.set_title(name)
            panel.set_xlabel("epoch")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.spines[["top", "right"]].set_visible(False)
        return ax[0].figure

    def __repr__(self) -> str:
        lines = ["  ".join(f"{name:>15}" for name in self.columns)]
        lines += ["  ".join(f"{_show(value):>15}" for value in row.values()) for row in self._rows]
        return "\n".join(lines + self._footer())

    def _repr_html_(self) -> str:
        """The curves beside the table; they follow a notebook's light or dark theme."""
        footer = "".join(f"<p>{html.escape(line)}</p>" for line in self._footer())
        curves = "".join(self._draw(name) for name in self._curve_names())
        return (
            '<div class="sparkdml-history" style="display:flex;flex-wrap:wrap;gap:12px 24px;'
            f'align-items:flex-start"><div style="display:flex;flex-wrap:wrap;gap:12px">{curves}'
            f'</div><div style="max-width:100%;overflow-x:auto">{self._table()}{footer}</div>'
            "</div>"
        )

    def _footer(self) -> list[str]:
        lines = [f"stopped: {self.stopped}"] if self.stopped else []
        if self.backend and self.topology:
            lines.append(f"backend {self.backend}, topology {self.topology}")
        return lines

    def _curve_names(self) -> list[str]:
        return [n for n in self.columns if n not in NOT_CURVES and not n.startswith(VALIDATION)]

    def _draw(self, name: str) -> str:
        curves = {"training": [row[name] for row in self._rows]}
        if f"{VALIDATION}{name}" in self.columns:
            curves["validation"] = [row[f"{VALIDATION}{name}"] for row in self._rows]
        return draw_panel(name, [row["epoch"] for row in self._rows], curves)

    def _table(self) -> str:
        head = "".join(f"<th{_RIGHT}>{html.escape(name)}</th>" for name in self.columns)
        rows = [
            "<tr>" + "".join(f"<td{_RIGHT}>{_show(value)}</td>" for value in row.values()) + "</tr>"
            for row in self._rows
        ]
        if len(rows) > _MAX_TABLE_ROWS:
            half = _MAX_TABLE_ROWS // 2
            left_out = f"… {len(rows) - 2 * half:,} epochs: to_pandas() has them …"
            gap = f'<tr><td colspan="{len(self.columns)}">{left_out}</td></tr>'
            rows = [*rows[:half], gap, *rows[-half:]]
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _show(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
