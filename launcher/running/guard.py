"""Ties between the supervisor and its run: a command that dies with it, and a guard that ends what is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from launcher.ending.settling import KILLED, settle
from launcher.running.run_record import COMMAND, LOG, MARKER, OUTCOME, RunRecord

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded before any fork: between fork and exec nothing may be imported.
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Become the parent of whatever the run's dead processes leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Between fork and exec: have the kernel end this process should its parent die."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(folder: Path, variables: Mapping[str, str]) -> int:
    """``bash command.sh`` in its own process group, ended by the kernel should we die.

    Args:
        folder: The run folder.
        variables: What the command's environment holds beside ours.

    Returns:
        Its pid, which the caller reaps.

    Raises:
        OSError: bash cannot be started, or the log not written.
    """
    environment = {**os.environ, **variables, MARKER: str(folder)}
    environment.setdefault("PYTHONUNBUFFERED", "1")

    with (folder / LOG).open("ab") as log:
        child = subprocess.Popen(
            ["bash", COMMAND],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=die_with_parent,
        )
    child.returncode = 0  # reaped by pid, together with the orphans that come to us
    return child.pid


def keep_guard(folder: Path, record: RunRecord, pipe: int) -> NoReturn:
    """In a fork of the supervisor: wait for its word that all is well; should it die without, end the run.

    The fork shares the supervisor's lock, so that nobody starts anew while processes are being ended.

    Args:
        folder: The run folder.
        record: Its run.json.
        pipe: Read end of a pipe that only the supervisor holds open.
    """
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        if os.read(pipe, 1) == b"" and not (folder / OUTCOME).exists():
            settle(folder, record, KILLED, "guard")
    finally:
        os._exit(0)  # never run what the supervisor registered for its own end


def _prctl(option: int, value: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(option, value, 0, 0, 0)
