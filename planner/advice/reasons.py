"""Explanations: why the chosen plan uses each lever, and by what a near miss fails."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from planner.choice import Choice, LossPath
from planner.hardware import Hardware
from planner.memory.model import MemoryEstimate
from planner.problem import Problem
from planner.search.search import Candidate, Judge
from planner.units import GIB, format_bytes, format_gib

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


DRIVER_SHARE = 0.03
"""Less than this share of a card is taken by its driver, more by other processes."""


def largest_part(memory: MemoryEstimate) -> tuple[str, int]:
    """(name, bytes) of the largest part in the phase that decides."""
    name, size = max(memory.peak.parts.items(), key=lambda item: item[1])
    return PART_NAMES[name], size


def short_bytes(problem: Problem, candidate: Candidate) -> int:
    """What a choice lacks to fit, on the card (reserve and interval included) or else on the host; 0 where it fits."""
    verdict, hardware = candidate.verdict, problem.hardware
    if verdict.fits or hardware.capacity_bytes is None or verdict.headroom_bytes is None:
        return 0
    free = hardware.capacity_bytes - hardware.others_bytes(candidate.frame.num_gpus)
    on_card = max(-verdict.headroom_bytes, verdict.device_bytes + verdict.spread_bytes - free)
    if on_card > 0 or hardware.host_available_bytes is None:
        return max(1, on_card)
    return problem.judge.memory_of(candidate).host.peak_bytes - hardware.host_available_bytes


def shortage(memory: MemoryEstimate, hardware: Hardware, num_gpus: int) -> str:
    """One phrase for a choice that does not fit: how much, where, what weighs most.

    Args:
        memory: of the choice.
        hardware: what it does not fit on.
        num_gpus: cards that it uses.
    """
    taken_bytes = hardware.others_bytes(num_gpus)
    name, size = largest_part(memory)
    tail = f"in {memory.peak_phase}; largest there: {name} {format_gib(size)} GiB"
    headroom = memory.headroom_bytes or 0
    if not memory.host_fits:
        also = f", and {_size(-headroom)} more of the card than there is" if headroom < 0 else ""
        free = hardware.host_available_bytes
        more = "more than is available" if free is None else f"of which {format_gib(free)} are available"
        return f"needs {format_gib(memory.host.peak_bytes)} GiB of host memory per node, {more}{also}"
    if headroom < 0 and memory.capacity_bytes is not None:
        over = memory.device_bytes - (memory.capacity_bytes - taken_bytes)
        if over > 0:
            busy = taken_bytes > DRIVER_SHARE * memory.capacity_bytes
            place = "what is free of the card" if busy else "the card"
            return f"{_size(over)} over {'what is free of the host' if hardware.device == 'cpu' else place} {tail}"
        return f"{_size(-headroom)} into the reserve {tail}"
    return f"fits by {_size(headroom)}, but the upper end of the interval does not {tail}"


def _size(num_bytes: int) -> str:
    """GiB, or MiB where that says more."""
    return f"{format_gib(num_bytes)} GiB" if num_bytes >= GIB // 10 else format_bytes(num_bytes)


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
    place = f" of {format_gib(memory.capacity_bytes)}" if memory.capacity_bytes else ""
    return (
        f"peak {format_gib(memory.device_bytes)}{place} GiB in {memory.peak_phase};"
        f" largest there: {name} {format_gib(size)} GiB"
    )


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
