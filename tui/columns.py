"""Which columns of a table a width has room for: the least important go first."""

from __future__ import annotations

from collections.abc import Sequence

GAP = 2
"""Cells between two columns of a DataTable."""


def fit(widths: Sequence[int], priorities: Sequence[int], room: int) -> list[int]:
    """Indices of the columns to show, in order.

    Args:
        widths: cells of each column's longest text.
        priorities: of each column; the lowest number stays longest.
        room: cells of the table.
    """
    kept = sorted(range(len(widths)), key=lambda i: (priorities[i], i))
    while len(kept) > 1 and sum(widths[i] + GAP for i in kept) > room:
        kept.pop()
    return sorted(kept)
