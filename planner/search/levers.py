"""The levers of long sequences: pulled one after the other, each leaves its knobs to the planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.problem import PlanInput
from profiles.releases import trl_release

NO_LEVER = "no lever"
SPLIT = "split over cards"
KNOB_LEVERS: dict[str, tuple[str, ...]] = {
    "loss path": ("loss_path",),
    "recompute": ("recompute",),
    "offload": ("offload",),
    SPLIT: ("cp", "sp"),
}
"""Lever -> knobs, from what binds first on."""


def free_levers(inputs: PlanInput, order: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(lever, pins) of growing freedom: every knob lever at its plainest, then one more of ``order`` free each time.

    The first has the name ``no lever``. What the job pins stays pinned until its lever is reached. A lever that has one
    value only (a release with a single loss path, a single card) is left out.
    """
    several = len(inputs.machine.usable_cards) * inputs.machine.nodes > 1
    plain: dict[str, Any] = {"recompute": "none", "offload": [], "cp": 1, "sp": 1}
    paths = trl_release(inputs.stack.versions.get("trl", "")).loss_paths_for(inputs.job.trainer)
    if "full_logits" in paths and len(paths) > 1:
        plain["loss_path"] = "full_logits"
    pins = {**plain, **inputs.job.pins}
    yield NO_LEVER, dict(pins)
    for lever in order:
        knobs = [knob for knob in KNOB_LEVERS[lever] if knob in pins]
        if not knobs or (lever == SPLIT and not several):
            continue
        for knob in knobs:
            del pins[knob]
        yield lever, dict(pins)
