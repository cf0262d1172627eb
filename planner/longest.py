"""The longest sequence that fits, lever by lever: the staircase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.problem import PlanInput, make_problem, with_job
from planner.search import Candidate, search

STEP_TOKENS = 1024
MAX_TOKENS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Stair:
    """The longest length with one more lever allowed."""

    lever: str
    tokens: int
    candidate: Candidate | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        choice = self.candidate.choice.to_json() if self.candidate else None
        return {"lever": self.lever, "tokens": self.tokens, "choice": choice}


def _fits(inputs: PlanInput, tokens: int, pins: dict[str, Any]) -> Candidate | None:
    problem = make_problem(with_job(inputs, seq_len=tokens, pins=pins, goal="fastest"))
    return search(problem.judge, problem.options, "fastest").best


def longest_with(inputs: PlanInput, pins: dict[str, Any]) -> tuple[int, Candidate | None]:
    """The longest multiple of 1,024 tokens that fits under ``pins``, by doubling and bisection."""
    best = _fits(inputs, STEP_TOKENS, pins)
    if best is None:
        return 0, None
    low = high = 1
    while high * STEP_TOKENS < MAX_TOKENS:
        high = low * 2
        candidate = _fits(inputs, high * STEP_TOKENS, pins)
        if candidate is None:
            break
        low, best = high, candidate
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        candidate = _fits(inputs, middle * STEP_TOKENS, pins)
        if candidate is None:
            high = middle
        else:
            low, best = middle, candidate
    return low * STEP_TOKENS, best


def longest(inputs: PlanInput) -> tuple[int, tuple[Stair, ...]]:
    """The longest length with every lever, and the stairs that lead there."""
    pins = inputs.job.pins
    base: dict[str, Any] = {"recompute": "none", "offload": [], "cp": 1, "sp": 1}
    stairs: list[Stair] = []
    for lever, freed in (
        ("no lever", ()),
        ("recompute", ("recompute",)),
        ("offload", ("offload",)),
        ("split over cards", ("cp", "sp")),
    ):
        for knob in freed:
            base.pop(knob)
        tokens, candidate = longest_with(inputs, {**base, **pins})
        stairs.append(Stair(lever=lever, tokens=tokens, candidate=candidate))
    return stairs[-1].tokens, tuple(stairs)
