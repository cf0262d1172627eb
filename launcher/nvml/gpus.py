"""The cards of this machine through NVML: an inventory once, and a sampler for live views."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from launcher.nvml.calls import Nvml, NvmlRefused, NvmlUnavailable, connect, nvml_open
from launcher.nvml.reading import CardsReading
from planner.machine import Card, GpuProcess


def read_cards(environ: Mapping[str, str] | None = None) -> CardsReading:
    """Read every visible card. Never fails: what cannot be read is a sentence in its place.

    Args:
        environ: Where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up; the process
            environment when None.
    """
    environ = os.environ if environ is None else environ
    try:
        with nvml_open() as nvml:
            # Planning on a box without a driver need not load the reading of cards (10 ms).
            from launcher.nvml.inventory import read_inventory

            return read_inventory(nvml, environ)
    except NvmlUnavailable as unavailable:
        return CardsReading(notes=(str(unavailable),))


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSample:
    """What changed on one card."""

    index: int
    """The card's index in the inventory."""
    used_bytes: int = 0
    free_bytes: int = 0
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])
    problem: str | None = None
    """One sentence when the card could not be read; the figures are then 0 or None."""


class Sampler:
    """Re-reads known cards cheaply: NVML stays open, handles are kept.

    Use as a context manager, or call :meth:`close`. Not for several threads at once.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = tuple(cards)
        self._nvml: Nvml | None = None
        self._handles: list[tuple[Any, Any | None] | str] = []

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def sample(self) -> list[CardSample]:
        """One sample per card, in the order given. Never fails: see ``problem``."""
        if self._nvml is None:
            try:
                self._nvml = connect()
            except NvmlUnavailable as unavailable:
                return [CardSample(index=c.index, problem=str(unavailable)) for c in self._cards]
            self._handles = [_handles(self._nvml, card) for card in self._cards]
        pairs = zip(self._cards, self._handles, strict=True)
        return [_sample(self._nvml, card, handles) for card, handles in pairs]

    def close(self) -> None:
        """Give NVML back; the next :meth:`sample` opens it again."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None


def _handles(nvml: Nvml, card: Card) -> tuple[Any, Any | None] | str:
    """Handles of the card and, for a slice, of the slice; or why there are none."""
    try:
        if card.uuid is None:
            return nvml.ask("nvmlDeviceGetHandleByIndex", card.physical_index), None
        unit = nvml.ask("nvmlDeviceGetHandleByUUID", card.uuid)
        if card.mig_mode != "slice":
            return unit, None
        return nvml.ask("nvmlDeviceGetHandleByIndex", card.physical_index), unit
    except NvmlRefused as refused:
        return f"the card is gone: {refused.sentence}"


def _sample(nvml: Nvml, card: Card, handles: tuple[Any, Any | None] | str) -> CardSample:
    if isinstance(handles, str):
        return CardSample(index=card.index, problem=handles)
    from launcher.nvml.card import read_live

    live = read_live(nvml, *handles)
    return CardSample(
        index=card.index,
        used_bytes=live.used_bytes,
        free_bytes=live.free_bytes,
        utilisation_percent=live.utilisation_percent,
        temperature_c=live.temperature_c,
        power_w=live.power_w,
        processes=live.processes,
        unknown=live.unknown,
        problem=live.problem,
    )
