"""Everything trlfit writes to stderr. Narration only: stdout is for data."""

from __future__ import annotations

import sys


def report_error(message: str) -> None:
    """One line: what is wrong, where, what to do."""
    print(f"trlfit: error: {message}", file=sys.stderr)


def report_note(message: str) -> None:
    """Something the user should know that is not an error."""
    print(f"trlfit: {message}", file=sys.stderr)
