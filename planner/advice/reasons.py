"""Reasons: what binds the chosen plan, and what happens without each of its levers."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from planner.choice import Choice, LossPath
from planner.memory.model import MemoryEstimate
from planner.search.search import Candidate, Judge
from planner.search.shortage import largest_part, shortage
from planner.units import GIB, format_bytes, format_gib


def _without(choice: Choice, default_path: LossPath) -> list[tuple[str, Choice]]:
    """(lever, the same choice without it) for every lever in use."""
    out: list[tuple[str, Choice]] = []
    if choice.loss_path != default_path:
        lever = f"loss path {choice.loss_path} (with TRL's default {default_path})"
        out.append((lever, replace(choice, loss_path=default_path)))
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
    small, place = memory.device_bytes < GIB // 10, ""
    if memory.capacity_bytes:
        place = f" of {format_gib(memory.capacity_bytes)} GiB"
    peak = format_bytes(memory.device_bytes) if small else format_gib(memory.device_bytes) + ("" if place else " GiB")
    largest = format_bytes(size) if small else f"{format_gib(size)} GiB"
    return f"peak {peak}{place} in {memory.peak_phase}; largest there: {name} {largest}"


def _pace(candidate: Candidate) -> float:
    """Seconds per sequence: cards that no longer share one read others, so steps alone do not compare."""
    return candidate.step_s / candidate.choice.global_batch


def _idle_cards(judge: Judge, choice: Choice) -> list[str]:
    """Why a run leaves cards of its machine alone: its batch does not divide over all of them."""
    used, have, batch = choice.num_gpus, judge.hardware.num_gpus, choice.global_batch
    if used >= have or batch % have == 0 or batch < have:
        return []
    below = batch // have * have
    return [
        f"uses {used} of {have} GPUs: a global batch of {batch:,} does not divide over {have};"
        f" {below:,} or {below + have:,} would"
    ]


def why(judge: Judge, candidate: Candidate) -> list[str]:
    """Short reasons: what binds, and for each lever what happens without it."""
    reasons = [peak_sentence(judge.memory_of(candidate)), *_idle_cards(judge, candidate.choice)]
    default = judge.rules.release.loss_paths_for(judge.rules.trainer)[0]
    for lever, other in _without(candidate.choice, cast("LossPath", default)):
        neighbour = judge.judge(other, candidate.alters)
        if not neighbour.fits:
            lacks = shortage(judge.memory_of(neighbour), judge.hardware, other.num_gpus)
            reasons.append(f"without {lever}: {lacks}")
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
