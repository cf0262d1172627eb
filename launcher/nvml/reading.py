"""A reading of all cards: what an inventory hands on."""

from __future__ import annotations

from dataclasses import dataclass

from planner.machine import Card


@dataclass(frozen=True, slots=True, kw_only=True)
class CardsReading:
    """What NVML said. With no driver: no cards, and a note that says why."""

    cards: tuple[Card, ...] = ()
    """Those that CUDA_VISIBLE_DEVICES leaves, in CUDA's order; MIG slices instead of their card."""
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver runs: ``13.0``."""
    notes: tuple[str, ...] = ()
    answered: bool = False
    """Whether there was a driver to ask."""
