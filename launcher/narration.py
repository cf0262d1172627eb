"""What long work says while it runs: to a terminal a bar that moves, to a log a line at its start and end."""

from __future__ import annotations

import json
import os
import sys
from typing import Protocol

from launcher.diagnostics import report_event, report_note, rewrite_line

BAR_CELLS = 20
STEPS_AS_EVENTS = "TRLFIT_STEPS"
"""Environment variable by which the screens ask the command that they start for its steps as lines of JSON too.

They are those of the children, which ``measuring.step_of`` reads.
"""


class Narrator(Protocol):
    """Hears about a running trace and about what is wrong on this machine."""

    def warn(self, message: str) -> None:
        """Something that concerns this machine alone, in one sentence."""
        ...

    def traced(self, done: int, of: int, seconds: float) -> None:
        """``done`` sets of ``of`` are traced after ``seconds``; 0 when it starts."""
        ...


class StderrNarrator:
    """Narrates on stderr.

    Args:
        way_out: what to do for an answer without the wait, said in a log where it starts.
    """

    def __init__(self, way_out: str = "") -> None:
        self._way_out = way_out

    def warn(self, message: str) -> None:
        """A line of its own, in place of a bar."""
        if _is_terminal():
            rewrite_line("")
        report_note(message)

    def traced(self, done: int, of: int, seconds: float) -> None:
        """A bar on a terminal; in a log what starts and what it took."""
        _tell(done, of, "" if done == of else "tracing the model's layers", seconds)
        if _is_terminal():
            filled = BAR_CELLS * done // of
            bar = "#" * filled + "-" * (BAR_CELLS - filled)
            rewrite_line("" if done == of else f"tracing the model's layers [{bar}] {done} of {of}, {seconds:.0f} s")
        elif done == 0:
            report_note(f"tracing the model's layers on fake tensors, once{self._way_out}")
        elif done == of:
            report_note(f"traced in {seconds:.0f} s")


def narrate_step(done: int, of: int, what: str, seconds: float) -> None:
    """Progress of a probe's child: a line that moves on a terminal, one line for each step in a log.

    Args:
        done: steps behind it; as many as there are when it is over.
        of: all steps.
        what: the step that begins, empty when it is over.
        seconds: so far.
    """
    _tell(done, of, what, seconds)
    if _is_terminal():
        rewrite_line("" if done == of else f"{done + 1} of {of}: {what}, {seconds:.0f} s")
    elif what:
        report_note(f"{done + 1} of {of}: {what}")


def _tell(done: int, of: int, what: str, seconds: float) -> None:
    if os.environ.get(STEPS_AS_EVENTS):
        report_event(json.dumps({"done": done, "of": of, "what": what, "seconds": seconds}))


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]
