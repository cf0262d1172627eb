"""Values to the JSON of `trlfit.plan/1`. Only plain types; floats rounded so that equal inputs give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.architecture import Architecture
from planner.memory.blocks import Blocks
from planner.memory.model import MemoryEstimate
from planner.search.search import Candidate
from planner.time.step import TimeEstimate


def round_significant(value: float, digits: int = 6) -> float:
    """``value`` with ``digits`` significant digits."""
    return float(f"{value:.{digits}g}")


def memory_json(memory: MemoryEstimate) -> dict[str, Any]:
    """One choice's peaks, interval, phases and roles."""
    return {
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "device_bytes": memory.device_bytes,
        "host_bytes": {
            "pinned": memory.host.pinned_bytes,
            "pageable": memory.host.pageable_bytes,
            "load": memory.host.load_bytes,
            "save": memory.host.save_bytes,
            "processes": memory.host.process_bytes,
            "peak": memory.host.peak_bytes,
        },
        "capacity_bytes": memory.capacity_bytes,
        "headroom_bytes": memory.headroom_bytes,
        "low_bytes": memory.low_bytes,
        "high_bytes": memory.high_bytes,
        "peak_phase": memory.peak_phase,
        "evidence": memory.evidence,
        "phases": [
            {
                "name": phase.name,
                "bytes": phase.bytes,
                "parts": {part: size for part, size in phase.parts.items() if size},
            }
            for phase in memory.phases
        ],
        "roles": {group: roles.to_json() for group, roles in memory.roles.items()},
    }


def time_json(time: TimeEstimate | None, cost: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Seconds of one step and what the run takes (``planner.time.run_cost``); None where no rates are known."""
    if time is None:
        return None
    return {
        "step_s": round_significant(time.step_s),
        "low_s": round_significant(time.low_s),
        "high_s": round_significant(time.high_s),
        "tokens_per_s": round_significant(time.tokens_per_s),
        "tokens_per_s_per_gpu": round_significant(time.tokens_per_s_per_gpu),
        "mfu": round_significant(time.mfu, 4) if time.mfu is not None else None,
        "parts": {part: round_significant(seconds) for part, seconds in time.parts.items()},
        "evidence": time.evidence,
        **(cost or {}),
    }


def candidate_json(
    candidate: Candidate,
    memory: MemoryEstimate,
    *,
    why: Sequence[str],
    files: Sequence[str],
    warnings: Sequence[str],
    cards: Sequence[int],
    cost: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """One candidate as the plan prints it."""
    return {
        "choice": candidate.choice.to_json(),
        "alters": candidate.alters,
        "fits": candidate.fits,
        "num_gpus": candidate.choice.num_gpus,
        "cards": list(cards),
        "memory": memory_json(memory),
        "time": time_json(candidate.time, cost),
        "why": list(why),
        "files": list(files),
        "warnings": list(warnings),
    }


def architecture_json(architecture: Architecture, blocks: Blocks) -> dict[str, Any]:
    """Shapes and counts, with where they came from."""
    return {
        "model": architecture.model,
        "model_type": architecture.model_type,
        "origin": architecture.origin,
        "parameters": {
            "total": architecture.num_parameters,
            "trainable": blocks.total.trainable,
            "adapters": blocks.total.adapter,
            "active": architecture.active_parameters,
        },
        "groups": {
            role: architecture.parameters_of(role)
            for role in ("embedding", "attention", "mlp", "experts", "norms", "head", "other")
        },
        "layers": architecture.num_layers,
        "layer_kinds": [kind.name for kind in architecture.kinds],
        "hidden": architecture.hidden,
        "vocab": architecture.vocab,
        "tied": architecture.tied,
        "max_positions": architecture.max_positions,
        "notes": list(architecture.notes),
    }
