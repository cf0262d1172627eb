"""The inventory: every visible card or slice with its links, and remarks on what may surprise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.nvml.calls import Nvml, NvmlCode, NvmlRefused
from launcher.nvml.card import FoundCard, find_cards, read_card
from launcher.nvml.links import peers, read_bus, read_link_ends
from launcher.nvml.reading import CardsReading
from launcher.nvml.visible import Unit, visible_units
from planner.machine import Card


def read_inventory(nvml: Nvml, environ: Mapping[str, str]) -> CardsReading:
    """Every card and slice that a process in ``environ`` would see."""
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
    return CardsReading(cards=tuple(cards), driver=driver, cuda=cuda, notes=tuple(notes), answered=True)


def _forbidden(card: FoundCard) -> bool:
    # Device control groups (Slurm) hide cards this way, and CUDA does not count them.
    return card.refusal is not None and card.refusal.code == NvmlCode.NO_PERMISSION


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


def _fill_links(nvml: Nvml, found: Sequence[FoundCard], units: Sequence[Unit], cards: list[Card]) -> None:
    """Set ``nvlink_peers``. MIG slices have none: a card cut in slices gives up its links."""
    if len(cards) < 2:
        return
    handles: list[Any | None] = [found[i].handle if j is None else None for i, j in units]
    buses = frozenset(
        bus for card in found if card.handle is not None and (bus := read_bus(nvml, card.handle)) is not None
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
        notes.append(f"card {', '.join(virtual)} is a vGPU: the hypervisor decides how much of the real card it gets")
    return notes
