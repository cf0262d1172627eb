"""What `write` and `launch` were pointed at (run folder, plan, job file, model), turned into a run to write."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ExitCode, TrlfitError, UsageError
from launcher.flags import take_job_file
from launcher.inputs.model_config import resolve_architecture
from launcher.inputs.validation_text import MAX_PATH, shown
from launcher.output import json_lines
from launcher.paths import expanded, runs_dir
from launcher.planning import job_from_args, plan_from_args
from launcher.run_text.run_spec import LOCAL_FORMATS, RunSpec, dataset_builder, dataset_source
from launcher.writing.run_folder import is_run_folder
from planner.choice import Choice
from planner.job import Job
from planner.planning import PlanOutcome, with_chosen
from planner.problem import PlanInput
from planner.search.search import distinct


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
    path = expanded(text) if text else None
    if path is not None and path.is_dir() and is_run_folder(path):
        if args.output is not None:
            raise UsageError(f"{text} is a run folder already; drop -o, or name the job it should be written from")
        return Target(folder=path, spec=None)
    if path is not None and path.suffix == ".json" and path.is_file():
        from launcher.inputs.plan_file import read_document  # only a plan pays for its models

        document = read_document(path)
        if str(document.get("schema", "")).startswith("trlfit."):
            return _from_plan(path, document, args)
    args.model = text
    take_job_file(args)
    check_data_named(job_from_args(args)[0])  # before a plan, which may trace for seconds
    outcome = plan_from_args(args)
    spec, document = spec_of(outcome, args.candidate, args.python)
    return Target(folder=args.output or free_folder(spec), spec=spec, plan=document)


def spec_of(outcome: PlanOutcome, number: int, python: str | None) -> tuple[RunSpec, dict[str, Any]]:
    """Candidate ``number`` of a plan, from 1, as a run to write, and the plan with it as its best.

    Args:
        outcome: the plan.
        number: as the plan ranks those that fit.
        python: the training Python; None is the plan's.

    Raises:
        NothingFits: nothing fits as asked.
        UsageError: so many do not fit, or are not listed.
    """
    if outcome.best is None:
        raise NothingFits(nothing_fits(outcome.document))
    chosen = distinct(outcome.result.fitting, number)
    if len(chosen) < number:
        raise UsageError(f"--candidate {number}: only {len(chosen)} candidates fit")
    inputs = outcome.problem_of(chosen[-1]).inputs
    document = _chosen(outcome.document, number, inputs)
    spec = RunSpec(
        job=inputs.job,
        choice=chosen[-1].choice,
        architecture=inputs.architecture,
        stack=inputs.stack,
        machine=inputs.machine,
        plan_json=json_lines(document),
        python=python or inputs.stack.python,
    )
    return spec, document


def check_is_here(spec: RunSpec, instead: str) -> None:
    """A plan for another machine is written for it, and started there.

    Args:
        spec: the run.
        instead: what to do, after the machine's name.

    Raises:
        UsageError: it is for another machine.
    """
    if spec.machine.origin in ("named", "file"):
        raise UsageError(f"this plan is for {spec.machine.spec}; {instead}")


def check_data_named(job: Job) -> None:
    """There is data; and a file that lies here is meant as a file, even where its name could be a hub id."""
    dataset = job.data.dataset
    dataset_source(job)
    if dataset and dataset_builder(job) is None and expanded(dataset).is_file():
        kinds = ", ".join(LOCAL_FORMATS)
        raise UsageError(f"data.dataset {shown(dataset, MAX_PATH)} is a file of no known kind; convert it to {kinds}")


def _chosen(document: dict[str, Any], number: int, inputs: PlanInput) -> dict[str, Any]:
    """The document with candidate ``number`` as its best."""
    if number > max(1, inputs.top):
        raise UsageError(f"--candidate {number}: the plan lists {inputs.top}; raise --top")
    return with_chosen(document, document["candidates"][number - 1], inputs.job, inputs.architecture)


def nothing_fits(document: Mapping[str, Any]) -> str:
    """The line for a plan in which nothing fits, with the first two changes that would."""
    changes = [f"{change['flags']} ({change['sentence']})" for change in document["changes"][:2]]
    return "nothing fits as asked" + (f"; what would: {'; '.join(changes)}" if changes else "")


def _from_plan(path: Path, document: dict[str, Any], args: argparse.Namespace) -> Target:
    """The run of a plan.json, as it was planned: nothing is searched again."""
    from launcher.inputs.plan_file import plan_of

    plan = plan_of(document, path)
    fitting = [candidate for candidate in plan.candidates if candidate.fits]
    if plan.best is None or not fitting:
        raise NothingFits(f"plan {shown(path)} holds nothing that fits")
    number: int = args.candidate
    if not 1 <= number <= len(fitting):
        raise UsageError(f"--candidate {number}: the plan holds {len(fitting)} that fit")
    chosen = plan.best if number == 1 else fitting[number - 1]
    architecture = resolve_architecture(plan.job.model)
    job = plan.job_alone().model_copy(update={"method": chosen.choice.method})
    document = with_chosen(document, chosen.model_dump(mode="json"), job, architecture)
    knobs: dict[str, object] = chosen.choice.model_dump(mode="json")
    spec = RunSpec(
        job=job,
        choice=Choice.from_json(knobs),
        architecture=architecture,
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
