"""Supervision of one run: starts it, watches it, ends all of it, writes how it ended, and may try again.

Beside the supervisor a guard waits on a pipe that closes when it dies: ``kill -9`` of it then still ends the run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from launcher.diagnostics import report_note
from launcher.ending import history
from launcher.ending.outcomes import Outcome
from launcher.ending.run_metrics import Predicted, as_number
from launcher.ending.settling import judge_folder, keep_outcome, kernel_kills_since, timed
from launcher.running import processes
from launcher.running.checkpoints import last_checkpoint, set_incomplete_aside
from launcher.running.guard import adopt_orphans, keep_guard, spawn
from launcher.running.next_attempt import plan_next
from launcher.running.processes import GRACE_S, KillReport, Mark
from launcher.running.run_record import (
    COMMAND,
    HEARTBEAT_S,
    NOTES,
    PLAN,
    RESERVE,
    RESERVE_BYTES,
    RESUME,
    RUN,
    STOP_REQUEST,
    RunRecord,
    claim,
    marker_of,
    read_json,
    release,
    set_aside,
    utc_now,
    write_json,
)
from launcher.running.watchdog import DiskWatch, HangWatch, Silence

CLAIM_S = 1.0
"""An earlier supervisor lets go of the lock within this after its outcome is written."""
LINGER_S = 10.0
"""What a finished command leaves behind (an uploader, a killed rank's workers) may take this long."""

Announce = Callable[[dict[str, object]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a run is to be watched and ended."""

    grace_s: float = GRACE_S
    """Seconds between TERM and KILL."""
    hang_after_s: float | None = None
    """Seconds of silence that end it; None is the watch's own measure, infinity never."""
    resume: bool = False
    """Go on from the newest whole checkpoint."""
    retries: int = 0
    """Times that it starts again by a smaller plan after it ran out of memory."""


class Supervisor:
    """One run, from lock to outcome, through all of its attempts."""

    def __init__(self, folder: Path, terms: Terms, announce: Announce) -> None:
        """Nothing is touched before ``run``.

        Args:
            folder: The run folder, resolved.
            terms: How the run is watched and ended.
            announce: Told once whether the run started.
        """
        self._folder = folder
        self._terms = terms
        self._announce = announce
        self._stops = 0  # stop signals received; the second one ends the grace
        self._child_pid = 0
        self._status: int | None = None  # exit code of the command, negative for a signal
        self._hung: Silence | None = None
        self._pids: set[int] = set()  # of the run, as far as they were seen: the kernel's log names pids
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
            self._listen()
            set_aside(self._folder, anew=not self._terms.resume)
            record = self._start(_new_record(self._folder, self._terms))
        except OSError as problem:
            self._announce({"errno": problem.errno, "error": str(problem)})
            return None
        self._announce({"started": True, "pid": os.getpid()})
        while True:
            with contextlib.suppress(OSError):  # a run without a line in the history is still a run
                history.append_start(record)
            self._wait()
            outcome = self._end(record)
            following, refused = self._next_attempt(record, outcome)
            if following is None:
                outcome = replace(outcome, note=refused)
                break
            record = following
        problems = keep_outcome(self._folder, record, outcome)
        with contextlib.suppress(OSError):  # what cannot be written may not be complained of either
            for sentence in problems:
                report_note(sentence)
            (self._folder / STOP_REQUEST).unlink(missing_ok=True)
        self._dismiss_guard()
        release(self._folder, lock)
        return outcome

    def _start(self, record: RunRecord) -> RunRecord:
        """Raises OSError, with nothing left running, when the run cannot start."""
        self._child_pid, self._status, self._hung = 0, None, None
        (self._folder / RESERVE).write_bytes(b" " * RESERVE_BYTES)
        if record.resumed_from is not None:
            set_incomplete_aside(self._folder)
        write_json(self._folder / RUN, record.to_json())
        try:
            self._child_pid = spawn(self._folder, {} if record.resumed_from is None else {RESUME: "1"})
            start = processes.create_time(self._child_pid)
            record = replace(record, child_pid=self._child_pid, child_start=start)
            self._pids = {self._child_pid}
            self._fork_guard(record)
        except OSError:
            self._end_all(0.0)
            self._dismiss_guard()
            for name in (RUN, RESERVE):
                (self._folder / name).unlink(missing_ok=True)
            raise
        record = replace(record, guard_pid=self._guard_pid)
        with contextlib.suppress(OSError):  # a quick command may have filled the disk by now
            write_json(self._folder / RUN, record.to_json())
        return record

    def _next_attempt(self, record: RunRecord, outcome: Outcome) -> tuple[RunRecord | None, str | None]:
        """The following attempt, started, where the run ran out of memory and may try again; or why there is none.

        For whoever follows the run it goes on: outcome.json of what failed is written among the attempts alone.
        """
        if outcome.kind != "out_of_memory" or self._stops:
            return None, None
        if not record.retries_left:
            return None, f"{record.attempt} attempts were made" if record.attempt > 1 else None
        self._say({"retry": "ran out of memory; planning the next attempt"})
        answer = plan_next(self._folder, outcome, self._pause)
        if answer.problem is not None or self._stops:
            return None, f"no further attempt: {'it was stopped' if self._stops else answer.problem}"
        try:
            with contextlib.suppress(OSError):
                history.append_end(record, outcome)
            self._dismiss_guard()
            set_aside(self._folder, outcome.to_json(), anew=answer.resumed_from is None)
            following = replace(
                _new_record(self._folder, self._terms),
                attempt=record.attempt + 1,
                retries_left=record.retries_left - 1,
                resumed_from=answer.resumed_from,
                after=outcome.sentence,
                change=answer.sentence,
            )
            return self._start(following), None
        except OSError as problem:
            return None, f"no further attempt: {problem}"

    def _pause(self) -> bool:
        """Wait a moment; whether somebody wants the run to stop."""
        self._sleep(0.2)
        return self._stops > 0

    def _say(self, notes: Mapping[str, str]) -> None:
        """Leave word for those who look at the run while it goes on; a full disk keeps it silent."""
        with contextlib.suppress(OSError):
            if notes:
                write_json(self._folder / NOTES, dict(notes))
            else:
                (self._folder / NOTES).unlink(missing_ok=True)

    def _listen(self) -> None:
        """Signals wake the loop through a pipe, so that none is lost between a look and a wait."""
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # A handler, not SIG_IGN, for those we ignore: the command would inherit being deaf.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._hear)
        adopt_orphans()

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
            keep_guard(self._folder, record, read)
        os.close(read)

    def _dismiss_guard(self) -> None:
        if self._guard_pid:
            os.write(self._guard_pipe, b"1")
            os.close(self._guard_pipe)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._guard_pid, 0)
            self._guard_pid = 0

    def _wait(self) -> None:
        """Until the command ends, falls silent for too long, or somebody wants it to end."""
        plan = read_json(self._folder / PLAN)
        silence = HangWatch(self._folder, Predicted.from_plan(plan), self._terms.hang_after_s)
        disk, told = DiskWatch(self._folder, plan), dict[str, str]()
        while self._status is None and not self._stops and self._hung is None:
            self._sleep(min(HEARTBEAT_S, max(0.05, silence.limit_s / 4)))
            with contextlib.suppress(OSError):
                os.utime(self._folder / RUN)
            self._reap()
            now, living = time.monotonic(), {mark.pid for mark in processes.members(root=os.getpid())}
            self._pids |= living - {self._guard_pid}
            notes = {"disk": sentence} if (sentence := disk.look()) else {}
            found = silence.look(now)
            if (found is not None or "paused" in told) and (paused := processes.stopped(living)):
                silence.forgive(now)
                notes["paused"] = f"process {paused[0]} is stopped, not hung: `kill -CONT {paused[0]}` continues it"
            else:
                self._hung = found
            if notes != told:
                self._say(notes)
                told = notes

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
        status, hung = self._status, None
        if status is None and not self._stops and self._hung is not None:
            hung = self._hung.sentence
        stopped = status is None and hung is None
        ended_at = utc_now()
        request = read_json(self._folder / STOP_REQUEST) if stopped else None
        asked_s = as_number((request or {}).get("grace_s"))
        if status is not None:
            self._linger()
        report = self._end_all(self._terms.grace_s if asked_s is None else asked_s)
        around = replace(
            kernel_kills_since(record, self._pids), stop=_who_stopped(request) if stopped else None, hung=hung
        )
        if status is not None and status < 0:
            outcome = judge_folder(self._folder, None, -status, around)
        else:
            outcome = judge_folder(self._folder, status, None, around)
        return replace(
            timed(outcome, record, utc_now() if status is None else ended_at),
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


def _new_record(folder: Path, terms: Terms) -> RunRecord:
    host = processes.this_host()
    pid = os.getpid()
    started_at = utc_now()
    checkpoint = last_checkpoint(folder) if terms.resume else None
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
        grace_s=terms.grace_s,
        retries_left=terms.retries,
        resumed_from=checkpoint.name if checkpoint else None,
    )


def _who_stopped(request: Mapping[str, object] | None) -> str:
    if request is None:
        return "by a signal to the supervisor"
    return f"by {request['by']}" if request.get("by") else "on request"
