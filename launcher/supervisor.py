"""The process that owns a run: starts it, waits for it, ends all of it, and writes how it ended.

``python -m launcher.supervisor FOLDER [--detach] [--grace SECONDS]``. Beside it a guard waits on a
pipe that closes when the supervisor dies: ``kill -9`` of the supervisor then still ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from launcher import history, processes
from launcher.errors import ExitCode
from launcher.judgement import Circumstances
from launcher.outcomes import Outcome
from launcher.processes import GRACE_S, KillReport, Mark
from launcher.run_metrics import as_number
from launcher.run_record import (
    COMMAND,
    HEARTBEAT_S,
    LOG,
    MARKER,
    OUTCOME,
    RESERVE,
    RESERVE_BYTES,
    RUN,
    STOP_REQUEST,
    RunRecord,
    claim,
    marker_of,
    read_json,
    release,
    set_aside,
    utc_now,
    write_beside,
)
from launcher.settling import KILLED, judge, keep_outcome, oom_kills_since, settle, timed

CLAIM_S = 1.0
"""An earlier supervisor lets go of the lock within this after its outcome is written."""
LINGER_S = 10.0
"""What a finished command leaves behind (an uploader, a killed rank's workers) may take this long."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

Announce = Callable[[dict[str, object]], None]


class Supervisor:
    """One run, from lock to outcome."""

    def __init__(self, folder: Path, grace_s: float, announce: Announce) -> None:
        """Nothing is touched before ``run``.

        Args:
            folder: The run folder, resolved.
            grace_s: Seconds between TERM and KILL.
            announce: Told once whether the run started.
        """
        self._folder = folder
        self._grace_s = grace_s
        self._announce = announce
        self._stops = 0  # stop signals received; the second one ends the grace
        self._child_pid = 0
        self._status: int | None = None  # exit code of the command, negative for a signal
        self._wake = -1  # read end of the pipe that signals write to
        self._guard_pid = 0
        self._guard_pipe = -1

    def run(self) -> Outcome | None:
        """Run to the end; None when the run could not start."""
        try:
            lock = claim(self._folder, wait_s=CLAIM_S)
            if lock is None:
                self._announce({"live": True})
                return None
            record = self._start()
        except OSError as problem:
            self._announce({"errno": problem.errno, "error": str(problem)})
            return None
        self._announce({"started": True, "pid": os.getpid()})
        with contextlib.suppress(OSError):  # a run without a line in the history is still a run
            history.append_start(record)
        self._wait()
        outcome = self._end(record)
        problems = keep_outcome(self._folder, record, outcome)
        with contextlib.suppress(OSError):  # what cannot be written may not be complained of either
            for sentence in problems:
                print(f"trlfit: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
            (self._folder / STOP_REQUEST).unlink(missing_ok=True)
        self._dismiss_guard()
        release(self._folder, lock)
        return outcome

    def _start(self) -> RunRecord:
        """Raises OSError, with nothing left running, when the run cannot start."""
        set_aside(self._folder)
        (self._folder / RESERVE).write_bytes(b" " * RESERVE_BYTES)
        record = _new_record(self._folder, self._grace_s)
        write_beside(self._folder / RUN, record.to_json())
        self._listen()
        try:
            self._child_pid = _spawn(self._folder)
            start = processes.create_time(self._child_pid)
            record = replace(record, child_pid=self._child_pid, child_start=start)
            self._fork_guard(record)
        except OSError:
            self._end_all(0.0)
            self._dismiss_guard()
            for name in (RUN, RESERVE):
                (self._folder / name).unlink(missing_ok=True)
            raise
        record = replace(record, guard_pid=self._guard_pid)
        with contextlib.suppress(OSError):  # a quick command may have filled the disk by now
            write_beside(self._folder / RUN, record.to_json())
        return record

    def _listen(self) -> None:
        """Signals wake the loop through a pipe, so that none is lost between a look and a wait."""
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # A handler, not SIG_IGN, for those we ignore: the command would inherit being deaf.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._hear)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stops += 1

    def _sleep(self, seconds: float) -> None:
        """Until a signal comes, at most ``seconds``."""
        ready, _, _ = select.select([self._wake], [], [], seconds)
        if ready:
            os.read(self._wake, 512)

    def _fork_guard(self, record: RunRecord) -> None:
        read, self._guard_pipe = os.pipe()
        self._guard_pid = os.fork()
        if self._guard_pid == 0:
            os.close(self._guard_pipe)
            _guard(self._folder, record, read)
        os.close(read)

    def _dismiss_guard(self) -> None:
        if self._guard_pid:
            os.write(self._guard_pipe, b"1")
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._guard_pid, 0)

    def _wait(self) -> None:
        """Until the command ends or somebody wants it to."""
        while self._status is None and not self._stops:
            self._sleep(HEARTBEAT_S)
            with contextlib.suppress(OSError):
                os.utime(self._folder / RUN)
            self._reap()

    def _reap(self) -> None:
        """Collect ended children, also those that the run's dead processes left to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child_pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _end(self, record: RunRecord) -> Outcome:
        """End what is left of the run and judge it."""
        stopped = self._status is None
        ended_at = utc_now()
        request = read_json(self._folder / STOP_REQUEST) if stopped else None
        asked_s = as_number((request or {}).get("grace_s"))
        if not stopped:
            self._linger()
        report = self._end_all(self._grace_s if asked_s is None else asked_s)
        around = Circumstances(stop=_who_stopped(request) if stopped else None, oom_kills=oom_kills_since(record))
        status = self._status
        if status is not None and status < 0:
            outcome = judge(self._folder, None, -status, around)
        else:
            outcome = judge(self._folder, status, None, around)
        return replace(
            timed(outcome, record, utc_now() if stopped else ended_at),
            by="supervisor",
            ended_processes=0 if stopped else report.ended,
            left_processes=report.left,
        )

    def _linger(self) -> None:
        """Let what the ended command left behind end by itself."""
        until = time.monotonic() + LINGER_S
        while not self._stops and time.monotonic() < until and self._members():
            self._sleep(0.1)
            self._reap()

    def _members(self) -> set[Mark]:
        marker = marker_of(self._folder)
        return processes.members(root=os.getpid(), marker=marker, exclude={self._guard_pid})

    def _end_all(self, grace_s: float) -> KillReport:
        def hurry() -> bool:
            self._reap()
            return self._stops > 1

        report = processes.kill_tree(
            root=os.getpid(),
            group=self._child_pid if self._child_pid and self._status is None else None,
            marker=marker_of(self._folder),
            grace_s=grace_s,
            exclude={self._guard_pid},
            hurry=hurry,
        )
        self._reap()
        return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise a run; with ``--detach`` from a process of its own, whose start this one awaits."""
    parser = argparse.ArgumentParser(prog="python -m launcher.supervisor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--detach", action="store_true", help="return once the run has started")
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds from TERM to KILL")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    os.environ.pop(MARKER, None)  # we may have been started from inside another run
    if options.detach:
        return _detached(folder, options.grace)
    outcome = Supervisor(folder, options.grace, _print_json).run()
    if outcome is None:
        return ExitCode.ENVIRONMENT
    return ExitCode.DONE if outcome.kind == "done" else ExitCode.TRAINING


def _detached(folder: Path, grace_s: float) -> int:
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
        Supervisor(folder, grace_s, announce).run()
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


def _new_record(folder: Path, grace_s: float) -> RunRecord:
    host = processes.this_host()
    pid = os.getpid()
    started_at = utc_now()
    return RunRecord(
        id=f"{folder.name}-{started_at}-{pid}",
        folder=str(folder),
        command=("bash", COMMAND),
        started_at=started_at,
        host=host.name,
        boot_id=host.boot.id,
        boot_time_s=host.boot.time_s,
        pid_namespace=host.pid_namespace,
        supervisor_pid=pid,
        supervisor_start=processes.create_time(pid) or 0.0,
        oom_kills=processes.oom_kills(),
        grace_s=grace_s,
    )


def _spawn(folder: Path) -> int:
    """``bash command.sh`` in its own process group, ended by the kernel should we die."""
    environment = {**os.environ, MARKER: str(folder)}
    environment.setdefault("PYTHONUNBUFFERED", "1")

    def die_with_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

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


def _who_stopped(request: Mapping[str, object] | None) -> str:
    if request is None:
        return "by a signal to the supervisor"
    return f"by {request['by']}" if request.get("by") else "on request"


def _prctl(option: int, value: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(option, value, 0, 0, 0)


def _guard(folder: Path, record: RunRecord, pipe: int) -> NoReturn:
    """Wait for the supervisor's word that all is well; should it die without, end the run.

    It shares the supervisor's lock, so that nobody starts anew while processes are being ended.
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


# Loaded before any fork: between fork and exec nothing may be imported.
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


if __name__ == "__main__":
    sys.exit(main())
