"""The console script: arguments go to the headless commands, none on a terminal opens the app."""

from __future__ import annotations

import sys


def main() -> int:
    """Entry point of `trlfit`."""
    if len(sys.argv) > 1 or not (sys.stdin.isatty() and sys.stdout.isatty()):
        from launcher.cli import main as headless

        return headless(sys.argv[1:])
    from tui.app import run_app  # Textual costs 200 ms of CPU; headless commands never pay it

    return run_app()


if __name__ == "__main__":
    sys.exit(main())
