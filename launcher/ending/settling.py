"""The end of a run put on record: judged, timed, written to its folder and to the history."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from launcher.ending import history
from launcher.ending.judgement import Circumstances
from launcher.ending.kernel_log import kills_since
from launcher.ending.log_evidence import read_tail
from launcher.ending.outcomes import Outcome, classify
from launcher.ending.run_metrics import Predicted, as_integer, as_mapping, read_metrics
from launcher.running import processes
from launcher.running.processes import KillReport
from launcher.running.run_record import (
    LOG,
    METRICS,
    NOTES,
    OUTCOME,
    PLAN,
    RESERVE,
    RunRecord,
    last_write_s,
    marker_of,
    read_json,
    utc_now,
    write_json,
)
from launcher.running.watchdog import free_bytes

KILLED = "its supervisor was killed"
INITIAL_NAMESPACE = "pid:[4026531836]"
"""Where pids are those of the kernel's log (PROC_PID_INIT_INO, include/linux/proc_ns.h)."""


def judge_folder(folder: Path, exit_code: int | None, number: int | None, around: Circumstances) -> Outcome:
    """The outcome that a folder's log, metrics and plan speak for, without times.

    Args:
        folder: The run folder.
        exit_code: Of the command, or None.
        number: The signal that ended it, or None.
        around: What the watcher knows beside.
    """
    return classify(
        exit_code,
        number,
        read_tail(folder / LOG),
        read_metrics(folder / METRICS),
        Predicted.from_plan(read_json(folder / PLAN)),
        replace(around, nodes=_planned_nodes(folder), free_bytes=free_bytes(folder)),
    )


def timed(outcome: Outcome, record: RunRecord, ended_at: str) -> Outcome:
    """The outcome with the run's name and times."""
    try:
        span = datetime.fromisoformat(ended_at) - datetime.fromisoformat(record.started_at)
        duration_s = max(0.0, span.total_seconds())
    except (TypeError, ValueError):  # run.json was edited
        duration_s = None
    return replace(
        outcome,
        run_id=record.id,
        started_at=record.started_at,
        ended_at=ended_at,
        duration_s=duration_s,
    )


def last_write(folder: Path) -> str:
    """When a run last wrote, as its files state times: the end of one that nobody saw ending."""
    seconds = last_write_s(folder)
    if seconds is None:
        return utc_now()
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def settle(
    folder: Path,
    record: RunRecord,
    lost: str,
    by: Literal["guard", "reader"],
    *,
    same_boot: bool = True,
) -> Outcome:
    """End what a dead supervisor left, judge the run, and keep the outcome.

    The caller holds the run's lock and has found no outcome in the folder. One that only the history
    could take stands.

    Args:
        folder: The run folder.
        record: Its run.json.
        lost: Why nobody saw the end, as a clause.
        by: Who found out. The guard does so at once, before a pid can be used again.
        same_boot: False after a restart of the machine, when there is nothing to end.
    """
    ended_at = last_write(folder)
    report = KillReport(ended=0, left=())
    if same_boot:
        report = _end_leftovers(folder, record, at_once=by == "guard")
    if outcome := history.find_end(record.id):
        return outcome
    around = replace(kernel_kills_since(record) if same_boot else Circumstances(), lost=lost)
    outcome = replace(
        timed(judge_folder(folder, None, None, around), record, ended_at),
        by=by,
        ended_processes=report.ended,
        left_processes=report.left,
    )
    keep_outcome(folder, record, outcome)
    return outcome


def keep_outcome(folder: Path, record: RunRecord, outcome: Outcome) -> list[str]:
    """Write outcome.json and the history; each though the other may fail.

    Returns:
        What could not be written, in sentences.
    """
    problems: list[str] = []
    try:
        for name in (RESERVE, NOTES):
            (folder / name).unlink(missing_ok=True)  # the reserve's blocks are for what follows
        write_json(folder / OUTCOME, outcome.to_json())
    except OSError as problem:
        problems.append(f"cannot write {OUTCOME} in {folder}: {problem.strerror}")
    try:
        history.append_end(record, outcome)
    except OSError as problem:
        problems.append(f"cannot write the history: {problem.strerror}")
    return problems


def kernel_kills_since(record: RunRecord, pids: Collection[int] = ()) -> Circumstances:
    """What the kernel has on record about a run of this boot: counters, and its log where that can be read.

    Args:
        record: The run's record.
        pids: Processes that were seen to belong to the run. Where the log names others alone, what the whole machine's
            counter has gained was somebody else's.
    """
    now = processes.oom_kills()
    counts = {name: now[name] - count for name, count in record.oom_kills.items() if name in now}
    if not any(counts.values()):
        return Circumstances(oom_kills=counts)
    kills = kills_since(_monotonic(record.started_at))
    if not kills or not pids or record.pid_namespace != INITIAL_NAMESPACE:
        return Circumstances(oom_kills=counts)
    own = [kill for kill in kills if kill.pid in pids]
    if not own:
        counts.pop("machine", None)
    return Circumstances(oom_kills=counts, kernel_kill=max(own, key=lambda kill: kill.resident_bytes, default=None))


def _monotonic(started_at: str) -> float:
    """A time of the wall clock on that of ``time.monotonic``, a little early."""
    try:
        return time.monotonic() - (time.time() - datetime.fromisoformat(started_at).timestamp()) - 1.0
    except (TypeError, ValueError):  # run.json was edited
        return 0.0


def _end_leftovers(folder: Path, record: RunRecord, *, at_once: bool) -> KillReport:
    pid, start = record.child_pid, record.child_start
    # A pid may have been used again; later on, only a living leader's group is surely ours.
    leader = pid is not None and start is not None and processes.alive(pid, start)
    return processes.kill_tree(
        root=pid if leader else None,
        group=pid if leader or at_once else None,
        marker=marker_of(folder),
        grace_s=record.grace_s,
    )


def _planned_nodes(folder: Path) -> int:
    job = as_mapping(as_mapping(read_json(folder / PLAN)).get("job"))
    return as_integer(job.get("nodes")) or 1
