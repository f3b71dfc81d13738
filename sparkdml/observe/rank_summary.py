"""Where each rank's time went, a line for each."""

from __future__ import annotations

from collections.abc import Mapping

from sparkdml.observe.stragglers import Times

MAX_RANKS = 16


def describe_ranks(ranks: Mapping[int, Times]) -> list[str]:
    """In the order of ranks; of many ranks, those whose own steps took longest."""
    shown = sorted(ranks, key=lambda rank: -sum(ranks[rank].own.values()))[:MAX_RANKS]
    lines = [_describe(rank, ranks[rank]) for rank in sorted(shown)]
    if len(ranks) > MAX_RANKS:
        lines.append(f"… and {len(ranks) - MAX_RANKS:,} ranks with shorter steps")
    return lines


def _describe(rank: int, times: Times) -> str:
    total = times.total
    shares = ", ".join(
        f"{part} {seconds / total:.0%}"
        for part, seconds in times.seconds.items()
        if seconds > 0.005 * total
    )
    rate = f"{times.rows / total:,.0f} samples/s" if total else "no time"
    return f"rank {rank} on {times.host}: {times.steps:,} steps, {times.rows:,} samples, {rate}" + (
        f"; {shares}" if shares else ""
    )
