"""Rows of local training data, counted where that takes no package and no more than a moment."""

from __future__ import annotations

from launcher.paths import expanded

LARGEST_BYTES = 64 * 1024**2
"""Files above are not read for a count: a plan takes a fraction of a second."""


def count_rows(dataset: str | None) -> int | None:
    """Rows of a local ``.jsonl`` file, or of a ``.json`` file with one object a line.

    None for anything else: hub data sets, Parquet and CSV files, lists in JSON, and files that are large or unreadable.
    """
    if dataset is None or not dataset.lower().endswith((".jsonl", ".json")):
        return None
    try:
        path = expanded(dataset)
        if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
            return None
        rows = 0
        with path.open("rb") as file:
            for line in file:
                text = line.strip()
                if text and not (text.startswith(b"{") and text.endswith(b"}")):
                    return None
                rows += bool(text)
    except (OSError, ValueError):
        return None
    return rows or None
