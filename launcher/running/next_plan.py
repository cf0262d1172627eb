"""The plan that follows a run that went out of memory, as files for its own folder.

``python -m launcher.running.next_plan FOLDER`` reads the outcome on stdin, puts the files into ``.next`` and prints one
JSON document: ``sentence`` and ``resumed_from``, or ``error``. The supervisor asks that way.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from launcher.ending.outcomes import Outcome
from launcher.errors import TrlfitError, UsageError
from launcher.inputs.plan_file import plan_of, read_document
from launcher.narration import Narrator
from launcher.output import json_lines
from launcher.planning import answered, plan_inputs
from launcher.run_text.run_files import TRAIN_FILE, render_run
from launcher.run_text.run_spec import RunSpec
from launcher.run_text.training_script import render_training_script
from launcher.running.checkpoints import last_checkpoint, why_not_loadable
from launcher.running.run_record import ATTEMPTS, PLAN, read_json, stage_next
from launcher.writing.run_target import NothingFits, nothing_fits
from planner.advice.after_oom import Failed, NextPlan, plan_after
from planner.choice import Choice
from planner.job import Job
from planner.plan import Plan
from planner.planning import planned_candidate, with_chosen
from planner.problem import PlanInput


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """Files of the next attempt and what is to be said of it."""

    files: Mapping[str, str]
    sentence: str
    resumed_from: str | None
    """Checkpoint that it goes on from; None starts from the beginning."""
    from_start: str | None
    """Why not from a checkpoint that there is, as a clause."""
    edited: bool
    """train.py is not what is written for the plan that failed: whoever changed it finds it among the attempts."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that belong beside ``sentence``."""
        found: list[str] = []
        if self.from_start is not None:
            found.append(f"it starts from the beginning and not from the last checkpoint: {self.from_start}")
        if self.edited:
            found.append(
                "train.py was changed since it was written; the next one is new, the old one kept in attempts/"
            )
        return tuple(found)


def next_run(folder: Path, outcome: Outcome, narrator: Narrator | None = None) -> NextRun:
    """Plan what follows.

    Args:
        folder: The run folder, as the failed attempt left it.
        outcome: How that attempt ended.
        narrator: Told what is wrong on this machine; None narrates on stderr.

    Raises:
        UsageError: the run did not end for want of memory, or no plan would help.
        NothingFits: nothing smaller fits as asked.
        EnvironmentLacks: something had to be asked and could not.
    """
    _check_kind(folder, outcome)
    document = read_document(folder / PLAN)
    plan = plan_of(document, folder / PLAN)
    if plan.best is None:
        raise UsageError(f"plan {folder / PLAN} chose nothing: there is nothing to follow it")
    before = plan.best.choice.model_dump(mode="json")
    job, base_dir = _with_full_paths(plan.job_alone(), folder)
    inputs = plan_inputs(job, plan.job.origin, plan.stack.python, top=8, narrator=narrator)
    checkpoint = last_checkpoint(folder)
    transformers = inputs.stack.versions.get("transformers")

    def loadable(choice: Choice) -> bool:
        return why_not_loadable(before, choice.to_json(), transformers) is None

    failed = _failed(Choice.from_json(before), outcome)
    reserve = min(_first_reserve(folder), job.reserve)
    found = answered(lambda asked: plan_after(asked, failed, loadable if checkpoint else None, reserve=reserve), inputs)
    if found.candidate is None:
        raise NothingFits(f"{found.sentence}; {nothing_fits(found.outcome.document)}")
    spec = _spec(found, plan, inputs, base_dir)
    why = None
    if checkpoint is not None:
        why = why_not_loadable(before, spec.choice.to_json(), transformers)
    sentence = f"{found.sentence} ({found.correction.sentence})"
    return NextRun(
        files=render_run(spec),
        edited=_is_edited(folder, _written(plan, job, inputs, base_dir)),
        sentence=sentence,
        resumed_from=checkpoint.name if checkpoint is not None and why is None else None,
        from_start=why,
    )


def _check_kind(folder: Path, outcome: Outcome) -> None:
    if outcome.kind != "out_of_memory":
        raise UsageError(
            f"the run in {folder} did not run out of memory ({outcome.sentence}): no smaller plan is called for;"
            " `trlfit launch` starts it again, --resume from its last checkpoint"
        )
    if outcome.shortage is not None and outcome.shortage.where == "shared_memory":
        raise UsageError(
            f"{folder}: /dev/shm was too small, which no plan changes; make it larger (docker run --shm-size) or set"
            " dataloader_num_workers to 0"
        )


def _failed(choice: Choice, outcome: Outcome) -> Failed:
    shortage = outcome.shortage
    if shortage is None:
        return Failed(choice=choice, where="gpu", phase=outcome.phase)
    return Failed(
        choice=choice,
        where=cast("Literal['gpu', 'host']", shortage.where),
        phase=outcome.phase,
        allocated_bytes=shortage.allocated_bytes,
        asked_bytes=shortage.asked_bytes,
        unallocated_bytes=shortage.unallocated_bytes,
        others_bytes=shortage.others_bytes,
    )


def _first_reserve(folder: Path) -> float:
    """The least reserve of all attempts' plans: what the job kept free before it was corrected."""
    reserves = [1.0]
    for path in (folder / ATTEMPTS).glob(f"*/{PLAN}"):
        job = (read_json(path) or {}).get("job")
        if isinstance(job, dict) and isinstance(value := cast("dict[str, Any]", job).get("reserve"), float):
            reserves.append(value)
    return min(reserves)


def _spec(found: NextPlan, plan: Plan, inputs: PlanInput, base_dir: str | None) -> RunSpec:
    assert found.candidate is not None
    problem = found.outcome.problem_of(found.candidate)
    chosen = planned_candidate(problem, found.candidate, reasons=[f"after out of memory: {found.correction.sentence}"])
    document = with_chosen(found.outcome.document, chosen, problem.inputs.job, problem.inputs.architecture)
    return RunSpec(
        job=problem.inputs.job,
        choice=found.candidate.choice,
        architecture=problem.inputs.architecture,
        stack=problem.inputs.stack,
        machine=inputs.machine,
        plan_json=json_lines(document),
        python=plan.stack.python,
        base_dir=base_dir,
    )


def _written(plan: Plan, job: Job, inputs: PlanInput, base_dir: str | None) -> RunSpec:
    """The run that failed, as it was written."""
    assert plan.best is not None
    return RunSpec(
        job=job,
        choice=Choice.from_json(plan.best.choice.model_dump(mode="json")),
        architecture=inputs.architecture,
        stack=plan.stack,
        machine=plan.machine,
        plan_json="",
        python=plan.stack.python,
        base_dir=base_dir,
    )


def _is_edited(folder: Path, spec: RunSpec) -> bool:
    try:
        return (folder / TRAIN_FILE).read_text(encoding="utf-8") != render_training_script(spec)
    except (OSError, ValueError, TrlfitError):
        return True


def _with_full_paths(job: Job, folder: Path) -> tuple[Job, str | None]:
    """The job with the paths that train.py has, and the folder that it was written from, where it says so.

    A job's relative paths start where `trlfit write` ran, which a run folder does not otherwise hold.
    """
    names, base_dir = _constants(folder / TRAIN_FILE)
    data = job.data.model_copy(
        update={
            "dataset": names.get("DATASET", job.data.dataset),
            "eval_dataset": names.get("EVAL_DATASET", job.data.eval_dataset) if job.data.eval_dataset else None,
        }
    )
    # A length that was searched is the run's length now.
    goal = "fastest" if job.goal == "longest" else job.goal
    return job.model_copy(update={"model": names.get("MODEL", job.model), "data": data, "goal": goal}), base_dir


def _constants(script: Path) -> tuple[dict[str, str], str | None]:
    """Texts that train.py assigns to names, and what it puts before its import path."""
    try:
        body = ast.parse(script.read_text(encoding="utf-8", errors="surrogateescape")).body
    except (OSError, SyntaxError, ValueError):
        return {}, None
    names: dict[str, str] = {}
    base_dir: str | None = None
    for line in body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            if isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
                names[line.targets[0].id] = line.value.value
        elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
            call = line.value
            if ast.unparse(call.func) == "sys.path.insert" and isinstance(last := call.args[-1], ast.Constant):
                base_dir = str(last.value)
    return names, base_dir


class _Silent:
    """Nobody reads what the supervisor's child says."""

    def warn(self, message: str) -> None:
        pass

    def traced(self, done: int, of: int, seconds: float) -> None:
        pass


def main() -> int:
    """Answer the supervisor."""
    folder = Path(sys.argv[1])
    answer: dict[str, Any]
    try:
        outcome = Outcome.from_json(json.load(sys.stdin))
        if outcome is None:
            raise UsageError("no outcome was given")
        found = next_run(folder, outcome, _Silent())
        stage_next(folder, found.files)
        answer = {"sentence": "; ".join((found.sentence, *found.remarks)), "resumed_from": found.resumed_from}
    except (TrlfitError, OSError) as error:
        answer = {"error": str(error)}
    except Exception as bug:
        answer = {"error": f"bug in trlfit: {type(bug).__name__}: {bug}"}
    print(json.dumps(answer))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
