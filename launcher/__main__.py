"""`python -m launcher`: the headless commands."""

from __future__ import annotations

import sys


def main() -> int:
    """Run one command."""
    try:
        from launcher.cli import main as headless

        return headless()
    except KeyboardInterrupt:  # while our modules are still being imported
        return 130


if __name__ == "__main__":
    sys.exit(main())
