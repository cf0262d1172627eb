"""Runs by their folders: start one, ask how it is, stop it, list them; the dead are buried here."""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from launcher.ending.judgement import Circumstances
from launcher.ending.outcomes import Outcome
from launcher.ending.run_metrics import as_integer, as_mapping, read_metrics
from launcher.ending.settling import KILLED, judge_folder, last_write, settle, timed
from launcher.errors import EnvironmentLacks, TrainingFailed, UsageError
from launcher.paths import PACKAGES_FOLDER
from launcher.running import processes
from launcher.running.checkpoints import disk_need, last_checkpoint
from launcher.running.processes import GRACE_S, Boot, Host
from launcher.running.run_record import (
    COMMAND,
    METRICS,
    NOTES,
    OUTCOME,
    PLAN,
    PYTHON,
    RUN,
    SILENT_S,
    STOP_REQUEST,
    RunRecord,
    claim,
    last_write_s,
    marker_of,
    read_json,
    read_record,
    release,
    utc_now,
    write_json,
)
from launcher.running.watchdog import room_problem
from planner.units import format_bytes, format_seconds

Stage = Literal["written", "running", "finished", "stale"]

MIN_FREE_BYTES = 64 << 20
"""Log, metrics and outcome of a long run; what checkpoints take is the trainer's to say."""
INSTANT_S = 0.5
"""A command that is missing or does not parse ends within this."""
UNANSWERED_S = 5.0
"""A supervisor that has not ended its run this long after it had to be over is itself stuck."""
START_S = 30.0
"""A loaded machine may need seconds to start a Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """How a run folder stands."""

    folder: Path
    stage: Stage
    """``stale``: the supervisor died before the run's end, which was found out afterwards."""
    record: RunRecord | None = None
    outcome: Outcome | None = None
    note: str | None = None
    """One sentence when there is more to know."""

    @property
    def is_over(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """A run that was started."""

    folder: Path
    record: RunRecord

    def state(self) -> RunState:
        """How it stands now."""
        return run_state(self.folder)

    def stop(self, grace_s: float = GRACE_S) -> RunState:
        """End it."""
        return stop_run(self.folder, grace_s)

    def wait(self, timeout_s: float | None = None) -> RunState:
        """Wait until it is over, or for ``timeout_s``; the last state either way."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            state = self.state()
            if state.is_over or (until is not None and time.monotonic() >= until):
                return state
            time.sleep(0.05)


def start_run(
    folder: Path,
    *,
    detach: bool,
    grace_s: float = GRACE_S,
    hang_after_s: float | None = None,
    resume: bool = False,
    retries: int = 0,
    python: str | None = None,
) -> RunHandle:
    """Start ``bash command.sh`` under a supervisor that outlives this process and its terminal.

    Args:
        folder: A run folder. What an earlier attempt left moves to ``attempts/N/``.
        detach: The caller will not follow: wait a moment and report a command that ends at once.
        grace_s: Seconds between TERM and KILL when the run is stopped.
        hang_after_s: Seconds of silence that end it as hung; None follows the steps, infinity is never.
        resume: Go on from its newest whole checkpoint.
        retries: Times that it starts again by a smaller plan after it ran out of memory.
        python: Path of the Python that trains in place of the one in command.sh.

    Raises:
        UsageError: not a run folder, its run is live, or there is no checkpoint to go on from.
        EnvironmentLacks: the folder cannot be written, its disk is full, or bash is missing.
        TrainingFailed: with ``detach``, the command ended at once and not well.
    """
    folder = folder.resolve()
    if resume and (folder / COMMAND).is_file() and last_checkpoint(folder) is None:
        raise UsageError(f"{folder} holds no whole checkpoint to go on from; leave out --resume to start anew")
    _check_startable(folder)
    terms = ["--grace", str(grace_s), "--auto-retry", str(retries), *(["--resume"] if resume else [])]
    if hang_after_s is not None:
        terms += ["--hang-after", str(hang_after_s)]
    # The supervisor's own folder is ours, so that -m finds us; nothing reaches the training's path.
    command = [sys.executable, "-m", "launcher.running.supervisor", str(folder), "--detach"]
    with subprocess.Popen(
        [*command, *terms],
        cwd=PACKAGES_FOLDER,
        env=os.environ if python is None else {**os.environ, PYTHON: python},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as starter:
        try:
            output, errors = starter.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            starter.kill()
            raise EnvironmentLacks(
                f"the supervisor of {folder} did not start in {START_S:.0f} s: is the disk stuck"
            ) from None
    _raise_refusal(folder, output, errors)
    record = read_record(folder)
    if record is None:
        raise EnvironmentLacks(f"the run in {folder} started, but its {RUN} cannot be read")
    handle = RunHandle(folder=folder, record=record)
    if detach:
        outcome = handle.wait(INSTANT_S).outcome
        if outcome is not None and outcome.kind != "done":
            raise TrainingFailed(f"the run in {folder} ended at once: {outcome.sentence}")
    return handle


def run_state(folder: Path, *, boot: Boot | None = None, wait_s: float = GRACE_S + 5) -> RunState:
    """How a run folder stands.

    A run whose supervisor was killed, or that a reboot ended, is reported with what its log and
    metrics tell; processes that it left are ended first.

    Args:
        folder: A run folder.
        boot: The present boot; for tests.
        wait_s: How long to wait for another process that is ending the run.

    Raises:
        UsageError: not a run folder.
    """
    folder = folder.resolve()
    record = read_record(folder)
    if outcome := _outcome(folder):
        return _over(folder, record, outcome)
    if record is None:
        return _unstarted(folder)
    host = processes.this_host()
    host = replace(host, boot=boot) if boot else host
    if not record.is_here(host):
        return _elsewhere(folder, record)
    if _is_copy(folder, record):
        return _copied(folder, record)
    if record.is_supervised(host):
        notes = as_mapping(read_json(folder / NOTES))
        note = "; ".join(str(sentence) for sentence in notes.values()) or None
        return RunState(folder=folder, stage="running", record=record, note=note)
    return _bury(folder, record, host, wait_s)


def stop_run(folder: Path, grace_s: float = GRACE_S) -> RunState:
    """End a run: TERM to all of its processes, KILL after ``grace_s``.

    Returns:
        The state afterwards; of a run that was not running, unchanged.

    Raises:
        UsageError: not a run folder, or the run belongs to another host or user.
    """
    state = run_state(folder)
    folder, record = state.folder, state.record
    if state.stage != "running" or record is None:
        processes.kill_tree(marker=marker_of(folder), grace_s=grace_s)
        return state
    if not record.is_here(processes.this_host()):
        raise UsageError(f"the run in {folder} is on host {record.host}: stop it there")
    request = {"grace_s": grace_s, "by": _user(), "requested_at": utc_now()}
    with contextlib.suppress(OSError):  # on a full disk it stops with the grace of its start
        write_json(folder / STOP_REQUEST, request)
    try:
        os.kill(record.supervisor_pid, signal.SIGTERM)
    except ProcessLookupError:
        return run_state(folder)
    except PermissionError:
        raise UsageError(f"the run in {folder} belongs to another user: ask its owner") from None
    until = time.monotonic() + grace_s + processes.REFUSES_S + UNANSWERED_S
    while processes.alive(record.supervisor_pid, record.supervisor_start):
        now = time.monotonic()
        if now > until:  # stopped with SIGSTOP, or stuck in a write
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.supervisor_pid, signal.SIGKILL)
            if now > until + processes.REFUSES_S:
                break
        time.sleep(0.02)
    return run_state(folder)


def _check_startable(folder: Path) -> None:
    if not (folder / COMMAND).is_file():
        raise UsageError(f"no {COMMAND} in {folder}: write the run first with trlfit write")
    state = run_state(folder)
    if state.stage == "running":
        raise _live(folder, state.record)
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise EnvironmentLacks(
            f"only {format_bytes(free)} free on the disk of {folder}: free some space or write the run elsewhere"
        )
    problem, _ = room_problem(folder, disk_need(read_json(folder / PLAN)))
    if problem is not None:
        raise EnvironmentLacks(f"{problem}: free some space, write the run elsewhere, or save none (save_strategy: no)")


def _live(folder: Path, record: RunRecord | None) -> UsageError:
    pid = f" (pid {record.supervisor_pid})" if record else ""
    return UsageError(f"the run in {folder} is live{pid}: follow it with trlfit watch, or end it with trlfit stop")


def _raise_refusal(folder: Path, output: bytes, errors: bytes) -> None:
    """Turn what a starting supervisor printed into an error, unless it printed that it started."""
    try:
        message = as_mapping(json.loads(output))
    except ValueError:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise EnvironmentLacks(
            f"the supervisor of {folder} did not start: {last[0] if last else 'no message'}"
        ) from None
    if message.get("started"):
        return
    if message.get("live"):
        raise _live(folder, read_record(folder))
    code = as_integer(message.get("errno"))
    text = os.strerror(code) if code else str(message.get("error"))
    hint = {
        errno.EROFS: "write the run elsewhere",
        errno.EACCES: "write the run elsewhere",
        errno.ENOSPC: "free some space",
    }.get(code or 0, "see that bash runs and the folder can be written")
    raise EnvironmentLacks(f"cannot start the run in {folder}: {text.lower()}; {hint}")


def _outcome(folder: Path) -> Outcome | None:
    return Outcome.from_json(read_json(folder / OUTCOME))


def _over(folder: Path, record: RunRecord | None, outcome: Outcome) -> RunState:
    stage: Stage = "finished" if outcome.by == "supervisor" else "stale"
    return RunState(folder=folder, stage=stage, record=record, outcome=outcome)


def _unstarted(folder: Path) -> RunState:
    """A folder that no supervisor has touched: written, or run by hand."""
    if not (folder / COMMAND).is_file():
        raise UsageError(f"{folder} is not a run folder: it has no {COMMAND}")
    metrics = read_metrics(folder / METRICS)
    if metrics.ended:
        outcome = judge_folder(folder, 0, None, Circumstances())
        by_hand = f"run by hand with bash {COMMAND}"
        return RunState(folder=folder, stage="finished", outcome=outcome, note=by_hand)
    note = f"has rows of a run by hand with bash {COMMAND}" if metrics.started else None
    return RunState(folder=folder, stage="written", note=note)


def _elsewhere(folder: Path, record: RunRecord) -> RunState:
    """A run on another host of a shared disk: only the supervisor's heartbeat tells."""
    silent_s = time.time() - (last_write_s(folder) or 0.0)
    if silent_s < SILENT_S:
        note = f"on host {record.host}"
        return RunState(folder=folder, stage="running", record=record, note=note)
    lost = f"host {record.host} has not reported for {format_seconds(silent_s)}"
    outcome = timed(judge_folder(folder, None, None, Circumstances(lost=lost)), record, last_write(folder))
    if outcome.kind == "killed":
        outcome = replace(outcome, kind="node_lost", sentence=f"node lost: {lost}")
    # Not written: the host may only be cut off, and will then write its own.
    return RunState(folder=folder, stage="stale", record=record, outcome=outcome, note=lost)


def _is_copy(folder: Path, record: RunRecord) -> bool:
    """Whether the run belongs to another folder here, of which this is a copy made while it went on."""
    if record.folder == str(folder):
        return False
    there = read_record(Path(record.folder))
    return there is not None and there.id == record.id


def _copied(folder: Path, record: RunRecord) -> RunState:
    lost = f"this is a copy of {record.folder}, made before its end"
    outcome = timed(judge_folder(folder, None, None, Circumstances(lost=lost)), record, last_write(folder))
    return RunState(folder=folder, stage="stale", record=record, outcome=outcome, note=lost)


def _bury(folder: Path, record: RunRecord, host: Host, wait_s: float) -> RunState:
    """The supervisor is dead and left no outcome."""
    try:
        lock = claim(folder, wait_s=wait_s, write=False)
    except OSError:
        lock = None
        held = False
    else:
        held = lock is None
    try:
        if outcome := _outcome(folder):
            return _over(folder, record, outcome)
        if held:
            note = "its supervisor died; its processes are being ended"
            return RunState(folder=folder, stage="running", record=record, note=note)
        same_boot = record.boot.same(host.boot)
        lost = KILLED if same_boot else "the machine was restarted"
        outcome = settle(folder, record, lost, "reader", same_boot=same_boot)
        return _over(folder, record, outcome)
    finally:
        if lock is not None:
            release(folder, lock)


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None
