"""A correction: what a probe makes of the seconds that are modelled of a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from planner.choice import Choice


class TimeCorrection(Protocol):
    """What a measurement says about the seconds of choices that run as it did."""

    @property
    def error(self) -> float:
        """Half-width of the interval of a step, as a share of it."""
        ...

    def corrected(
        self, parts: tuple[float, ...], choice: Choice, layers: int, tokens: int, grad_accum: int, *, own: bool = True
    ) -> tuple[tuple[float, ...], float]:
        """Modelled seconds by part of one optimizer step as the probe has them, and their sum.

        Args:
            parts: in the order of ``planner.time.step.TIME_PARTS``.
            choice: the knobs.
            layers: of the whole model.
            tokens: of one micro-batch.
            grad_accum: micro-batches of a step.
            own: the probe ran these knobs; else its loss may be another, and the modelled one stays.
        """
        ...


class Probe(NamedTuple):
    """What is said of the seconds of one choice."""

    time: TimeCorrection
    own: bool
    """It ran these knobs. Else it is the nearest of the same layers: what it saw of device and trainer holds for them
    all, so that no choice is ahead because nothing was measured of it."""
    whole: bool = False
    """It ran on all ranks of the choice: communication and a host's optimizer are in it."""


MeasuredTimeSource = Callable[[Choice], Probe | None]
"""What a probe says of the seconds of a choice, its own or the nearest; None where none ran its layers."""
