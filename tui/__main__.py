"""The console script: arguments go to the headless commands, none on a terminal opens the app."""

from __future__ import annotations

import gc
import sys
from typing import TextIO


def main() -> int:
    """Entry point of `trlfit`."""
    try:
        if len(sys.argv) > 1 or not _on_terminal():
            # What a command makes lives to its end: looking for cycles after every 700 objects takes 8 ms of a plan.
            gc.set_threshold(100_000)
            from launcher.cli import main as headless

            return headless(sys.argv[1:])
        from tui.app import run_app  # Textual costs 200 ms of CPU; headless commands never pay it

        return run_app()
    except KeyboardInterrupt:  # while our modules are still being imported
        return 130


def _on_terminal() -> bool:
    # A stream is None where it was closed (`<&-`).
    streams: tuple[TextIO | None, ...] = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams)


if __name__ == "__main__":
    sys.exit(main())
