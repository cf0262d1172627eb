"""Contradictions: why no combination of knobs is legal, in the words of the rule that stands in the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.architecture import Architecture
from planner.choice import Choice
from planner.hardware import Hardware
from planner.memory.adapters import TargetError, target_names, unknown_targets
from planner.pins import PinError, parse_pins
from planner.problem import PlanInput, Problem, hardware_of
from planner.rules import Refusal, RuleContext, all_refusals
from planner.search.search import SearchResult
from planner.search.space import frames, gpu_counts

SIZES = ("cp", "sp", "tp", "dp_shard", "dp_replicate")
MAX_REASONS = 3
"""Reasons in one sentence; more are read as a list in the ledger."""


def check_inputs(inputs: PlanInput) -> None:
    """Refuse what is wrong before anything is searched.

    Raises:
        planner.pins.PinError: a pin names no knob or no value of it, or sizes that make no run.
        planner.memory.adapters.TargetError: LoRA targets that the model does not have.
    """
    pins = parse_pins(inputs.job.pins)
    wrong_sizes = size_contradiction(pins, hardware_of(inputs, pins), inputs.job.global_batch)
    if wrong_sizes is not None:
        raise PinError(wrong_sizes)
    if inputs.job.method != "full" or "method" in inputs.job.allow:
        _check_targets(inputs.architecture, inputs.job.lora.target_modules)


def _check_targets(architecture: Architecture, targets: str | list[str]) -> None:
    unknown = unknown_targets(architecture, targets)
    if unknown:
        # PEFT would leave the name out in silence, and fail when nothing is left.
        names = ", ".join(target_names(architecture))
        raise TargetError(f"lora target {unknown[0][:60]!r} is no module of {architecture.model}; it has {names}")


def size_contradiction(pins: Mapping[str, Any], hardware: Hardware, global_batch: int = 1) -> str | None:
    """One sentence when no number of GPUs agrees with the pinned sizes; None when one does."""
    given = {knob: int(pins[knob]) for knob in SIZES if knob in pins}
    if not given:
        return None
    product = 1
    for size in given.values():
        product *= size
    words = " x ".join(f"{knob}={size}" for knob, size in given.items())
    if "gpus" in pins:
        asked = int(pins["gpus"])
        if asked % product or (len(given) == len(SIZES) and asked != product):
            return f"{words} makes {product:,}, which does not go with gpus={asked:,}; drop one of these pins"
        return None
    if len(given) == len(SIZES):
        return None
    if product > hardware.num_gpus:
        return f"{words} makes {product:,} GPUs, and the machine has {hardware.num_gpus:,}; pin smaller sizes"
    tried = gpu_counts(hardware, dict(pins), global_batch)
    if all(count % product for count in tried):
        counts = ", ".join(map(str, tried))
        return f"{words} divides none of the numbers of GPUs tried ({counts}); pin gpus={product} or a multiple of it"
    return None


def contradiction(problem: Problem, result: SearchResult) -> str:
    """One sentence when no combination of knobs is legal: what refuses all of them, else what refuses most."""
    every = common_refusals(problem.judge.rules, (frame for frame, _ in frames(problem.options, problem.hardware)))
    if every:
        return "no run is possible: " + "; ".join(refusal.reason for refusal in every[:MAX_REASONS])
    if not result.rejected:
        return "no combination of the pinned sizes gives a run on this machine; drop a pin among gpus, " + ", ".join(
            SIZES
        )
    _, refusal, _ = max(result.rejected.values(), key=lambda item: item[0])
    return f"no run is possible: {refusal.reason}"


def common_refusals(rules: RuleContext, choices: Iterable[Choice]) -> list[Refusal]:
    """The rules that refuse every one of ``choices``, with the reason each gives for the last of them."""
    common: dict[str, Refusal] | None = None
    for choice in choices:
        found = {refusal.rule: refusal for refusal in all_refusals(rules, choice)}
        common = found if common is None else {rule: found[rule] for rule in common if rule in found}
        if not common:
            return []
    return list((common or {}).values())
