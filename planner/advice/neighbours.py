"""Neighbours: what one change of a knob makes of a choice, judged. For explanations, and what makes a near miss fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from planner.choice import Choice
from planner.problem import Problem
from planner.rules import first_refusal
from planner.search.search import Candidate
from planner.search.space import SpaceOptions, frames, micro_batches

SIZES = ("cp", "sp", "tp", "dp_shard", "dp_replicate")
BATCH = ("micro_batch", "grad_accum")
KNOBS = ("loss_path", "recompute", "offload", "sharding", "attention", "precision")
NUMERICS = ("weights", "mixed_precision", "optimizer")
RECOMPUTE, MICRO_BATCH, GPUS_USED, STATES = "recompute", "micro-batch", "GPUs used", "numerics"
LEVERS: dict[str, tuple[str, ...]] = {
    "loss path": ("loss_path",),
    RECOMPUTE: ("recompute",),
    "offload": ("offload",),
    "split over cards": ("cp", "sp", "dp_shard", "dp_replicate", *BATCH),
    "sharding": ("sharding", "dp_shard", "dp_replicate"),
    MICRO_BATCH: BATCH,
    "attention": ("attention",),
    GPUS_USED: ("gpus", "sharding", *SIZES, *BATCH),
    STATES: NUMERICS,
}
"""Lever -> the knobs that it moves, in the order in which long sequences need them."""


class Neighbour(NamedTuple):
    """One change of a choice, and what becomes of it."""

    lever: str
    candidate: Candidate


def pins_of(choice: Choice) -> dict[str, Any]:
    """Pins that leave this choice alone in the space."""
    pins: dict[str, Any] = {knob: getattr(choice, knob) for knob in (*KNOBS, *NUMERICS, *SIZES, *BATCH)}
    return {**pins, "gpus": choice.num_gpus}


def neighbours(problem: Problem, origin: Candidate) -> Iterator[Neighbour]:
    """Every legal choice that moves one lever of ``origin``, whatever the job pins, judged by the models."""
    choice = origin.choice
    for lever in LEVERS:
        for pins in _spaces(choice, lever):
            for candidate in _judged(problem, origin, lever, pins):
                found = candidate.choice
                if found != choice and not (lever == RECOMPUTE and found.recompute == choice.recompute):
                    yield Neighbour(lever, candidate)


def _spaces(choice: Choice, lever: str) -> Iterator[dict[str, Any]]:
    """Pins of the spaces in which one lever is free."""
    fixed = {knob: value for knob, value in pins_of(choice).items() if knob not in LEVERS[lever]}
    if lever == GPUS_USED:
        fixed |= {knob: 1 for knob in ("cp", "sp") if getattr(choice, knob) == 1}
        if choice.sharding == "none":
            yield fixed
        else:
            yield {**fixed, "sharding": choice.sharding}
            yield {**fixed, "sharding": "none", "gpus": 1}
        return
    yield fixed
    if lever == RECOMPUTE and "activations" in choice.offload:
        # Only the checkpoints of full recompute can be offloaded: the two go together.
        yield {**fixed, "offload": choice.offload - {"activations"}}


def _judged(problem: Problem, origin: Candidate, lever: str, pins: dict[str, Any]) -> Iterator[Candidate]:
    choice, judge = origin.choice, problem.judge
    options = replace(
        problem.options,
        pins=pins,
        global_batch=choice.global_batch,
        allow_numerics=lever == STATES or problem.options.allow_numerics,
    )
    for frame, alters in frames(options, problem.hardware):
        if frame.num_gpus == 1 and frame.sharding != "none" and "optimizer" not in frame.offload:
            continue
        if first_refusal(judge.rules, frame) is not None:
            continue
        for micro, accumulate in _batches(options, frame, choice, lever):
            found = replace(frame, micro_batch=micro, grad_accum=accumulate)
            yield judge.judge(found, alters if lever == STATES and origin.alters != "method" else origin.alters)


def _batches(options: SpaceOptions, frame: Choice, choice: Choice, lever: str) -> list[tuple[int, int]]:
    """A lever that is not the batch leaves the micro-batch as large as it was, or the next smaller that divides."""
    if lever == MICRO_BATCH:
        return micro_batches(options, frame.data_parallel)
    if frame.data_parallel == choice.data_parallel:
        return [(choice.micro_batch, choice.grad_accum)]
    pairs = micro_batches(options, frame.data_parallel)
    smaller = [pair for pair in pairs if pair[0] <= choice.micro_batch]
    return smaller[-1:] or pairs[:1]
