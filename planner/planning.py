"""Planning: inputs to the `trlfit.plan/1` document. The one entry that commands, scripts and screens share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.changes import Change, changes_that_fit, changes_that_help
from planner.contradictions import check_inputs, contradiction
from planner.explain import peak_sentence, shortage, why
from planner.memory import MemoryEstimate
from planner.plan_json import architecture_json, candidate_json
from planner.problem import PlanInput, Problem, make_problem, run_file_names, with_job
from planner.rules import job_refusals, warnings_for
from planner.search import Candidate, SearchResult, distinct, search
from planner.units import format_gib

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
        planner.pins.PinError: a pin names no knob or no value of it, or sizes that make no run.
        planner.adapters.TargetError: LoRA targets that the model does not have.
        ValueError: a size that no model can have.
    """
    check_inputs(inputs)
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
        raise RefusedJob(contradiction(problem, result))
    best = result.best
    changes = changes_that_help(problem, best) if best else changes_that_fit(inputs)
    document = _document(problem, result, changes)
    if goal == "longest":
        document["longest"] = length or None
        document["staircase"] = staircase
    return PlanOutcome(document=document, problem=problem, result=result, changes=tuple(changes))


def _candidate(problem: Problem, candidate: Candidate, *, reasons: list[str]) -> dict[str, Any]:
    nodes = -(-candidate.choice.num_gpus // max(1, problem.hardware.gpus_per_node))
    memory = problem.judge.memory_of(candidate)
    return candidate_json(
        candidate,
        memory,
        why=reasons,
        files=run_file_names(candidate.choice, nodes),
        warnings=[*warnings_for(problem.judge.rules, candidate.choice), *host_warnings(problem, memory)],
        cards=problem.hardware.cards_for(candidate.choice.num_gpus),
    )


def host_warnings(problem: Problem, memory: MemoryEstimate) -> list[str]:
    """What offload needs of a host whose memory nobody knows: that of a machine which was only named."""
    needed = memory.host_pinned_bytes + memory.host_pageable_bytes
    if not needed or problem.inputs.machine.host is not None:
        return []
    return [
        f"offload needs {format_gib(needed)} GiB of host memory per node, {format_gib(memory.host_pinned_bytes)} of it"
        " pinned; the host of a named machine is not known, so this could not be checked"
    ]


def _document(problem: Problem, result: SearchResult, changes: list[Change]) -> dict[str, Any]:
    inputs = problem.inputs
    top = inputs.top
    shown = distinct(result.fitting, top)
    misses = distinct(result.near_misses, max(3, top // 2))
    best = _candidate(problem, shown[0], reasons=why(problem.judge, shown[0])) if shown else None
    others = [_candidate(problem, c, reasons=[peak_sentence(problem.judge.memory_of(c))]) for c in shown[1:]]
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
                "candidate": _candidate(change.problem, change.candidate, reasons=[]),
            }
            for change in changes
        ],
        "judged": result.judged,
    }
