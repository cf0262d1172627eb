"""Changes: the smallest alterations of the job or the machine that would fit, or help. Offered, never made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from planner.choice import Alters, LossPath
from planner.problem import PlanInput, Problem, make_problem, method_label
from planner.search.methods import search_job
from planner.search.search import Candidate, search
from planner.units import format_gib, format_seconds
from profiles.releases import newest_known, trl_release

if TYPE_CHECKING:
    from planner.advice.altered_jobs import Alteration, Asked
    from planner.advice.route_offers import Offer

MIN_GAIN = 0.10
"""A change is offered beside a plan that fits only when it saves at least this share of the step."""
WORTH_A_WORD_BYTES = 4 * 2**30
"""Host memory below this is not mentioned in a sentence."""
WORTH_IT = 0.02
"""A newer TRL is mentioned when it saves at least this share of the peak or of the step."""
LAYOUT_KNOBS = ("sharding", "cp", "sp", "tp", "dp_shard", "dp_replicate", "loss_path", "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One alteration, how to ask for it, and the best plan under it."""

    lever: str
    alters: Alters
    flags: str
    sentence: str
    problem: Problem
    """The altered job on its machine: what ``candidate`` was judged by."""
    candidate: Candidate


def goal_of(inputs: PlanInput) -> str:
    """The goal that alterations are ranked by: of the longest sequence, the fastest run."""
    return inputs.job.goal if inputs.job.goal != "longest" else "fastest"


def first_that_fits(lever: str, alters: Alters, alternatives: Iterator[Asked]) -> Change | None:
    """The first of what an alteration asks for that fits; None when none does."""
    for asked in alternatives:
        found = search_job(asked.inputs, goal_of(asked.inputs))
        best = found.best
        if best is None:
            continue
        problem = found.problem_of(best)
        other = best.choice.method != asked.inputs.job.method
        what = f"{asked.what} and {method_label(best.choice.method)}" if other else asked.what
        speed = f", {format_seconds(best.step_s)} per step" if best.time else ""
        memory = problem.judge.memory_of(best)
        on_host = memory.host.pinned_bytes + memory.host.pageable_bytes
        host = f" and {format_gib(on_host)} GiB of host memory per node" if on_host >= WORTH_A_WORD_BYTES else ""
        return Change(
            lever=lever,
            alters=alters,
            flags=asked.flags,
            sentence=f"{what}: fits with {format_gib(best.verdict.device_bytes)} GiB per GPU{host}{speed}",
            problem=problem,
            candidate=best,
        )
    return None


def changes_that_fit(inputs: PlanInput) -> list[Change]:
    """When nothing fits: each lever on its own, then, if none helps, the lightest of all together."""
    from planner.advice.altered_jobs import all_together, alterations  # plans that fit do without

    def fitting(levers: Iterable[Alteration]) -> list[Change]:
        found = [first_that_fits(lever.lever, lever.alters, lever.asked) for lever in levers]
        return [change for change in found if change is not None]

    return fitting(alterations(inputs)) or fitting([all_together(inputs)])


def changes_that_help(inputs: PlanInput, problem: Problem, best: Candidate) -> list[Change]:
    """When a plan fits: what a newer TRL buys; what else saves a tenth of the step or more.

    Lighter numerics, cards that others hold now, methods whose states stay on the card where those of the plan do not,
    and in place of a CPU the smallest GPU that fits.

    Args:
        inputs: the job as asked.
        problem: what ``best`` was judged by, which may be of another method.
        best: the chosen candidate.
    """
    found = [_newer_trl(problem, best), _lighter_numerics(problem, best)]
    if inputs.machine.busy_cards or not inputs.machine.usable_cards:
        from planner.advice.altered_jobs import idle_cards, other_cards  # most plans do without

        found.append(_faster(best, "idle cards", "nothing", idle_cards(inputs)))
        if not inputs.machine.usable_cards:
            found.append(_faster(best, "another card", "nothing", other_cards(inputs)))
    if "optimizer" in best.choice.offload:
        from planner.advice.altered_jobs import lighter_methods

        found += [_faster(best, method.lever, method.alters, method.asked) for method in lighter_methods(inputs)]
    return [change for change in found if change is not None]


def changes_by_route(found: list[Offer], best: Candidate | None) -> list[Change]:
    """Precision routes that make a plan in bf16 faster, the fastest first, each with its price in loss."""
    if best is None or best.choice.precision != "bf16":
        return []
    return [
        Change(
            lever="precision route",
            alters="numerics",
            flags=offer.flags,
            sentence=offer.sentence,
            problem=offer.problem,
            candidate=offer.candidate,
        )
        for offer in sorted(found, key=lambda offer: -(offer.gain or 0.0))
        if offer.helps and offer.problem is not None and offer.candidate is not None
    ]


def _faster(best: Candidate, lever: str, alters: Alters, asked: Iterator[Asked]) -> Change | None:
    """What fits of ``asked``, when it saves a tenth of the step."""
    change = first_that_fits(lever, alters, asked) if best.time else None
    return change if change and change.candidate.step_s < best.step_s * (1 - MIN_GAIN) else None


def _newer_trl(problem: Problem, best: Candidate) -> Change | None:
    """The same choice on the newest known TRL, when its loss costs less there."""
    inputs, newest = problem.inputs, newest_known()["trl"]
    path = trl_release(newest).loss_paths_for(inputs.job.trainer)[0]
    if inputs.stack.has("trl", newest) or best.choice.loss_path in (path, "liger"):
        return None
    stack = inputs.stack.model_copy(update={"versions": {**inputs.stack.versions, "trl": newest}})
    newer = make_problem(replace(inputs, stack=stack))
    found = newer.judge.judge(replace(best.choice, loss_path=cast("LossPath", path)), best.alters)
    saved = best.verdict.device_bytes - found.verdict.device_bytes
    gain = 1 - found.step_s / best.step_s if best.time and found.time else 0.0
    if saved < WORTH_IT * best.verdict.device_bytes and gain < WORTH_IT:
        return None
    now = inputs.stack.versions.get("trl", "?")
    sentence = (
        f"TRL {newest} computes the loss as {path}, TRL {now} as {best.choice.loss_path}:"
        f" {format_gib(abs(saved))} GiB {'less' if saved >= 0 else 'more'} per GPU at the peak"
    )
    if best.time and found.time:
        took = f"{format_seconds(found.step_s)} for {format_seconds(best.step_s)}"
        sentence += f" and {abs(gain):.0%} {'less' if gain >= 0 else 'more'} time per step, {took}"
    return Change(
        lever="newer TRL",
        alters="nothing",
        flags=f"--stack trl={newest}",
        sentence=sentence,
        problem=newer,
        candidate=found,
    )


def _lighter_numerics(problem: Problem, best: Candidate) -> Change | None:
    """Pure bf16 or 8-bit states in the same layout."""
    inputs = problem.inputs
    if "numerics" in inputs.job.allow or best.time is None or inputs.job.method != "full":
        return None
    layout = {knob: getattr(best.choice, knob) for knob in LAYOUT_KNOBS}
    open_space = replace(problem.options, allow_numerics=True, pins={**layout, **problem.options.pins})
    result = search(problem.judge, open_space, "fastest")
    faster = [c for c in result.fitting if c.alters == "numerics" and c.step_s < best.step_s * (1 - MIN_GAIN)]
    if not faster:
        return None
    found = faster[0]
    gain = 1 - found.step_s / best.step_s
    held = f"{found.choice.weights} weights, {found.choice.optimizer}"
    return Change(
        lever="numerics",
        alters="numerics",
        flags=f"--allow {','.join([*inputs.job.allow, 'numerics'])}",
        sentence=f"{held}: {gain:.0%} less time per step, but other rounding than fp32 states",
        problem=problem,
        candidate=found,
    )
