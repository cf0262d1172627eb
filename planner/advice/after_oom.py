"""After a run went out of memory: what it needed against what was predicted, and the best plan that fits with that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from planner.advice.explanation import change_words
from planner.choice import Choice
from planner.memory.model import MemoryEstimate
from planner.planning import PlanOutcome, make_plan
from planner.problem import PlanInput, Problem, make_problem, with_job
from planner.search.search import Candidate
from planner.units import format_bytes

SMALLER = 0.97
"""Share of the failed prediction that the next may reach at most, where the need is known: never the same again."""
SMALLER_UNKNOWN = 0.9
"""The same where nothing says how much was missing: the kernel kills without a number. A choice, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An attempt that ran out of memory: bytes of the rank that failed, None where its last words do not tell."""

    choice: Choice
    where: Literal["gpu", "host"]
    phase: str | None
    allocated_bytes: int | None = None
    """Held by tensors when an allocation failed."""
    asked_bytes: int | None = None
    unallocated_bytes: int | None = None
    """Reserved by the allocator and not in use."""
    others_bytes: int | None = None
    """Held by other processes on the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How far the prediction was off, and what the next one may reach."""

    factor: float
    """Seen need over prediction of the card's memory, at least 1; 1 where nothing is known."""
    limit_bytes: int
    """What the next plan may predict for a card, or for the host of a node after it ran out there."""
    sentence: str


def correction(failed: Failed, estimate: MemoryEstimate, room_bytes: int | None) -> Correction:
    """Hold what a failed attempt needed against its prediction.

    The need is a lower bound: tensors that were there and the one that found no room, at the phase where it failed. The
    same factor is taken for all phases.

    Args:
        failed: the attempt.
        estimate: what is predicted for its choice.
        room_bytes: what a plan may predict for a card here, reserve and other processes aside; None if not known.
    """
    if failed.where == "host":
        limit = int(estimate.host.peak_bytes * SMALLER_UNKNOWN)
        words = f"the host ran out where {format_bytes(estimate.host.peak_bytes)} were predicted for it"
        return Correction(factor=1.0, limit_bytes=limit, sentence=words)
    factor, words = _factor(failed, estimate)
    smaller = int(estimate.device_bytes * (SMALLER if failed.asked_bytes is not None else SMALLER_UNKNOWN))
    if room_bytes is None:
        return Correction(factor=factor, limit_bytes=smaller, sentence=words)
    room_bytes -= failed.others_bytes or 0
    return Correction(factor=factor, limit_bytes=max(0, min(smaller, int(room_bytes / factor))), sentence=words)


def _factor(failed: Failed, estimate: MemoryEstimate) -> tuple[float, str]:
    if failed.allocated_bytes is None or failed.asked_bytes is None:
        return 1.0, "how much was missing is not known"
    need = failed.allocated_bytes + failed.asked_bytes
    phase = next((p for p in estimate.phases if p.name == failed.phase), estimate.peak)
    at_rest = sum(size for part, size in phase.parts.items() if part not in ("context", "slack"))
    peak = sum(size for part, size in estimate.peak.parts.items() if part not in ("context", "slack"))
    predicted = at_rest + estimate.allocated_bytes - peak  # with the kernels' workspaces
    tensors = max(1.0, need / predicted) if predicted else 1.0
    slack = estimate.reserved_bytes / estimate.allocated_bytes if estimate.allocated_bytes else 1.0
    scattered = 1 + (failed.unallocated_bytes or 0) / failed.allocated_bytes if failed.allocated_bytes else 1.0
    factor = tensors * max(1.0, scattered / slack)
    words = f"{phase.name} needed at least {format_bytes(need)} of tensors, {format_bytes(predicted)} were predicted"
    if scattered > slack:
        words += f", and {format_bytes(failed.unallocated_bytes or 0)} lay unused between them"
    return factor, words


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    """The next plan, or the search that found none."""

    outcome: PlanOutcome
    candidate: Candidate | None
    correction: Correction
    sentence: str
    """What it alters, and what it is predicted to take."""


def plan_after(
    inputs: PlanInput, failed: Failed, prefer: Callable[[Choice], bool] | None = None, *, reserve: float | None = None
) -> NextPlan:
    """Plan the job again, held to what the failed attempt showed.

    On a card the correction is the job's ``reserve``, raised until what is predicted stays below the limit; so the plan
    says it, and repeats.

    Args:
        inputs: the job as it was planned, on the machine as it is now.
        failed: the attempt.
        prefer: choices that go before all others, such as those that can go on from a checkpoint.
        reserve: share of each card that was kept free before any correction; None is that of the job.

    Raises:
        planner.planning.RefusedJob: the job contradicts the libraries' rules.
        planner.pins.PinError: a pin names no knob or no value of it.
        planner.memory.adapters.TargetError: LoRA targets that the model does not have.
    """
    problem = make_problem(with_job(inputs, method=failed.choice.method))
    if problem.hardware.device == "cpu":
        failed = replace(failed, where="gpu")  # there the host is what the models call the card
    estimate = problem.judge.memory.estimate(failed.choice)
    share = inputs.job.reserve if reserve is None else reserve
    found = correction(failed, estimate, _room(problem, failed.choice, share))
    outcome = make_plan(_limited(inputs, problem, failed, found))
    fitting = [c for c in outcome.result.fitting if _is_smaller(outcome, c, failed, found)]
    best = next((c for c in fitting if prefer is not None and prefer(c.choice)), None)
    best = best or (fitting[0] if fitting else None)
    if best is None:
        return NextPlan(outcome=outcome, candidate=None, correction=found, sentence=found.sentence)
    words = change_words(failed.choice, best.choice)
    memory = outcome.problem_of(best).judge.memory_of(best)
    sentence = (
        f"{words}: {format_bytes(memory.allocated_bytes)} predicted instead of {format_bytes(estimate.allocated_bytes)}"
    )
    return NextPlan(outcome=outcome, candidate=best, correction=found, sentence=sentence)


def _room(problem: Problem, choice: Choice, reserve: float) -> int | None:
    hardware = problem.hardware
    if hardware.capacity_bytes is None:
        return None
    return int(hardware.capacity_bytes * (1 - reserve)) - hardware.others_bytes(choice.num_gpus)


def _limited(inputs: PlanInput, problem: Problem, failed: Failed, found: Correction) -> PlanInput:
    """The inputs under which nothing above the limit fits."""
    machine, hardware = inputs.machine, problem.hardware
    if failed.where == "host":
        if machine.host is None:
            return inputs
        less = min(machine.host.available_bytes, found.limit_bytes)
        return replace(
            inputs,
            machine=machine.model_copy(update={"host": machine.host.model_copy(update={"available_bytes": less})}),
        )
    if not hardware.capacity_bytes:
        return inputs
    others = hardware.others_bytes(failed.choice.num_gpus)
    # Rounded up, so that the written reserve keeps below the limit.
    reserve = -(-(1 - (found.limit_bytes + others) / hardware.capacity_bytes) * 1_000_000 // 1) / 1_000_000
    return with_job(inputs, reserve=min(0.999999, max(inputs.job.reserve, reserve)))


def _is_smaller(outcome: PlanOutcome, candidate: Candidate, failed: Failed, found: Correction) -> bool:
    if failed.where == "gpu":
        return candidate.verdict.device_bytes <= found.limit_bytes
    return outcome.problem_of(candidate).judge.memory_of(candidate).host.peak_bytes <= found.limit_bytes
