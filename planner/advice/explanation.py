"""The explanation of a plan: what binds, what one change of a knob would do, and what makes the rest fit.

`planner.advice.reasons` gives each candidate its short reasons; this is the long answer, worked out only on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planner.advice.neighbours import GPUS_USED, Neighbour, neighbours
from planner.choice import Choice, OffloadTarget
from planner.plan_json import round_significant
from planner.problem import Problem, method_label
from planner.search.search import GROUPS, Candidate
from planner.search.shortage import short_bytes
from planner.time.waits import waits
from planner.units import format_gib, format_seconds

SHOWN_PARTS = 4
WORTH_SAYING = 0.01
"""A change is listed when it moves the peak or the step by this share."""
PAIRS_FROM = 6
"""Near misses that no single change makes fit: pairs are tried from this many of the closest neighbours."""


def explanation(
    problem: Problem, best: Candidate | None, misses: Sequence[tuple[Problem, Candidate]]
) -> dict[str, Any]:
    """The plan's ``explanation`` as plain JSON.

    Args:
        problem: of the best candidate, else the job's own.
        best: the chosen candidate, None where nothing fits.
        misses: the near misses, each with the problem that judged it.

    ``binds``, ``levers`` and ``releases`` are of the chosen plan, ``near_misses`` come in the plan's order, and the
    ``ladder`` is there where nothing fits.
    """
    from planner.advice.releases_compared import releases_compared

    rungs: list[dict[str, Any]] = []
    if best is None:
        from planner.advice.ladder import ladder

        rungs = [rung.to_json() for rung in ladder(problem.inputs)]
    return {
        "binds": _binds(problem, best) if best else None,
        "levers": [_lever_json(problem, best, found) for found in telling(problem, best)] if best else [],
        "releases": releases_compared(problem, best) if best else [],
        "near_misses": [_miss_json(*miss) for miss in misses],
        "ladder": rungs,
    }


def _binds(problem: Problem, best: Candidate) -> dict[str, Any]:
    """The phase that decides with its largest parts, and what the step waits for."""
    memory = problem.judge.memory_of(best)
    parts = sorted(memory.peak.parts.items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    shares = waits(problem.judge.time, best.choice)
    resource = max(shares, key=lambda name: shares[name]) if shares else None
    return {
        "phase": memory.peak_phase,
        "device_bytes": memory.device_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "taken_bytes": problem.hardware.others_bytes(best.choice.num_gpus),
        "headroom_bytes": memory.headroom_bytes,
        "parts": {name: size for name, size in parts if size},
        "resource": resource,
        "resources": {name: round_significant(share, 4) for name, share in shares.items()} if shares else {},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one change does, against the choice that it starts from."""

    freed_bytes: int
    extra_s: float | None
    """Seconds of a step more; None where times are not known."""
    extra_share: float | None


def effect(origin: Candidate, found: Candidate) -> Effect:
    """Bytes and seconds of ``found`` against ``origin``; both keep the global batch."""
    freed = origin.verdict.device_bytes - found.verdict.device_bytes
    if origin.time is None or found.time is None:
        return Effect(freed_bytes=freed, extra_s=None, extra_share=None)
    extra = found.step_s - origin.step_s
    return Effect(freed_bytes=freed, extra_s=extra, extra_share=extra / origin.step_s)


def telling(problem: Problem, best: Candidate) -> list[Neighbour]:
    """Of each lever the change that frees the most memory and the one that saves the most time."""
    by_lever: dict[str, list[Neighbour]] = {}
    for found in neighbours(problem, best):
        by_lever.setdefault(found.lever, []).append(found)
    told: list[Neighbour] = []
    for group in by_lever.values():
        roomiest = max(group, key=lambda n: effect(best, n.candidate).freed_bytes)
        fastest = min(group, key=lambda n: (n.candidate.step_s, not n.candidate.fits))
        for found in (roomiest, fastest):
            does = effect(best, found.candidate)
            frees = does.freed_bytes >= WORTH_SAYING * best.verdict.device_bytes
            saves = does.extra_share is not None and does.extra_share <= -WORTH_SAYING
            if (frees if found is roomiest else saves) and found not in told:
                told.append(found)
    return told


def _lever_json(problem: Problem, origin: Candidate, found: Neighbour) -> dict[str, Any]:
    does, candidate = effect(origin, found.candidate), found.candidate
    return {
        "lever": found.lever,
        "change": change_words(origin.choice, candidate.choice),
        "alters": candidate.alters,
        "fits": candidate.fits,
        "freed_bytes": does.freed_bytes,
        "extra_s": round_significant(does.extra_s) if does.extra_s is not None else None,
        "extra_share": round_significant(does.extra_share, 4) if does.extra_share is not None else None,
        "short_bytes": short_bytes(problem, candidate),
        "sentence": effect_words(problem, origin, candidate),
        "choice": candidate.choice.to_json(),
    }


def effect_words(problem: Problem, origin: Candidate, found: Candidate) -> str:
    """``frees 12.3 GiB and costs 22 % of the step (0.67 s for 0.55 s)``."""
    does = effect(origin, found)
    verb = "frees" if does.freed_bytes >= 0 else "takes"
    words = f"{verb} {format_gib(abs(does.freed_bytes))} GiB"
    if does.extra_s is not None and does.extra_share is not None:
        pace = f"({format_seconds(found.step_s)} for {format_seconds(origin.step_s)})"
        if abs(does.extra_share) < 0.005:
            words += " at the same speed"
        elif does.extra_share > 1:
            words += f" and takes {1 + does.extra_share:.1f} times as long {pace}"
        else:
            words += (
                f" and {'costs' if does.extra_share > 0 else 'saves'} {abs(does.extra_share):.0%} of the step {pace}"
            )
    if not found.fits:
        words += f"; does not fit, {format_gib(short_bytes(problem, found))} GiB too many"
    return words


def change_words(before: Choice, after: Choice) -> str:
    """What differs, in the words of the knobs: ``recompute full``, ``4 GPUs, fsdp, micro-batch 2 x 1``."""
    words = [] if before.method == after.method else [method_label(after.method)]
    if before.num_gpus != after.num_gpus:
        words.append("1 GPU" if after.num_gpus == 1 else f"{after.num_gpus} GPUs")
    for knob in ("sharding", "loss_path", "recompute", "attention", "optimizer"):
        value = getattr(after, knob)
        if getattr(before, knob) != value and not (knob == "sharding" and after.num_gpus == 1):
            words.append(f"{knob.replace('_', ' ')} {value}")
    words += _offload_words(before.offload, after.offload)
    words += [f"{knob} {getattr(after, knob)}" for knob in ("cp", "sp", "tp") if _differ(before, after, knob)]
    if (before.weights, before.mixed_precision) != (after.weights, after.mixed_precision):
        words.append(f"{after.weights} weights" + (" throughout" if after.mixed_precision == "no" else ""))
    if (before.micro_batch, before.grad_accum) != (after.micro_batch, after.grad_accum):
        words.append(f"micro-batch {after.micro_batch} x {after.grad_accum}")
    if before.packing != after.packing:
        words.append("packing" if after.packing else "no packing")
    if not words and before.dp_shard != after.dp_shard:
        words.append(f"dp_shard {after.dp_shard}")
    return ", ".join(words)


def _offload_words(before: frozenset[OffloadTarget], after: frozenset[OffloadTarget]) -> list[str]:
    if before == after:
        return []
    if not after:
        return ["no offload"]
    more, less = " and ".join(sorted(after - before)), " and ".join(sorted(before - after))
    if more and less:
        return [f"offload of {more} instead of {less}"]
    return [f"no offload of {less}" if less else f"{'also ' if before else ''}offload of {more}"]


def _differ(before: Choice, after: Choice, knob: str) -> bool:
    return bool(getattr(before, knob) != getattr(after, knob))


def _miss_json(problem: Problem, miss: Candidate) -> dict[str, Any]:
    memory = problem.judge.memory_of(miss)
    fix = smallest_fix(problem, miss)
    return {
        "short_bytes": short_bytes(problem, miss),
        "phase": memory.peak_phase,
        "fix": None
        if fix is None
        else {
            "change": change_words(miss.choice, fix.choice),
            "alters": fix.alters,
            "freed_bytes": miss.verdict.device_bytes - fix.verdict.device_bytes,
            "device_bytes": fix.verdict.device_bytes,
            "step_s": round_significant(fix.step_s) if fix.time else None,
            "sentence": effect_words(problem, miss, fix),
            "choice": fix.choice.to_json(),
        },
    }


def smallest_fix(problem: Problem, miss: Candidate) -> Candidate | None:
    """The choice that fits and differs least: one lever, else two; of several the fastest, other numbers of GPUs last.

    Two levers that alter nothing come before one that alters the numerics. None when no two levers are enough.
    """
    around = list(neighbours(problem, miss))
    single = [found for found in around if found.candidate.fits]
    plain = [found for found in single if found.candidate.alters == miss.alters]
    pairs = list(_pairs(problem, around)) if not plain else []
    fitting = plain or [found for found in pairs if found.candidate.alters == miss.alters] or single or pairs
    return min(fitting, key=_intrusion).candidate if fitting else None


def _pairs(problem: Problem, around: Sequence[Neighbour]) -> Iterator[Neighbour]:
    """What fits by a second lever, from the closest of the neighbours."""
    closest = sorted(around, key=lambda found: short_bytes(problem, found.candidate))[:PAIRS_FROM]
    for first in closest:
        for second in neighbours(problem, first.candidate):
            if second.candidate.fits and second.lever != first.lever:
                yield second


def _intrusion(found: Neighbour) -> tuple[int, bool, float]:
    return (GROUPS.index(found.candidate.alters), found.lever == GPUS_USED, found.candidate.step_s)
