"""The longest sequence that fits, lever by lever: the staircase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.problem import PlanInput, with_job
from planner.search.levers import free_levers
from planner.search.methods import problems_of, search_job
from planner.search.search import Candidate, any_fits
from planner.search.shortage import shortage

STEP_TOKENS = 1024
"""Lengths are multiples of this, which also pads what context parallelism splits over up to 512 cards."""
MAX_TOKENS = 2**24
STAIRS = ("recompute", "loss path", "offload", "split over cards")
"""In the order of TRL's guide to long contexts: recompute is on there from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stair:
    """The longest length with one more lever allowed."""

    lever: str
    tokens: int
    candidate: Candidate | None
    stops: str = ""
    """By what the next length fails."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        choice = self.candidate.choice.to_json() if self.candidate else None
        device = self.candidate.verdict.device_bytes if self.candidate else None
        return {
            "lever": self.lever,
            "tokens": self.tokens,
            "device_bytes": device,
            "stops": self.stops,
            "choice": choice,
        }


def _asked(inputs: PlanInput, tokens: int, pins: dict[str, Any]) -> PlanInput:
    return with_job(inputs, seq_len=tokens, pins=pins, goal="fastest")


def _fits(inputs: PlanInput, steps: int, pins: dict[str, Any]) -> bool:
    problems = problems_of(_asked(inputs, steps * STEP_TOKENS, pins))
    # The lightest method fits where another does, as a rule, so it is asked first.
    return any(any_fits(problem.judge, problem.options) for problem in reversed(problems))


def longest_with(inputs: PlanInput, pins: dict[str, Any], at_least: int = 0) -> tuple[int, Candidate | None]:
    """The longest multiple of 1,024 tokens that fits under ``pins``, by doubling and bisection.

    Args:
        inputs: the job and its machine.
        pins: instead of the job's.
        at_least: a length that is known to fit; 0 for none.
    """
    low = at_least // STEP_TOKENS
    if low == 0:
        if not _fits(inputs, 1, pins):
            return 0, None
        low = 1
    high = low
    while high * STEP_TOKENS < MAX_TOKENS:
        high = low * 2
        if not _fits(inputs, high, pins):
            break
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(inputs, middle, pins) else (low, middle)
    return low * STEP_TOKENS, search_job(_asked(inputs, low * STEP_TOKENS, pins), "fastest").best


def longest(inputs: PlanInput) -> tuple[int, tuple[Stair, ...]]:
    """The longest length with every lever, and the stairs that lead there."""
    stairs: list[Stair] = []
    reached, last = 0, None
    for lever, freed in free_levers(inputs, STAIRS):
        pins = {**freed, **inputs.job.pins}
        if pins == last:
            continue
        reached, candidate = longest_with(inputs, pins, reached)
        stairs.append(Stair(lever=lever, tokens=reached, candidate=candidate, stops=_stops(inputs, reached, pins)))
        last = pins
    return reached, tuple(stairs)


def settled(inputs: PlanInput) -> PlanInput:
    """The job at the length that its goal means: of goal ``longest`` what fits, its own length where nothing does."""
    if inputs.job.goal != "longest":
        return inputs
    return at_length(inputs, longest(inputs)[0])


def at_length(inputs: PlanInput, tokens: int) -> PlanInput:
    """The job at the longest length that fits; 0 keeps its own, so that a plan can say what is missing there."""
    return with_job(inputs, seq_len=tokens or inputs.job.seq_len)


def _stops(inputs: PlanInput, tokens: int, pins: dict[str, Any]) -> str:
    """By what the closest candidate of the next length fails; empty at the end of what is asked for."""
    if tokens >= MAX_TOKENS:
        return ""
    found = search_job(_asked(inputs, tokens + STEP_TOKENS, pins), "fastest", by_group=False)
    miss = found.closest
    if miss is None:
        return ""
    problem = found.problem_of(miss)
    return shortage(problem.judge.memory_of(miss), problem.hardware, miss.frame.num_gpus)
