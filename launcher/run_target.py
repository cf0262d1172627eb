"""What `write` and `launch` were pointed at (run folder, plan, job file, model), turned into a run to write."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ExitCode, TrlfitError, UsageError
from launcher.job_file import read_text
from launcher.model_config import resolve_architecture
from launcher.output import json_lines
from launcher.paths import runs_dir
from launcher.planning import plan_from_args
from launcher.run_folder import is_run_folder
from launcher.run_spec import LOCAL_FORMATS, RunSpec, dataset_builder
from launcher.validation_text import MAX_PATH, shown
from planner.choice import Choice
from planner.job import Job
from planner.search import distinct

MAX_PLAN_BYTES = 64 * 2**20


class NothingFits(TrlfitError):
    """An answer, not a fault: the plan that was asked for does not fit."""

    exit_code = ExitCode.NOTHING_FITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run that exists, or one that is decided and can be written."""

    folder: Path
    spec: RunSpec | None
    """None for a folder that is already written."""
    plan: Mapping[str, Any] | None = None


def resolve_target(args: argparse.Namespace) -> Target:
    """Find out what to write or launch.

    Raises:
        UsageError: the target is none of the things it may be.
        NothingFits: nothing fits as asked.
    """
    text = args.target
    path = Path(text).expanduser() if text else None
    if path is not None and path.is_dir() and is_run_folder(path):
        if args.output is not None:
            raise UsageError(f"{text} is a run folder already; drop -o, or name the job it should be written from")
        return Target(folder=path, spec=None)
    if path is not None and path.suffix == ".json" and path.is_file() and _is_plan(path):
        return _from_plan(path, args)
    if path is not None and path.suffix in (".yaml", ".yml"):
        if args.job is not None:
            raise UsageError(f"two job files: {text} and --job {args.job}; give one")
        args.job, args.model = path, None
    else:
        args.model = text
    outcome = plan_from_args(args)
    if outcome.best is None:
        raise NothingFits(_nothing_fits(outcome.document))
    chosen = distinct(outcome.result.fitting, args.candidate)
    if len(chosen) < args.candidate:
        raise UsageError(f"--candidate {args.candidate}: only {len(chosen)} candidates fit")
    document = _chosen(outcome.document, args.candidate, args.top)
    inputs = outcome.problem.inputs
    _check_suffix(inputs.job)
    spec = RunSpec(
        job=inputs.job,
        choice=chosen[-1].choice,
        architecture=inputs.architecture,
        stack=inputs.stack,
        machine=inputs.machine,
        plan_json=json_lines(document),
        python=args.python or inputs.stack.python,
    )
    return Target(folder=args.output or free_folder(spec), spec=spec, plan=document)


def _check_suffix(job: Job) -> None:
    """A file that lies here is meant as a file, even where its name could be a hub id."""
    dataset = job.data.dataset
    if dataset and dataset_builder(job) is None and Path(dataset).expanduser().is_file():
        kinds = ", ".join(LOCAL_FORMATS)
        raise UsageError(f"data.dataset {shown(dataset, MAX_PATH)} is a file of no known kind; convert it to {kinds}")


def _chosen(document: dict[str, Any], number: int, top: int) -> dict[str, Any]:
    """The document with candidate ``number`` as its best."""
    if number == 1:
        return document
    if number > top:
        raise UsageError(f"--candidate {number}: the plan lists {top}; raise --top")
    return {**document, "best": document["candidates"][number - 1]}


def _nothing_fits(document: Mapping[str, Any]) -> str:
    changes = [f"{change['flags']} ({change['sentence']})" for change in document["changes"][:2]]
    return "nothing fits as asked" + (f"; what would: {'; '.join(changes)}" if changes else "")


def _is_plan(path: Path) -> bool:
    try:
        data = json.loads(read_text(path, "plan", MAX_PLAN_BYTES))
    except (json.JSONDecodeError, RecursionError):
        raise UsageError(f"{path} is not valid JSON") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} is neither a plan nor a config.json")
    return str(data.get("schema", "")).startswith("trlfit.")  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]


def _from_plan(path: Path, args: argparse.Namespace) -> Target:
    """The run of a plan.json, as it was planned: nothing is searched again."""
    from pydantic import ValidationError

    from planner.plan import Plan, PlannedCandidate

    text = read_text(path, "plan", MAX_PLAN_BYTES)
    try:
        plan = Plan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"plan {shown(path)}: {where}: {first['msg'].lower()}; make it with `trlfit plan --json`"
        ) from None
    fitting = [candidate for candidate in plan.candidates if candidate.fits]
    if plan.best is None or not fitting:
        raise NothingFits(f"plan {shown(path)} holds nothing that fits")
    number: int = args.candidate
    if not 1 <= number <= len(fitting):
        raise UsageError(f"--candidate {number}: the plan holds {len(fitting)} that fit")
    chosen: PlannedCandidate = plan.best if number == 1 else fitting[number - 1]
    document: dict[str, Any] = json.loads(text)
    document["best"] = chosen.model_dump(mode="json")
    knobs: dict[str, object] = chosen.choice.model_dump(mode="json")
    spec = RunSpec(
        job=plan.job_alone(),
        choice=Choice.from_json(knobs),
        architecture=resolve_architecture(plan.job.model),
        stack=plan.stack,
        machine=plan.machine,
        plan_json=json_lines(document),
        python=args.python or plan.stack.python,
    )
    return Target(folder=args.output or free_folder(spec), spec=spec, plan=document)


def free_folder(spec: RunSpec) -> Path:
    """``runs/MODEL-METHOD-N`` with the first free N."""
    name = Path(spec.job.model.rstrip("/")).name.removesuffix(".json")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "model"
    number = 1
    while (folder := runs_dir() / f"{stem}-{spec.job.trainer}-{spec.choice.method}-{number}").exists():
        number += 1
    return folder
