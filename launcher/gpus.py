"""The cards of this machine through NVML: an inventory once, and a sampler for live views."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from launcher.nvml_calls import Nvml, NvmlRefused, NvmlUnavailable, connect, nvml_open
from launcher.nvml_calls import NvmlCode as Code
from launcher.nvml_card import FoundCard, find_cards, read_card, read_live
from launcher.nvml_links import peers, read_bus, read_link_ends
from launcher.nvml_visible import Unit, visible_units
from planner.machine import Card, GpuProcess


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


def read_cards(environ: Mapping[str, str] | None = None) -> CardsReading:
    """Read every visible card. Never fails: what cannot be read is a sentence in its place.

    Args:
        environ: Where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up; the process
            environment when None.
    """
    environ = os.environ if environ is None else environ
    try:
        with nvml_open() as nvml:
            return _read(nvml, environ)
    except NvmlUnavailable as unavailable:
        return CardsReading(notes=(str(unavailable),))


def _read(nvml: Nvml, environ: Mapping[str, str]) -> CardsReading:
    notes: list[str] = []
    driver = _version(nvml, "nvmlSystemGetDriverVersion", "driver", notes)
    cuda = _cuda_version(nvml, notes)
    try:
        found = find_cards(nvml)
    except NvmlRefused as refused:
        notes.append(f"the driver does not list its cards: {refused.sentence}")
        return CardsReading(driver=driver, cuda=cuda, notes=tuple(notes), answered=True)
    allowed = [card for card in found if not _forbidden(card)]
    if len(allowed) < len(found):
        count = f"{len(found) - len(allowed)} of {len(found)} cards"
        notes.append(f"{count} may not be used by this user and are left out (no permission)")
    value = environ.get("CUDA_VISIBLE_DEVICES")
    visible = visible_units(value, [card.name for card in allowed])
    notes += visible.notes
    cards = [
        read_card(nvml, allowed[i], allowed[i].slices[j] if j is not None else None, index)
        for index, (i, j) in enumerate(visible.units)
    ]
    _fill_links(nvml, allowed, visible.units, cards)
    notes += _remarks(cards, allowed, value, environ)
    return CardsReading(
        cards=tuple(cards), driver=driver, cuda=cuda, notes=tuple(notes), answered=True
    )


def _forbidden(card: FoundCard) -> bool:
    # Device control groups (Slurm) hide cards this way, and CUDA does not count them.
    return card.refusal is not None and card.refusal.code == Code.NO_PERMISSION


def _version(nvml: Nvml, function: str, what: str, notes: list[str]) -> str | None:
    try:
        return str(nvml.ask(function))
    except NvmlRefused as refused:
        notes.append(f"{what} version: {refused.sentence}")
        return None


def _cuda_version(nvml: Nvml, notes: list[str]) -> str | None:
    names = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
    try:
        number = int(nvml.ask_first(names))
    except NvmlRefused as refused:
        notes.append(f"CUDA version: {refused.sentence}")
        return None
    return f"{number // 1000}.{number % 1000 // 10}"


def _fill_links(
    nvml: Nvml, found: Sequence[FoundCard], units: Sequence[Unit], cards: list[Card]
) -> None:
    """Set ``nvlink_peers``. MIG slices have none: a card cut in slices gives up its links."""
    if len(cards) < 2:
        return
    handles: list[Any | None] = [found[i].handle if j is None else None for i, j in units]
    buses = frozenset(
        bus
        for card in found
        if card.handle is not None and (bus := read_bus(nvml, card.handle)) is not None
    )
    ends = [None if handle is None else read_link_ends(nvml, handle, buses) for handle in handles]
    for card, end, linked in zip(cards, ends, peers(ends), strict=True):
        card.nvlink_peers = linked
        if end is not None and end.unknown is not None:
            card.unknown["nvlink_peers"] = end.unknown


def _remarks(
    cards: Sequence[Card],
    found: Sequence[FoundCard],
    value: str | None,
    environ: Mapping[str, str],
) -> list[str]:
    notes: list[str] = []
    if not found:
        notes.append("the NVIDIA driver is loaded and finds no card")
    units = sum(max(1, len(card.slices)) for card in found)
    if value is not None and value.strip() and len(cards) < units:
        notes.append(f"CUDA_VISIBLE_DEVICES={value} shows {len(cards)} of {units} cards")
    by_number = value is None or not value.startswith(("GPU-", "MIG-"))
    mixed = len({card.name for card in cards}) > 1
    in_bus_order = environ.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID"
    if mixed and by_number and not in_bus_order:
        notes.append(
            "the cards differ, and CUDA numbers them fastest first while this list is in bus "
            "order: set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both agree"
        )
    if sum(card.mig_mode == "slice" for card in cards) > 1:
        notes.append(
            "CUDA gives one process a single MIG slice, and slices cannot talk to each other: "
            "a run uses one of them (CUDA_VISIBLE_DEVICES=MIG-...)"
        )
    virtual = [str(card.index) for card in cards if card.virtual]
    if virtual:
        notes.append(
            f"card {', '.join(virtual)} is a vGPU: the hypervisor decides how much of the real "
            "card it gets"
        )
    return notes


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
