"""The ladder: for a job that does not fit, what each lever leaves missing, in the order of long sequences.

The levers that change no number of the training come first and add up: loss path, recompute, offload, split over cards.
Then come the alterations that are offered, each on its own. Every rung is the model's own answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.advice.altered_jobs import Alteration, all_together, alterations, pin_text
from planner.advice.changes import goal_of
from planner.choice import Alters
from planner.plan_json import round_significant
from planner.problem import PlanInput, Problem, with_job
from planner.search.levers import KNOB_LEVERS, free_levers
from planner.search.methods import search_job
from planner.search.search import Candidate
from planner.search.shortage import short_bytes
from planner.units import format_gib, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One lever more, and the closest that comes of it."""

    lever: str
    alters: Alters
    flags: str
    """What the user would add; empty where the planner pulls the lever by itself."""
    problem: Problem
    candidate: Candidate | None
    """None where the libraries refuse every combination."""
    refused: str = ""
    """Why, then."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        found = self.candidate
        return {
            "lever": self.lever,
            "alters": self.alters,
            "flags": self.flags,
            "fits": found is not None and found.fits,
            "device_bytes": found.verdict.device_bytes if found else None,
            "short_bytes": short_bytes(self.problem, found) if found else None,
            "step_s": round_significant(found.step_s) if found and found.time else None,
            "sentence": self.sentence,
            "choice": found.choice.to_json() if found else None,
        }

    @property
    def sentence(self) -> str:
        """What comes of it."""
        found = self.candidate
        if found is None:
            return self.refused
        size = f"{format_gib(found.verdict.device_bytes)} GiB"
        if not found.fits:
            return f"{size}, {format_gib(short_bytes(self.problem, found))} GiB too many with reserve and interval"
        return f"fits with {size}" + (f", {format_seconds(found.step_s)} per step" if found.time else "")


def ladder(inputs: PlanInput) -> list[Rung]:
    """Every rung for a job of which nothing fits."""
    rungs: list[Rung] = []
    for lever, pins in free_levers(inputs, tuple(KNOB_LEVERS)):
        dropped = {knob: inputs.job.pins[knob] for knob in KNOB_LEVERS.get(lever, ()) if knob in inputs.job.pins}
        flags = " ".join(f"--pin {knob}={pin_text(value)}" for knob, value in dropped.items())
        rungs.append(_rung(lever, "nothing", f"(drop {flags})" if flags else "", with_job(inputs, pins=pins)))
    rungs += [rung for alteration in alterations(inputs) if (rung := _first_that_fits(alteration))]
    if not any(rung.candidate is not None and rung.candidate.fits for rung in rungs):
        together = _first_that_fits(all_together(inputs))
        rungs += [together] if together else []
    return rungs


def _first_that_fits(alteration: Alteration) -> Rung | None:
    """The first that fits, else the last that was tried; None where there is nothing to try."""
    rung = None
    for asked in alteration.asked:
        rung = _rung(alteration.lever, alteration.alters, asked.flags, asked.inputs)
        if rung.candidate is not None and rung.candidate.fits:
            break
    return rung


def _rung(lever: str, alters: Alters, flags: str, inputs: PlanInput) -> Rung:
    found = search_job(inputs, goal_of(inputs), by_group=False)
    closest = found.closest
    problem = found.problem_of(closest) if closest else found.problems[0]
    refused = "" if closest else found.refusal
    return Rung(lever=lever, alters=alters, flags=flags, problem=problem, candidate=closest, refused=refused)
