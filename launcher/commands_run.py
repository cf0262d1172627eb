"""`trlfit write`, `launch`, `watch`, `stop` and `runs`: run folders and the trainings in them."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher.data import check_data
from launcher.diagnostics import report_note
from launcher.errors import EnvironmentLacks, ExitCode, UsageError
from launcher.follow import closing_lines, narrate
from launcher.history import error_summary, history_rows, table_rows
from launcher.output import print_json, print_text, table
from launcher.run_files import render_run
from launcher.run_folder import is_run_folder, write_run
from launcher.run_spec import RunSpec
from launcher.run_target import Target, resolve_target
from launcher.runs import RunState, run_state, start_run, stop_run
from launcher.validate import validate_run
from launcher.validation_text import shown
from planner.units import format_bytes, format_seconds

MAX_GRACE_S = 86_400
"""A day: the largest checkpoints are written in less."""


def run_write(args: argparse.Namespace) -> int:
    """Write the run folder, start nothing."""
    target = resolve_target(args)
    if target.spec is None:
        raise UsageError(f"{target.folder} is a run folder already; `trlfit launch` starts it")
    _write(target, args)
    files = sorted(path.name for path in target.folder.iterdir() if path.is_file())
    if args.json:
        print_json({"folder": str(target.folder), "files": files})
    else:
        script = shlex.quote(str(target.folder / "command.sh"))
        print_text(f"{target.folder}: {', '.join(files)}\nstart it with `bash {script}`")
    return ExitCode.DONE


def _write(target: Target, args: argparse.Namespace) -> None:
    """Check the data and every setting in the training Python, then write; what is refused leaves nothing behind."""
    assert target.spec is not None
    spec, folder = target.spec, target.folder
    files = render_run(spec)
    _check_place(folder)
    if folder.exists() and not args.overwrite and not (folder.is_dir() and not any(folder.iterdir())):
        write_run(folder, files)  # says what is in the way, before half a minute of checks
    if not args.no_check:
        _check_data(spec)
        with TemporaryDirectory(prefix="trlfit-check-") as scratch:
            trial = Path(scratch) / "run"
            write_run(trial, files)
            _check_settings(trial, spec.python, set(spec.job.trl))
    write_run(folder, files, overwrite=args.overwrite)


def _check_place(folder: Path) -> None:
    """Refuse a place that no folder can be put in; the rest, such as a full disk, is met while writing."""
    try:
        if Path.cwd().is_relative_to(folder.resolve()):
            raise UsageError(f"-o {folder}: the folder you are in cannot be replaced; name one that does not exist yet")
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        usable = os.access(above, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise UsageError(f"-o {shown(folder)}: {reason[:1].lower()}{reason[1:]}; choose another place") from None
    if not above.is_dir():
        raise UsageError(f"-o {folder}: {above} is a file; choose another place")
    if not usable:
        raise EnvironmentLacks(f"-o {folder}: no permission to write in {above}; choose another place")


def _check_data(spec: RunSpec) -> None:
    report = check_data(spec.job, python=spec.python, model_source=spec.model_source)
    rows = f"{report.num_rows:,} rows" if report.num_rows is not None else "rows not counted"
    report_note(
        f"data: {report.format}, {rows}, tokens median {report.tokens_p50:,}, 99 % below {report.tokens_p99:,},"
        f" longest {report.tokens_max:,} ({report.sampled_rows} sampled)"
    )
    for note in report.notes:
        report_note(f"data: {note}")


def _check_settings(folder: Path, python: str | None, own: Set[str]) -> None:
    """Refuse what the training Python would refuse at the start; ``own`` names the settings that the user gave."""
    problems = validate_run(folder, python=python)
    if not problems:
        return
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if own & set(re.findall(r"\w+", problems[0])):
        raise UsageError(f"{problems[0]}{more}")
    raise EnvironmentLacks(f"the installed stack refuses this run: {problems[0]}{more}")


def run_launch(args: argparse.Namespace) -> int:
    """Write if needed, launch, follow until the end."""
    target = resolve_target(args)
    if target.spec is not None:
        _check_is_here(target.spec)
        _write(target, args)
        _narrate_plan(target)
    elif not args.no_check:
        _check_settings(target.folder, args.python, frozenset())
    command = f"bash {shlex.quote(str(target.folder / 'command.sh'))}"
    if args.dry_run:
        _say(args, {"folder": str(target.folder), "command": command, "started": False}, f"would run: {command}")
        return ExitCode.DONE
    try:
        handle = start_run(target.folder, detach=args.detach)
        if args.detach:
            _say(
                args,
                {
                    "folder": str(target.folder),
                    "command": command,
                    "started": True,
                    "pid": handle.record.supervisor_pid,
                },
                f"{target.folder}: started; {_hints(target.folder)}",
            )
            return ExitCode.DONE
        report_note(f"{target.folder}: started; Ctrl-C leaves it running")
        return _follow(target.folder, json=args.json)
    except KeyboardInterrupt:
        # Before the follower's own handler stands: the run may be up already, and then its user must know.
        if run_state(target.folder).stage == "running":
            return _left_running(target.folder)
        raise


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


def _check_is_here(spec: RunSpec) -> None:
    """A plan for another machine is written for it, and started there."""
    if spec.machine.origin in ("named", "file"):
        raise UsageError(
            f"this plan is for {spec.machine.spec}; start it there: `trlfit write -o DIR` makes the folder to copy,"
            " or plan for this machine with --machine local"
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
    if json:
        print_json({"folder": str(state.folder), "stage": state.stage, "outcome": state.outcome.to_json()})
    else:
        print_text("\n".join(closing_lines(state.outcome, state.folder)))
    return ExitCode.DONE if state.outcome.kind == "done" else ExitCode.TRAINING


def run_watch(args: argparse.Namespace) -> int:
    """Reattach to a run until it ends."""
    _check_folder(args.run)
    return _follow(args.run, json=False)


def run_stop(args: argparse.Namespace) -> int:
    """End a run and everything it started."""
    _check_folder(args.run)
    if not 0 <= args.grace <= MAX_GRACE_S:
        raise UsageError(f"--grace {args.grace:g}: give seconds from 0 to {MAX_GRACE_S:,}")
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
