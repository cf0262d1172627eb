"""A correction: what a probe adds to the phases that are simulated of a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from planner.choice import Choice
from planner.memory.phases import Phase

MEASURED_ERROR = 0.01
"""Half-width said for this tier, as a share of activations, working set and loss; never less than ``MEASURED_FLOOR`` of
the peak. Probes at depth 1 and 2 met counted peaks at depth 8 to 0.7 % (docs/probe.md)."""
MEASURED_FLOOR = 0.015

AT_LAST = ("buckets", "gather", "moment2", "moment1", "master", "weights")
"""Parts of a phase that give way to a measurement when nothing else is left, in this order."""


class Correction(NamedTuple):
    """Bytes to add to each phase, negative where the simulation said too much."""

    forward: int
    loss: int
    backward: int
    step: int
    error: float
    """Half-width as a share of activations, working set and loss; infinite far from the probed lengths."""
    floor: float = MEASURED_FLOOR

    def enter(self, phases: list[Phase]) -> None:
        """Add itself to the phases' parts in place: to the working set of each, and no part falls below zero."""
        for phase in phases:
            amount: int = getattr(self, phase.name, 0)
            first = "loss" if phase.name == "loss" else "recompute"
            for part in (first, "saved_activations", "casts", "gradients", *AT_LAST):
                phase.parts[part] += amount
                amount = min(0, phase.parts[part])
                phase.parts[part] -= amount


Correct = Callable[[Choice], Correction | None]
"""None where nothing ran what the choice runs."""
