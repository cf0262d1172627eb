"""The process that owns a run, which outlives whoever started it.

``python -m launcher.running.supervisor FOLDER [--detach] [--grace SECONDS] [--hang-after SECONDS] [--resume]
[--auto-retry N]``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ExitCode
from launcher.running.processes import GRACE_S
from launcher.running.run_record import LOG, MARKER
from launcher.running.supervision import Supervisor, Terms


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise a run; with ``--detach`` from a process of its own, whose start this one awaits."""
    parser = argparse.ArgumentParser(prog="python -m launcher.running.supervisor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--detach", action="store_true", help="return once the run has started")
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds from TERM to KILL")
    about = "seconds of silence that end the run, inf for never; by default it follows the steps"
    parser.add_argument("--hang-after", type=float, default=None, help=about)
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint")
    parser.add_argument("--auto-retry", type=int, default=0, help="attempts after running out of memory")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    terms = Terms(
        grace_s=options.grace,
        hang_after_s=options.hang_after,
        resume=options.resume,
        retries=options.auto_retry,
    )
    os.environ.pop(MARKER, None)  # we may have been started from inside another run
    if options.detach:
        return _detached(folder, terms)
    outcome = Supervisor(folder, terms, _print_json).run()
    if outcome is None:
        return ExitCode.ENVIRONMENT
    return ExitCode.DONE if outcome.kind == "done" else ExitCode.TRAINING


def _detached(folder: Path, terms: Terms) -> int:
    """Fork, let the child lead a session, and print what it reports about the start."""
    read, write = os.pipe()
    if os.fork() > 0:
        os.close(write)
        with os.fdopen(read) as report:
            print(report.readline())  # noqa: T201
        return ExitCode.DONE
    os.close(read)
    os.setsid()
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(empty, descriptor)

    def announce(message: dict[str, object]) -> None:
        os.write(write, json.dumps(message).encode() + b"\n")
        if "started" in message:
            _complain_in(folder / LOG)

    try:
        Supervisor(folder, terms, announce).run()
    except Exception as bug:
        # The starter waits for one line. After the start nobody reads it, and the guard takes over.
        announce({"error": f"{type(bug).__name__}: {bug}"})
        raise
    finally:
        os.close(write)
    return ExitCode.DONE


def _complain_in(log: Path) -> None:
    """From now on our own complaints go to the run's log: nobody else would see them."""
    with contextlib.suppress(OSError), log.open("ab") as file:
        os.dup2(file.fileno(), 2)


def _print_json(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
