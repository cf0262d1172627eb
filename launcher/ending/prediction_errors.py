"""Our own error: what runs took against what was predicted for them, by card and kind of run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.ending.history import HistoryRow

ERRORS_SCHEMA = "trlfit.errors/1"
QUANTITIES = {
    "allocated": "tensors on the card",
    "reserved": "reserved by torch",
    "device": "used on the card",
    "resident": "growth of resident memory",
    "step": "step time",
}
"""What is compared -> its name for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorGroup:
    """Runs of one kind on one card, by one quantity; errors are seen over predicted, less one."""

    card: str
    kind: str
    """Trainer, method and sharding: ``sft full fsdp``."""
    quantity: str
    runs: int
    median: float
    """Of the errors with their signs: a bias."""
    median_size: float
    """Of their sizes."""
    worst: float
    worst_run: str
    """Folder of the run with the worst."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def error_groups(rows: Sequence[HistoryRow]) -> list[ErrorGroup]:
    """Errors of the runs that have both numbers, by card and kind."""
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in rows:
        for quantity, error in row.errors.items():
            if quantity in QUANTITIES:
                key = (row.card or "not known", row.kind or "not known", quantity)
                found.setdefault(key, []).append((error, str(row.folder)))
    order = list(QUANTITIES)
    return [
        _group(*key, errors)
        for key, errors in sorted(found.items(), key=lambda item: (*item[0][:2], order.index(item[0][2])))
    ]


def error_table(groups: Sequence[ErrorGroup]) -> list[tuple[str, ...]]:
    """Cells for people, the header first."""
    header = ("card", "kind", "quantity", "runs", "median", "worst", "worst run")
    return [
        header,
        *(
            (
                group.card,
                group.kind,
                QUANTITIES[group.quantity],
                str(group.runs),
                f"{group.median:+.1%}",
                f"{group.worst:+.1%}",
                group.worst_run.rstrip("/").rpartition("/")[2],
            )
            for group in groups
        ),
    ]


def _group(card: str, kind: str, quantity: str, errors: Sequence[tuple[float, str]]) -> ErrorGroup:
    worst, run = max(errors, key=lambda pair: abs(pair[0]))
    return ErrorGroup(
        card=card,
        kind=kind,
        quantity=quantity,
        runs=len(errors),
        median=statistics.median(error for error, _ in errors),
        median_size=statistics.median(abs(error) for error, _ in errors),
        worst=worst,
        worst_run=run,
    )
