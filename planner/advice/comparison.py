"""Comparison: two candidates of one job side by side, named by pins or by their rank in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.advice.altered_jobs import pin_text
from planner.contradictions import check_inputs
from planner.planning import RefusedJob, planned_candidate
from planner.problem import PlanInput, Problem, with_job
from planner.search.longest import settled
from planner.search.methods import search_job
from planner.search.search import Candidate, distinct
from planner.search.shortage import PART_NAMES, short_bytes
from planner.units import format_gib, format_seconds

COMPARISON_SCHEMA = "trlfit.comparison/1"
Side = Mapping[str, Any] | int
"""Pins, or a rank in the plan, from 1."""


class NoSuchRank(ValueError):
    """The plan has fewer candidates that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One side: what was asked, and the candidate that it means."""

    asked: str
    problem: Problem
    candidate: Candidate


def compare(inputs: PlanInput, first: Side, second: Side) -> dict[str, Any]:
    """The `trlfit.comparison/1` document.

    A side of pins is the best candidate under the job's pins and its own; where none fits, the closest.

    Raises:
        RefusedJob: the libraries refuse every choice of a side.
        NoSuchRank: a rank beyond what fits.
        planner.pins.PinError: a pin names no knob or no value of it, or sizes that make no run.
        planner.memory.adapters.TargetError: LoRA targets that the model does not have.
    """
    inputs = settled(inputs)
    a, b = (_side(inputs, side) for side in (first, second))
    return compared(inputs, a, b)


def compared(inputs: PlanInput, a: Compared, b: Compared) -> dict[str, Any]:
    """The same of two candidates that were found before.

    Args:
        inputs: the job that both are plans of, its length settled.
        a: one side.
        b: the other; changes are counted from ``a`` to it.
    """
    documents = [planned_candidate(side.problem, side.candidate, reasons=[]) for side in (a, b)]
    return {
        "schema": COMPARISON_SCHEMA,
        "job": inputs.job.model_dump(mode="json"),
        "machine": inputs.machine.model_dump(mode="json", by_alias=True),
        "stack": inputs.stack.model_dump(mode="json"),
        "sides": [
            {"asked": side.asked, "short_bytes": short_bytes(side.problem, side.candidate), "candidate": document}
            for side, document in zip((a, b), documents, strict=True)
        ],
        "differs": _differs(a, b),
        "memory": _memory(*documents),
        "time": _time(*documents),
        "sentence": _sentence(a, b),
    }


def _side(inputs: PlanInput, side: Side) -> Compared:
    if not isinstance(side, int):
        inputs = with_job(inputs, pins={**inputs.job.pins, **side})
    check_inputs(inputs)
    found = search_job(inputs, inputs.job.goal)
    closest = found.closest
    if closest is None:
        raise RefusedJob(found.refusal)
    if isinstance(side, int):
        ranked = distinct(found.result.fitting, len(found.result.fitting))
        if not 1 <= side <= len(ranked):
            fit = f"{len(ranked)} fit; give 1 to {len(ranked)} or pins" if ranked else "none fits; give pins"
            raise NoSuchRank(f"there is no candidate {side}: {fit}")
        chosen = ranked[side - 1]
        return Compared(asked=f"candidate {side}", problem=found.problem_of(chosen), candidate=chosen)
    asked = " ".join(f"{knob}={pin_text(value)}" for knob, value in side.items())
    return Compared(asked=asked, problem=found.problem_of(closest), candidate=closest)


def _differs(a: Compared, b: Compared) -> list[dict[str, Any]]:
    first, second = a.candidate.choice.to_json(), b.candidate.choice.to_json()
    return [{"knob": knob, "values": [first[knob], second[knob]]} for knob in first if first[knob] != second[knob]]


def _memory(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Pairs of bytes: the peaks, and every phase by part."""
    a, b = first["memory"], second["memory"]
    names = [phase["name"] for phase in a["phases"]]
    by_name = [{phase["name"]: phase for phase in memory["phases"]} for memory in (a, b)]
    phases: list[dict[str, Any]] = []
    for name in names:
        pair = [of[name] for of in by_name]
        parts = [part for part in PART_NAMES if any(part in phase["parts"] for phase in pair)]
        phases.append(
            {
                "name": name,
                "bytes": [phase["bytes"] for phase in pair],
                "parts": {part: [phase["parts"].get(part, 0) for phase in pair] for part in parts},
            }
        )
    peaks = {key: [a[key], b[key]] for key in ("allocated_bytes", "reserved_bytes", "device_bytes", "headroom_bytes")}
    host = [memory["host_bytes"]["pinned"] + memory["host_bytes"]["pageable"] for memory in (a, b)]
    return {**peaks, "host_bytes": host, "peak_phase": [a["peak_phase"], b["peak_phase"]], "phases": phases}


def _time(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """Pairs of seconds; None where the card's rates are not known."""
    a, b = first["time"], second["time"]
    if a is None or b is None:
        return None
    return {
        "step_s": [a["step_s"], b["step_s"]],
        "tokens_per_s": [a["tokens_per_s"], b["tokens_per_s"]],
        "parts": {part: [a["parts"][part], b["parts"][part]] for part in a["parts"]},
    }


def _sentence(a: Compared, b: Compared) -> str:
    """B against A."""
    saved = a.candidate.verdict.device_bytes - b.candidate.verdict.device_bytes
    words = [f"B takes {format_gib(abs(saved))} GiB {'less' if saved >= 0 else 'more'} per GPU"]
    if a.candidate.time and b.candidate.time:
        gain = b.candidate.step_s / a.candidate.step_s - 1
        pace = f"({format_seconds(b.candidate.step_s)} for {format_seconds(a.candidate.step_s)})"
        more = f"{abs(gain):.0%} {'more' if gain > 0 else 'less'} time per step {pace}"
        words.append(f"and {more if abs(gain) >= 0.005 else 'the same time per step'}")
    fits = {(True, True): "both fit", (False, False): "neither fits", (True, False): "only A fits"}
    verdict = fits.get((a.candidate.fits, b.candidate.fits), "only B fits")
    return f"{' '.join(words)}; {verdict}"
