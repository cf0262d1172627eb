"""Everything trlfit writes to stderr. Narration only: stdout is for data."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

_CONTROLS = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"},
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}


def without_controls(text: str) -> str:
    """``text`` with what a terminal would obey, or would write backwards, as Python writes it.

    Names of files, models and cards come from others, and so do errors that repeat them.
    """
    return text.translate(_CONTROLS)


def report_error(message: str) -> None:
    """One line: what is wrong, where, what to do."""
    _write(f"trlfit: error: {without_controls(message)}")


def report_note(message: str) -> None:
    """Something the user should know that is not an error."""
    _write(f"trlfit: {without_controls(message)}")


def report_event(line: str) -> None:
    """A line for a program of ours that reads along."""
    _write(line)


def rewrite_line(message: str) -> None:
    """Replace the line that this wrote last on the terminal; nothing leaves the line empty."""
    shown = f"trlfit: {without_controls(message)}" if message else ""
    _write(f"\r\x1b[K{shown}", end="")


def _write(line: str, end: str = "\n") -> None:
    """A line, where there is somewhere to write it; a closed stderr must not become the error."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]  # print() would take stdout instead
        return
    try:
        print(line, end=end, file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)


def forget(stream: TextIO | None) -> None:
    """Let what a stream still holds go nowhere: Python would try again at exit, and change the exit code."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]  # None was closed
