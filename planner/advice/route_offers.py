"""Offers: what each precision route would do to the chosen plan, or what keeps it away. Never made by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from planner.precision.routes import lack_of, low_routes
from planner.problem import PlanInput, Problem, make_problem, with_job
from planner.rules import first_refusal
from planner.search.search import SAME_SPEED, Candidate
from planner.units import format_seconds
from profiles.routes import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One route beside the chosen plan."""

    route: Route
    why_not: str
    """What keeps it away; empty where the machine and the job can run it."""
    problem: Problem | None = None
    """The job under it: what ``candidate`` was judged by."""
    candidate: Candidate | None = None
    """The chosen plan under it; None where there is nothing to compare."""
    gain: float | None = None
    """Share of the step that it saves; negative is slower."""

    @property
    def helps(self) -> bool:
        """It fits and saves more than the time model can tell two speeds apart."""
        return self.candidate is not None and self.candidate.fits and (self.gain or 0.0) >= SAME_SPEED

    @property
    def flags(self) -> str:
        """How to ask for it."""
        return f"--pin precision={self.route.id}"

    @property
    def sentence(self) -> str:
        """Gain and price."""
        if self.candidate is None or self.gain is None:
            return f"{self.route.name}; price: {self.route.loss}"
        less = f"{abs(self.gain):.0%} {'less' if self.gain >= 0 else 'more'} time per step"
        return f"{self.route.name}: {less}, {format_seconds(self.candidate.step_s)}; price: {self.route.loss}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        time = self.candidate.time if self.candidate else None
        return {
            "route": self.route.id,
            "name": self.route.name,
            "offered": not self.why_not,
            "why_not": self.why_not,
            "gain": round(self.gain, 4) if self.gain is not None else None,
            "step_s": float(f"{time.step_s:.6g}") if time else None,
            "loss": self.route.loss,
        }


def offers(inputs: PlanInput, problem: Problem, best: Candidate | None) -> list[Offer]:
    """Every route below 16 bits for this job on its machine.

    Args:
        inputs: the job as asked.
        problem: what ``best`` was judged by.
        best: the chosen plan, None where nothing fits.
    """
    rules = problem.judge.rules
    found: list[Offer] = []
    for route in low_routes():
        lack = lack_of(
            route, on_cpu=rules.on_cpu, capability=rules.compute_capability, versions=rules.versions, cuda=rules.cuda
        )
        if lack.kind:
            found.append(Offer(route=route, why_not=lack.reason))
        elif best is None:
            found.append(Offer(route=route, why_not=""))
        else:
            found.append(_beside(route, inputs, best))
    return found


def _beside(route: Route, inputs: PlanInput, best: Candidate) -> Offer:
    """The chosen plan under ``route``, every other knob as it is."""
    pins = {**inputs.job.pins, "precision": route.id}
    other = make_problem(with_job(inputs, method=best.choice.method, pins=pins))
    choice = replace(best.choice, precision=route.id)
    refusal = first_refusal(other.judge.rules, choice)
    if refusal is not None:
        return Offer(route=route, why_not=refusal.reason)
    candidate = other.judge.judge(choice, "numerics")
    gain = 1 - candidate.step_s / best.step_s if candidate.time and best.time else None
    return Offer(route=route, why_not="", problem=other, candidate=candidate, gain=gain)


def by_reason(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason -> the routes that it keeps away, in the order of the table."""
    grouped: dict[str, list[str]] = {}
    for route, reason in found:
        grouped.setdefault(reason, []).append(route)
    return grouped
