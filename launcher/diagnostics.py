"""Everything trlfit writes to stderr. Narration only: stdout is for data."""

from __future__ import annotations

import contextlib
import sys


def report_error(message: str) -> None:
    """One line: what is wrong, where, what to do."""
    _write(f"trlfit: error: {message}")


def report_note(message: str) -> None:
    """Something the user should know that is not an error."""
    _write(f"trlfit: {message}")


def _write(line: str) -> None:
    """A line, where there is somewhere to write it; a closed stderr must not become the error."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]  # print() would take stdout instead
        return
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
