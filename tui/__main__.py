"""The console script: arguments go to the headless commands, none on a terminal opens the app.

What is imported above ``main`` is loaded before anything can catch a Ctrl-C: next to nothing.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
"""As in typing, which takes milliseconds to import."""
if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

CANNOT_DRAW = 4
"""The environment lacks something."""


def main() -> int:
    """Entry point of `trlfit`."""
    try:
        file = _job_file(sys.argv[1:])
        if (len(sys.argv) > 1 and file is None) or not _on_terminal():
            # What a command makes lives to its end: looking for cycles after every 700 objects takes 8 ms of a plan.
            gc.set_threshold(100_000)
            from launcher.cli import main as headless

            return headless(sys.argv[1:])
        if os.environ.get("TERM") == "dumb" and not os.environ.get("TEXTUAL_DRIVER"):
            from launcher.diagnostics import report_error

            report_error("TERM=dumb: this terminal cannot draw; `trlfit plan --help` says how to plan without")
            return CANNOT_DRAW
        from tui.app import run_app  # Textual costs 200 ms of CPU; headless commands never pay it

        return run_app(file)
    except KeyboardInterrupt:  # while our modules are still being imported
        return 130


def _job_file(words: list[str]) -> Path | None:
    """The job file that `trlfit JOB.yaml` opens."""
    from pathlib import Path

    return Path(words[0]) if len(words) == 1 and words[0].endswith((".yaml", ".yml")) else None


def _on_terminal() -> bool:
    if os.environ.get("TEXTUAL_DRIVER"):  # `textual serve` draws in a browser over pipes
        return True
    # A stream is None where it was closed (`<&-`).
    streams: tuple[TextIO | None, ...] = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams)


if __name__ == "__main__":
    sys.exit(main())
