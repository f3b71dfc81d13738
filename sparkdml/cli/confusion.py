"""A confusion matrix as text."""

from __future__ import annotations

from collections.abc import Sequence


def count_confusions(
    labels: Sequence[int], predictions: Sequence[int], num_classes: int
) -> list[list[int]]:
    """`result[label][prediction]` is how often that happened."""
    counts = [[0] * num_classes for _ in range(num_classes)]
    for label, prediction in zip(labels, predictions, strict=True):
        counts[label][prediction] += 1
    return counts


def as_text(counts: Sequence[Sequence[int]]) -> str:
    """Labels down, predictions across, a dot for never; the last column is each label's recall."""
    width = max(3, *(len(str(count)) + 1 for row in counts for count in row))
    header = "".join(f"{prediction:>{width}}" for prediction in range(len(counts)))
    lines = [f"       {'predicted':^{len(header)}}", f"label  {header}    right"]
    for label, row in enumerate(counts):
        cells = "".join(f"{count or '·':>{width}}" for count in row)
        total = sum(row)
        right = f"{row[label] / total:7.1%}" if total else f"{'none':>7}"
        lines.append(f"{label:>5}  {cells}  {right}")
    return "\n".join(line.rstrip() for line in lines)
