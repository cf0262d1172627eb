"""Planning: inputs to the `trlfit.plan/1` document. The one entry that commands, scripts and screens share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.changes import Change, changes_that_fit, changes_that_help
from planner.explain import shortage, why
from planner.plan_json import architecture_json, candidate_json
from planner.problem import PlanInput, Problem, make_problem, run_file_names, with_job
from planner.rules import all_refusals, job_refusals, warnings_for
from planner.search import Candidate, SearchResult, distinct, search
from planner.space import frames

PLAN_SCHEMA = "trlfit.plan/1"


class RefusedJob(ValueError):
    """The job or its pins ask for something that the libraries refuse, whatever else is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """The document and the values behind it."""

    document: dict[str, Any]
    problem: Problem
    result: SearchResult
    changes: tuple[Change, ...]

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate."""
        return self.result.best


def make_plan(inputs: PlanInput) -> PlanOutcome:
    """Plan ``inputs.job``.

    Raises:
        RefusedJob: the job or its pins contradict the libraries' rules.
        planner.pins.PinError: a pin names no knob or no value of it.
        ValueError: a size that no model can have.
    """
    staircase: list[dict[str, Any]] = []
    length = 0
    if inputs.job.goal == "longest":
        from planner.longest import longest  # only this goal pays for it

        length, stairs = longest(inputs)
        staircase = [stair.to_json() for stair in stairs]
        inputs = with_job(inputs, seq_len=length or inputs.job.seq_len)
    problem = make_problem(inputs)
    refused = job_refusals(problem.judge.rules)
    if refused:
        raise RefusedJob(refused[0].reason)
    goal = inputs.job.goal
    result = search(problem.judge, problem.options, goal)
    if not result.fitting and not result.near_misses:
        raise RefusedJob(_contradiction(problem, result))
    best = result.best
    changes = changes_that_help(problem, best) if best else changes_that_fit(inputs)
    document = _document(problem, result, changes)
    if goal == "longest":
        document["longest"] = length or None
        document["staircase"] = staircase
    return PlanOutcome(document=document, problem=problem, result=result, changes=tuple(changes))


def _contradiction(problem: Problem, result: SearchResult) -> str:
    """One sentence when no combination of knobs is legal: the rule that refused the most."""
    if not result.rejected:
        return (
            "no combination of the pinned sizes gives a run on this machine; "
            "drop a pin among gpus, cp, sp, tp, dp_shard, dp_replicate"
        )
    pinned = problem.options.pins
    frame = next(iter(frames(problem.options, problem.hardware)), None)
    if frame is not None and len(pinned) >= 10:
        reasons = all_refusals(problem.judge.rules, frame[0])
        if reasons:
            return "these pins contradict each other: " + "; ".join(r.reason for r in reasons)
    _, refusal, _ = max(result.rejected.values(), key=lambda item: item[0])
    return f"no run is possible: {refusal.reason}"


def _candidate(problem: Problem, candidate: Candidate, *, reasons: list[str]) -> dict[str, Any]:
    nodes = -(-candidate.choice.num_gpus // max(1, problem.hardware.gpus_per_node))
    return candidate_json(
        candidate,
        problem.judge.memory_of(candidate),
        why=reasons,
        files=run_file_names(candidate.choice, nodes),
        warnings=warnings_for(problem.judge.rules, candidate.choice),
        cards=problem.hardware.cards_for(candidate.choice.num_gpus),
    )


def _document(problem: Problem, result: SearchResult, changes: list[Change]) -> dict[str, Any]:
    inputs = problem.inputs
    top = inputs.top
    shown = distinct(result.fitting, top)
    misses = distinct(result.near_misses, max(3, top // 2))
    best = _candidate(problem, shown[0], reasons=why(problem.judge, shown[0])) if shown else None
    others = [_candidate(problem, c, reasons=why(problem.judge, c)[:1]) for c in shown[1:]]
    missing = [_candidate(problem, c, reasons=[shortage(problem.judge.memory_of(c))]) for c in misses]
    blocks = problem.judge.memory.blocks(inputs.job.method)
    return {
        "schema": PLAN_SCHEMA,
        "job": {**inputs.job.model_dump(mode="json"), "origin": dict(inputs.origins)},
        "machine": inputs.machine.model_dump(mode="json", by_alias=True),
        "stack": inputs.stack.model_dump(mode="json"),
        "architecture": architecture_json(inputs.architecture, blocks),
        "best": best,
        "candidates": ([best] if best else []) + others + ([] if shown else missing),
        "near_misses": missing,
        "rejected": {
            rule: {"count": count, "example": refusal.reason, "choice": choice.to_json()}
            for rule, (count, refusal, choice) in sorted(result.rejected.items())
        },
        "changes": [
            {
                "lever": change.lever,
                "alters": change.alters,
                "flags": change.flags,
                "sentence": change.sentence,
                "candidate": _candidate(problem, change.candidate, reasons=[]),
            }
            for change in changes
        ],
        "judged": result.judged,
    }
