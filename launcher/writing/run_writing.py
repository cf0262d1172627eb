"""Writing a run that was looked at first: its place, its data and every setting, as the training Python takes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Set
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.errors import EnvironmentLacks, UsageError
from launcher.inputs.validation_text import shown
from launcher.run_text.run_files import render_run
from launcher.run_text.run_spec import RunSpec, evaluation_job
from launcher.running.run_record import DATA
from launcher.writing.data import check_data
from launcher.writing.run_folder import write_run
from launcher.writing.validate import validate_run

DATA_SCHEMA = "trlfit.data/1"
NAMES_TRIED = 100
"""Of launches that start at once under names that nobody gave."""
_NOT_KEPT = frozenset({"sample_text", "notes"})
"""The data's own words, and what is said once."""


def write_checked(
    spec: RunSpec,
    folder: Path,
    *,
    overwrite: bool = False,
    check: bool = True,
    note: Callable[[str], object],
    other: Callable[[], Path] | None = None,
) -> Path:
    """Write ``spec`` to ``folder``; what is refused leaves nothing behind.

    Args:
        spec: the run.
        folder: its folder, which does not exist yet unless ``overwrite``.
        overwrite: replace what is there.
        check: look at the data and the settings first, in the training Python (half a minute).
        note: takes sentences about the data.
        other: another name where the folder was taken since it was chosen; None takes no other.

    Returns:
        The folder that was written.

    Raises:
        UsageError: the place, the data or a setting of the user's is wrong.
        EnvironmentLacks: the installed stack refuses the run, or the folder cannot be written.
    """
    files = render_run(spec)
    _check_place(folder)
    if folder.exists() and not overwrite and not (folder.is_dir() and not any(folder.iterdir())):
        if other is None:
            write_run(folder, files)  # says what is in the way, before half a minute of checks
        else:
            folder = other()
    if check:
        files[DATA] = _check_data(spec, note)
        with TemporaryDirectory(prefix="trlfit-check-") as scratch:
            trial = Path(scratch) / "run"
            write_run(trial, files)
            check_settings(trial, spec.python, set(spec.job.trl))
    for _ in range(NAMES_TRIED):
        try:
            write_run(folder, files, overwrite=overwrite)
            break
        except (UsageError, EnvironmentLacks):
            if other is None or not folder.exists():
                raise
            folder = other()
    return folder


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


def _check_data(spec: RunSpec, note: Callable[[str], object]) -> str:
    """Refuse data that training would fail on; what the training data are, as the text of data.json."""
    found: dict[str, object] = {"schema": DATA_SCHEMA}
    held_out = evaluation_job(spec.job)
    for what, job in (("data", spec.job), ("evaluation data", held_out)):
        if job is None:
            continue
        report = check_data(job, python=spec.python, model_source=spec.model_source)
        if job is spec.job:
            found |= {name: value for name, value in report.to_json().items() if name not in _NOT_KEPT}
        rows = f"{report.num_rows:,} rows" if report.num_rows is not None else "rows not counted"
        note(
            f"{what}: {report.format}, {rows}, tokens median {report.tokens_p50:,}, 99 % below {report.tokens_p99:,},"
            f" longest {report.tokens_max:,} ({report.sampled_rows} sampled)"
        )
        for sentence in report.notes:
            note(f"{what}: {sentence}")
    return json.dumps(found) + "\n"


def check_settings(folder: Path, python: str | None, own: Set[str]) -> None:
    """Refuse what the training Python would refuse at the start; ``own`` names the settings that the user gave."""
    problems = validate_run(folder, python=python)
    if not problems:
        return
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if own & set(re.findall(r"\w+", problems[0])):
        raise UsageError(f"{problems[0]}{more}")
    raise EnvironmentLacks(f"the installed stack refuses this run: {problems[0]}{more}")
