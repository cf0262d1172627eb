"""`trlfit write`, `launch`, `watch`, `stop` and `runs`: run folders and the trainings in them."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.diagnostics import report_note
from launcher.ending.history import HistoryRow, error_summary, history_rows, table_rows
from launcher.ending.outcomes import Outcome
from launcher.ending.prediction_errors import ERRORS_SCHEMA, error_groups, error_table
from launcher.errors import EnvironmentLacks, ExitCode, TrlfitError, UsageError
from launcher.inputs.stack import inspect_stack
from launcher.inputs.validation_text import shown
from launcher.output import print_json, print_text, table
from launcher.paths import expanded
from launcher.run_text.run_files import python_of
from launcher.running.checkpoints import disk_need, last_checkpoint
from launcher.running.follow import closing_lines, narrate
from launcher.running.processes import kill_tree
from launcher.running.run_record import (
    COMMAND,
    PLAN,
    PYTHON,
    claim,
    forget_next,
    marker_of,
    read_json,
    release,
    stage_next,
)
from launcher.running.runs import RunHandle, RunState, run_state, start_run, stop_run
from launcher.running.watchdog import room_problem
from launcher.writing.run_folder import is_run_folder
from launcher.writing.run_target import Target, check_is_here, free_folder, resolve_target
from launcher.writing.run_writing import check_settings, write_checked
from planner.units import format_bytes, format_seconds

MAX_GRACE_S = 86_400
"""A day: the largest checkpoints are written in less."""
START_THERE = (
    "start it there: `trlfit write -o DIR` makes the folder to copy, or plan for this machine with --machine local"
)


def run_write(args: argparse.Namespace) -> int:
    """Write the run folder, start nothing."""
    target = resolve_target(args)
    if target.spec is None:
        raise UsageError(f"{target.folder} is a run folder already; `trlfit launch` starts it")
    folder = _write(target, args)
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if args.json:
        print_json({"folder": str(folder), "files": files})
    else:
        script = shlex.quote(str(folder / "command.sh"))
        print_text(f"{folder}: {', '.join(files)}\nstart it with `bash {script}`")
    return ExitCode.DONE


def _write(target: Target, args: argparse.Namespace) -> Path:
    """Check the data and every setting in the training Python, then write; what is refused leaves nothing behind.

    Returns:
        The folder; under the next free name where another launch took the one that nobody had asked for.
    """
    spec = target.spec
    assert spec is not None
    return write_checked(
        spec,
        target.folder,
        overwrite=args.overwrite,
        check=not args.no_check,
        note=report_note,
        other=(lambda: free_folder(spec)) if args.output is None else None,
    )


def run_launch(args: argparse.Namespace) -> int:
    """Write if needed, launch, follow until the end."""
    if (args.resume or args.next) and not (args.target and is_run_folder(expanded(args.target))):
        flag = "--next" if args.next else "--resume"
        named = f"{shown(args.target)} is none" if args.target else "name one"
        raise UsageError(f"{flag} needs a run folder that was launched; {named}")
    target = resolve_target(args)
    folder, resume = target.folder, bool(args.resume)
    # A folder that is written trains in the Python it names, unless another is named now.
    python = None
    if target.spec is None and args.python is not None:
        python = inspect_stack(args.python).python
    if target.spec is not None:
        check_is_here(target.spec, START_THERE)
        folder = _write(target, args)
        _narrate_plan(target)
    elif run_state(folder).stage == "running":
        raise UsageError(f"the run in {folder} is still going; `trlfit watch` follows it, `trlfit stop` ends it")
    elif args.next:
        resume = _stage_next(folder, dry=args.dry_run)
    elif not args.no_check:
        check_settings(folder, python or _own_python(folder), frozenset())
    command = f"bash {shlex.quote(str(folder / 'command.sh'))}"
    if args.dry_run:
        _say(args, {"folder": str(folder), "command": command, "started": False}, f"would run: {command}")
        return ExitCode.DONE
    _note_before_start(folder, resume=resume, anew=target.spec is None and not args.next)
    try:
        handle = _start(folder, args, resume=resume, python=python)
        if args.detach:
            pid = handle.record.supervisor_pid
            document = {"folder": str(folder), "command": command, "started": True, "pid": pid}
            _say(args, document, f"{folder}: started; {_hints(folder)}")
            return ExitCode.DONE
        report_note(f"{folder}: started; Ctrl-C leaves it running")
        return _follow(folder, json=args.json)
    except KeyboardInterrupt:
        # Before the follower's own handler stands: the run may be up already, and then its user must know.
        if run_state(folder).stage == "running":
            return _left_running(folder)
        raise


def _own_python(folder: Path) -> str | None:
    """The Python that command.sh will take, None where it cannot be told."""
    if named := os.environ.get(PYTHON):
        return named
    try:
        return python_of((folder / COMMAND).read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return None


def _start(folder: Path, args: argparse.Namespace, *, resume: bool, python: str | None) -> RunHandle:
    try:
        return start_run(
            folder,
            detach=args.detach,
            hang_after_s=args.hang_after,
            resume=resume,
            retries=args.auto_retry,
            python=python,
        )
    except EnvironmentLacks:
        if args.next:
            forget_next(folder)  # nothing was started, so the folder's own plan stands
        raise


def _stage_next(folder: Path, *, dry: bool) -> bool:
    """Plan what follows a run that ran out of memory; whether it goes on from a checkpoint."""
    from launcher.running.next_plan import next_run  # the planner, which starting a written run does without

    state = run_state(folder)
    if state.stage == "running":
        raise UsageError(f"the run in {folder} is still going; `trlfit watch` follows it")
    if state.outcome is None:
        raise UsageError(f"the run in {folder} was never launched; `trlfit launch {shlex.quote(str(folder))}` does")
    found = next_run(folder, state.outcome)
    report_note(f"next plan: {found.sentence}")
    for remark in found.remarks:
        report_note(remark)
    if not dry:
        _stage(folder, found.files)
    return found.resumed_from is not None


def _stage(folder: Path, files: Mapping[str, str]) -> None:
    """Put the next plan's files where the next start takes them, unless one has begun meanwhile."""
    try:
        lock = claim(folder, wait_s=0.0)
        if lock is None:
            raise UsageError(f"the run in {folder} was started meanwhile; `trlfit watch` follows it")
        try:
            stage_next(folder, files)
        finally:
            release(folder, lock)
    except OSError as problem:
        raise EnvironmentLacks(f"cannot write the next plan into {folder}: {problem.strerror or problem}") from None


def _note_before_start(folder: Path, *, resume: bool, anew: bool) -> None:
    """What a user should know of checkpoints and the disk before the run starts."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is not None and resume:
        report_note(f"goes on from {checkpoint.name}")
    elif checkpoint is not None and anew:
        report_note(f"starts from the beginning; --resume goes on from {checkpoint.name}")
    _, note = room_problem(folder, disk_need(read_json(folder / PLAN)))
    if note is not None:
        report_note(note)


def _say(args: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    print_json(document) if args.json else print_text(text)


def _narrate_plan(target: Target) -> None:
    assert target.plan is not None
    best = target.plan["best"]
    memory, time = best["memory"], best["time"]
    pace = f", {format_seconds(time['step_s'])} per step" if time else ""
    report_note(
        f"predicted: {format_bytes(memory['allocated_bytes'])} allocated per process"
        f" ({format_bytes(memory['low_bytes'])} to {format_bytes(memory['high_bytes'])}){pace}"
    )


def _follow(folder: Path, *, json: bool) -> int:
    state = narrate(folder, report_note)
    if state is None:
        return _left_running(folder)
    return _closing(state, json=json)


def _left_running(folder: Path) -> int:
    report_note(f"left running; {_hints(folder)}")
    return ExitCode.INTERRUPTED


def _hints(folder: Path) -> str:
    name = shlex.quote(str(folder))
    return f"`trlfit watch {name}` follows it, `trlfit stop {name}` ends it"


def _closing(state: RunState, *, json: bool) -> int:
    """Say how a run ended; exit 6 unless it is done."""
    if state.outcome is None:
        print_json({"folder": str(state.folder), "stage": state.stage}) if json else print_text(
            f"{state.folder}: {state.note or state.stage}"
        )
        return ExitCode.DONE
    offered = _offered(state.folder, state.outcome)
    if json:
        document = {"folder": str(state.folder), "stage": state.stage, "outcome": state.outcome.to_json()}
        print_json(document if offered is None else {**document, "next": offered})
    else:
        lines = closing_lines(state.outcome, state.folder)
        if offered is not None:
            lines.append(
                f"no next plan: {offered['problem']}" if offered["problem"] else f"next plan: {offered['sentence']}"
            )
        print_text("\n".join(lines))
    return ExitCode.DONE if state.outcome.kind == "done" else ExitCode.TRAINING


def _offered(folder: Path, outcome: Outcome) -> dict[str, str | None] | None:
    """What `--next` would launch after a run that went out of memory, or why it would not; None for other ends."""
    if outcome.kind != "out_of_memory":
        return None
    from launcher.running.next_plan import next_run  # the planner, which other ends do without

    try:
        found = next_run(folder, outcome)
    except TrlfitError as error:
        return {"sentence": None, "resumed_from": None, "problem": str(error)}
    return {"sentence": found.sentence, "resumed_from": found.resumed_from, "problem": None}


def run_watch(args: argparse.Namespace) -> int:
    """Reattach to a run until it ends."""
    _check_folder(args.run)
    return _follow(args.run, json=False)


def run_stop(args: argparse.Namespace) -> int:
    """End a run and everything it started."""
    if not 0 <= args.grace <= MAX_GRACE_S:
        raise UsageError(f"--grace {args.grace:g}: give seconds from 0 to {MAX_GRACE_S:,}")
    if not args.run.exists() and (report := kill_tree(marker=marker_of(args.run), grace_s=args.grace)).ended:
        # Somebody removed the folder of a run that went on: its processes still name it.
        print_text(f"{args.run}: the folder is gone; {report.ended} processes of its run were ended")
        return ExitCode.DONE
    _check_folder(args.run)
    before = run_state(args.run)
    if before.is_over and before.outcome is not None:
        print_text(f"{args.run}: already over: {before.outcome.sentence}")
        return ExitCode.DONE
    state = stop_run(args.run, args.grace)
    print_text(f"{args.run}: {state.outcome.sentence if state.outcome else state.note or state.stage}")
    return ExitCode.DONE


def _check_folder(folder: Path) -> None:
    if not is_run_folder(folder):
        raise UsageError(f"{folder} is not a run folder; `trlfit runs` lists them")


def run_runs(args: argparse.Namespace) -> int:
    """History of runs: predicted against seen."""
    if args.root is not None and not args.root.is_dir():
        raise UsageError(f"{args.root} is not a folder")
    notes: list[str] = []
    rows = history_rows(args.root, notes)
    for note in notes:
        report_note(note)
    if args.errors:
        return _errors(rows, json=args.json)
    if args.json:
        print_json([row.to_json() for row in rows])
        return ExitCode.DONE
    if not rows:
        print_text("no runs yet; `trlfit launch` makes the first")
        return ExitCode.DONE
    header, *cells = table_rows(rows)
    summary = error_summary(rows)
    print_text(table(header, cells) + (f"\n\n{summary}" if summary else ""))
    return ExitCode.DONE


def _errors(rows: Sequence[HistoryRow], *, json: bool) -> int:
    groups = error_groups(rows)
    if json:
        print_json({"schema": ERRORS_SCHEMA, "groups": [group.to_json() for group in groups]})
    elif not groups:
        print_text("no run yet with a prediction and two steps to hold against it")
    else:
        header, *cells = error_table(groups)
        print_text(table(header, cells, right=(3, 4, 5)))
    return ExitCode.DONE
