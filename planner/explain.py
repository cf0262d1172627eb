"""Explanations: why the chosen plan uses each lever, and by what a near miss fails."""

from __future__ import annotations

from dataclasses import replace

from planner.choice import Choice
from planner.memory import MemoryEstimate
from planner.search import Candidate, Judge
from planner.units import format_gib

PART_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "master": "fp32 master copy",
    "moment1": "first moments",
    "moment2": "second moments",
    "saved_activations": "saved activations",
    "recompute": "working activations",
    "loss": "loss",
    "gather": "gathered weights",
    "buckets": "gradient buffers",
    "casts": "low-precision copies",
    "offload_buffers": "offload buffers",
    "context": "CUDA context",
    "slack": "allocator slack",
}


def largest_part(memory: MemoryEstimate) -> tuple[str, int]:
    """(name, bytes) of the largest part in the phase that decides."""
    name, size = max(memory.peak.parts.items(), key=lambda item: item[1])
    return PART_NAMES[name], size


def shortage(memory: MemoryEstimate) -> str:
    """One phrase for a choice that does not fit: how much, where, what weighs most."""
    name, size = largest_part(memory)
    tail = f"in {memory.peak_phase}; largest there: {name} {format_gib(size)} GiB"
    if not memory.host_fits:
        host = memory.host_pinned_bytes + memory.host_pageable_bytes
        return f"needs {format_gib(host)} GiB of host memory, more than is available"
    headroom = memory.headroom_bytes or 0
    if headroom < 0 and memory.capacity_bytes is not None:
        over = memory.device_bytes - memory.capacity_bytes
        if over > 0:
            return f"{format_gib(over)} GiB over the card {tail}"
        return f"{format_gib(-headroom)} GiB into the reserve {tail}"
    return f"fits by {format_gib(headroom)} GiB, but the upper end of the interval does not {tail}"


def _without(choice: Choice) -> list[tuple[str, Choice]]:
    """(lever, the same choice without it) for every lever in use."""
    out: list[tuple[str, Choice]] = []
    if choice.recompute != "none":
        rest = choice.offload - {"activations"}
        out.append((f"recompute {choice.recompute}", replace(choice, recompute="none", offload=rest)))
    if "activations" in choice.offload:
        out.append(("activation offload", replace(choice, offload=choice.offload - {"activations"})))
    if choice.offload - {"activations"}:
        kept = choice.offload & {"activations"}
        out.append(
            (
                "offload of " + " and ".join(sorted(choice.offload - {"activations"})),
                replace(choice, offload=kept),
            )
        )
    if choice.cp > 1:
        ranks = choice.dp_shard * choice.cp
        out.append((f"context parallelism over {choice.cp}", replace(choice, cp=1, dp_shard=ranks)))
    if choice.sp > 1:
        ranks = choice.dp_shard * choice.sp
        out.append((f"sequence parallelism over {choice.sp}", replace(choice, sp=1, dp_shard=ranks)))
    if choice.sharding not in ("none", "ddp"):
        plain = replace(
            choice,
            sharding="ddp",
            dp_shard=1,
            dp_replicate=choice.num_gpus,
            cp=1,
            sp=1,
            offload=frozenset(),
        )
        out.append((f"sharding {choice.sharding}", plain))
    return out


def peak_sentence(memory: MemoryEstimate) -> str:
    """What binds: the peak, its phase and its largest part."""
    name, size = largest_part(memory)
    place = f" of {format_gib(memory.capacity_bytes)}" if memory.capacity_bytes else ""
    return (
        f"peak {format_gib(memory.device_bytes)}{place} GiB in {memory.peak_phase};"
        f" largest there: {name} {format_gib(size)} GiB"
    )


def _pace(candidate: Candidate) -> float:
    """Seconds per sequence: cards that no longer share one read others, so steps alone do not compare."""
    return candidate.step_s / candidate.choice.global_batch


def why(judge: Judge, candidate: Candidate) -> list[str]:
    """Short reasons: what binds, and for each lever what happens without it."""
    reasons = [peak_sentence(judge.memory_of(candidate))]
    for lever, other in _without(candidate.choice):
        neighbour = judge.judge(other, candidate.alters)
        if not neighbour.fits:
            reasons.append(f"without {lever}: {shortage(judge.memory_of(neighbour))}")
        elif _pace(neighbour) > _pace(candidate) * 1.001:
            slower = _pace(neighbour) / _pace(candidate) - 1
            reasons.append(
                f"without {lever}: fits, but {slower:.0%} slower"
                if slower < 10
                else f"without {lever}: fits, but far slower"
            )
    if candidate.time is not None:
        part, seconds = max(candidate.time.parts.items(), key=lambda item: item[1])
        reasons.append(f"most time goes to {part}: {seconds / candidate.step_s:.0%} of the step")
    return reasons
