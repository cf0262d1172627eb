"""By what a choice fails: how much is missing, where, and what weighs most there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.hardware import Hardware
from planner.memory.model import MemoryEstimate
from planner.units import GIB, format_bytes, format_gib

if TYPE_CHECKING:
    from planner.problem import Problem
    from planner.search.search import Candidate

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
