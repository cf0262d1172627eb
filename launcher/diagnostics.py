"""Everything trlfit writes to stderr. Narration only: stdout is for data."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


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
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)


def forget(stream: TextIO | None) -> None:
    """Let what a stream still holds go nowhere: Python would try again at exit, and change the exit code."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]  # None was closed
