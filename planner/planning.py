"""Planning: inputs to the `trlfit.plan/1` document. The one entry that commands, scripts and screens share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.advice.changes import Change, changes_by_route, changes_that_fit, changes_that_help
from planner.advice.reasons import peak_sentence, why
from planner.advice.route_offers import offers
from planner.architecture import Architecture
from planner.contradictions import check_inputs
from planner.job import Job
from planner.memory.blocks import parameter_blocks
from planner.memory.model import MemoryEstimate
from planner.plan_json import architecture_json, candidate_json
from planner.problem import PlanInput, Problem, run_file_names
from planner.rules import warnings_for
from planner.search.methods import JobSearch, search_job
from planner.search.search import Candidate, SearchResult, distinct
from planner.search.shortage import shortage
from planner.time.run_cost import cost_of
from planner.units import format_gib

PLAN_SCHEMA = "trlfit.plan/1"
CHOSEN_HERE = "planner"
"""The origin of a method that the job allowed to be altered, once a run is written."""


class RefusedJob(ValueError):
    """The job or its pins ask for something that the libraries refuse, whatever else is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """The document and the values behind it."""

    document: dict[str, Any]
    found: JobSearch
    changes: tuple[Change, ...]

    @property
    def problem(self) -> Problem:
        """The job's own; ``problem_of`` has that of a candidate, which may be of another method."""
        return self.found.problems[0]

    def problem_of(self, candidate: Candidate) -> Problem:
        """The problem that ``candidate`` comes from."""
        return self.found.problem_of(candidate)

    @property
    def result(self) -> SearchResult:
        """Everything that was searched, of all methods together."""
        return self.found.result

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate."""
        return self.result.best


def make_plan(inputs: PlanInput, *, explain: bool = False) -> PlanOutcome:
    """Plan ``inputs.job``.

    Args:
        inputs: everything resolved.
        explain: add the long ``explanation`` to the document.

    Raises:
        RefusedJob: the job or its pins contradict the libraries' rules.
        planner.pins.PinError: a pin names no knob or no value of it, or sizes that make no run.
        planner.memory.adapters.TargetError: LoRA targets that the model does not have.
        ValueError: a size that no model can have.
    """
    check_inputs(inputs)
    staircase: list[dict[str, Any]] = []
    length = 0
    if inputs.job.goal == "longest":
        from planner.search.longest import at_length, longest  # only this goal pays for it

        length, stairs = longest(inputs)
        staircase = [stair.to_json() for stair in stairs]
        inputs = at_length(inputs, length)
    goal = inputs.job.goal
    found = search_job(inputs, goal)
    if found.closest is None:
        raise RefusedJob(found.refusal)
    best = found.best
    problem = found.problem_of(best) if best else found.problems[0]
    changes = changes_that_help(inputs, problem, best) if best else changes_that_fit(inputs)
    routes = offers(inputs, problem, best)
    changes += changes_by_route(routes, best)
    document = _document(inputs, found, changes)
    document["routes"] = [offer.to_json() for offer in routes]
    if goal == "longest":
        document["longest"] = length or None
        document["staircase"] = staircase
    if explain:
        from planner.advice.explanation import explanation  # only this question pays for it

        document["explanation"] = explanation(
            problem, best, [(found.problem_of(miss), miss) for miss in _shown_misses(found.result, inputs.top)]
        )
    return PlanOutcome(document=document, found=found, changes=tuple(changes))


def with_chosen(
    document: Mapping[str, Any], chosen: Mapping[str, Any], job: Job, architecture: Architecture
) -> dict[str, Any]:
    """A plan with one of its candidates as its best, as a run that takes it keeps it.

    Args:
        document: the plan.
        chosen: a candidate of it.
        job: the plan's, under the method of ``chosen``.
        architecture: the plan's model.
    """
    asked: Mapping[str, Any] = document["job"]
    if asked.get("method") != job.method:
        asked = {**asked, "method": job.method, "origin": {**asked.get("origin", {}), "method": CHOSEN_HERE}}
    targets = job.lora.target_modules
    named = targets if isinstance(targets, str) else tuple(targets)
    blocks = parameter_blocks(architecture, job.method, job.lora.r, named)
    parameters = architecture_json(architecture, blocks)["parameters"]
    shapes = {**document["architecture"], "parameters": parameters}
    return {**document, "job": asked, "architecture": shapes, "best": chosen}


def planned_candidate(problem: Problem, candidate: Candidate, *, reasons: list[str]) -> dict[str, Any]:
    """One candidate as plans show it, with ``reasons`` for its ``why``."""
    nodes = -(-candidate.choice.num_gpus // max(1, problem.hardware.gpus_per_node))
    memory = problem.judge.memory_of(candidate)
    return candidate_json(
        candidate,
        memory,
        why=reasons,
        files=run_file_names(candidate.choice, nodes),
        warnings=[*warnings_for(problem.judge.rules, candidate.choice), *host_warnings(problem, memory)],
        cards=problem.hardware.cards_for(candidate.choice.num_gpus),
        cost=cost_of(problem, candidate),
    )


def _missing(problem: Problem, miss: Candidate) -> str:
    return shortage(problem.judge.memory_of(miss), problem.hardware, miss.frame.num_gpus)


def host_warnings(problem: Problem, memory: MemoryEstimate) -> list[str]:
    """What a run needs of a host whose memory nobody knows: that of a machine which was only named.

    Said of offload, and of any run that needs more than the cards of a node hold together.
    """
    host, hardware = memory.host, problem.hardware
    offloads = host.pinned_bytes + host.pageable_bytes > 0
    usual = (hardware.capacity_bytes or 0) * hardware.gpus_per_node
    if problem.inputs.machine.host is not None or not (offloads or host.peak_bytes > usual):
        return []
    return [
        f"the host of a named machine is not known: this needs {format_gib(host.peak_bytes)} GiB of memory per node,"
        f" {format_gib(host.load_bytes)} to load, {format_gib(host.pinned_bytes + host.pageable_bytes)} for offload"
        f" ({format_gib(host.pinned_bytes)} pinned), {format_gib(host.save_bytes)} to save"
    ]


def _half_precision(problem: Problem) -> list[str]:
    """What a card without bf16 changes."""
    hardware = problem.hardware
    if hardware.has_bf16:
        return []
    return [
        f"{hardware.name} has no bf16 (compute capability {hardware.compute_capability}): the run trains in fp16 with a"
        " loss scaler"
    ]


def _unlike_probes(best: Mapping[str, Any] | None, others: list[dict[str, Any]]) -> list[str]:
    """That a probe's numbers stand beside a model's, where the best plan is of the second kind.

    A probe sees what the models leave out, so a plan may come first because nothing was measured of it.
    """
    measured = [other["choice"] for other in others if other["memory"]["evidence"] == "measured"]
    if best is None or not measured or best["memory"]["evidence"] == "measured":
        return []
    differs = [knob for knob, value in best["choice"].items() if value != measured[0][knob]]
    pins = " ".join(f"--pin {knob}={best['choice'][knob]}" for knob in ("recompute", "loss_path") if knob in differs)
    return [
        "the best plan was not probed; others listed were, and a probe counts what the model leaves out:"
        f" `trlfit probe MODEL --measure{f' {pins}' if pins else ''}` measures the best one too"
    ]


def _beside_what_ran(problem: Problem, best: Candidate | None) -> list[str]:
    """What plans that ran here have to say of the best one."""
    if best is None or problem.probes is None or not problem.probes.ran:
        return []
    from planner.measured.whole import notes_of_what_ran  # only plans with a probe pay for it

    return notes_of_what_ran(problem.probes.ran, best.choice)


def _shown_misses(result: SearchResult, top: int) -> list[Candidate]:
    return distinct(result.near_misses, max(3, top // 2))


def _document(inputs: PlanInput, found: JobSearch, changes: list[Change]) -> dict[str, Any]:
    result, problem_of, top = found.result, found.problem_of, inputs.top
    shown = distinct(result.fitting, top)
    misses = _shown_misses(result, top)
    problem = problem_of(shown[0]) if shown else found.problems[0]
    best = planned_candidate(problem, shown[0], reasons=why(problem.judge, shown[0])) if shown else None
    others = [
        planned_candidate(problem_of(c), c, reasons=[peak_sentence(problem_of(c).judge.memory_of(c))])
        for c in shown[1:]
    ]
    missing = [planned_candidate(problem_of(c), c, reasons=[_missing(problem_of(c), c)]) for c in misses]
    blocks = problem.judge.memory.blocks(problem.options.method)
    ran = _beside_what_ran(problem, shown[0] if shown else None)
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
                "candidate": planned_candidate(change.problem, change.candidate, reasons=[]),
            }
            for change in changes
        ],
        "judged": result.judged,
        "notes": [
            *_half_precision(problem),
            *inputs.notes,
            *(ran or _unlike_probes(best, others)),
        ],
    }
