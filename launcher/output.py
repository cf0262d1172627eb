"""The only writer to stdout: JSON documents, and tables for people. The same bytes on a pipe and a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(document: Any) -> None:
    """One JSON document and nothing else."""
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Text that ends in exactly one newline."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns with two spaces between; ``right`` lists right-aligned columns."""
    widths = [max([len(headers[i]), *(len(row[i]) for row in rows)]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(parts).rstrip()

    return "\n".join([line(headers), line(["-" * w for w in widths]), *(line(row) for row in rows)])
