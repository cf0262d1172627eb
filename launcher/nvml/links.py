"""NVLink between the cards that a process sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.nvml.calls import Nvml, NvmlCode, NvmlRefused

Bus = tuple[int, int, int]
"""PCI domain, bus and device."""

_MAX_LINKS = 18
"""NVML_NVLINK_MAX_LINKS of nvml.h, where ``pynvml`` does not say."""
_SWITCH = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH of nvml.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """Where the active NVLinks of one card lead."""

    bus: Bus | None
    """The card itself."""
    remote: frozenset[Bus] = frozenset()
    """Cards at the other end."""
    on_switch: bool = False
    """A link leads to an NVSwitch, which connects all cards that have one."""
    unknown: str | None = None
    """Why the links could not be read."""


def read_link_ends(nvml: Nvml, handle: Any, buses: frozenset[Bus]) -> LinkEnds:
    """Follow the links of one card.

    Args:
        nvml: An open NVML.
        handle: The card.
        buses: Every card of the machine. A driver that does not say what is at the other end
            leaves this: an end that is no card is a switch.
    """
    bus = read_bus(nvml, handle)
    remote: set[Bus] = set()
    for link in range(nvml.constant("NVML_NVLINK_MAX_LINKS", _MAX_LINKS)):
        try:
            if not nvml.ask("nvmlDeviceGetNvLinkState", handle, link):
                continue
            kind, end = _far_end(nvml, handle, link)
        except NvmlRefused as refused:
            if refused.code == NvmlCode.INVALID_ARGUMENT:
                break  # Beyond the last link of this card.
            if refused.code == NvmlCode.NOT_SUPPORTED:
                if link == 0:
                    break  # A card without NVLink.
                continue
            return LinkEnds(bus=bus, remote=frozenset(remote), unknown=refused.sentence)
        if kind == _SWITCH or (kind is None and end is not None and end not in buses):
            # All links of such a card lead to switches.
            return LinkEnds(bus=bus, on_switch=True)
        if end is not None:
            remote.add(end)
    return LinkEnds(bus=bus, remote=frozenset(remote))


def _far_end(nvml: Nvml, handle: Any, link: int) -> tuple[int | None, Bus | None]:
    """What is at the other end of an active link and, unless it is a switch, on which bus."""
    kind: int | None
    try:
        kind = int(nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link))
    except NvmlRefused:
        kind = None  # Drivers before 470 do not tell.
    if kind == _SWITCH:
        return kind, None
    try:
        return kind, _bus(nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
    except NvmlRefused:
        return kind, None  # A virtual machine may hide the other end.


def read_bus(nvml: Nvml, handle: Any) -> Bus | None:
    """PCI address of a card, None where the driver does not tell."""
    try:
        return _bus(nvml.ask("nvmlDeviceGetPciInfo", handle))
    except NvmlRefused:
        return None


def _bus(info: Any) -> Bus:
    return int(info.domain), int(info.bus), int(info.device)


def peers(ends: Sequence[LinkEnds | None]) -> list[list[int]]:
    """For each card the positions of those it is linked with; None stands for a card without links.

    Args:
        ends: One entry per visible card, in order.
    """
    at = {end.bus: i for i, end in enumerate(ends) if end is not None and end.bus is not None}
    on_switch = [i for i, end in enumerate(ends) if end is not None and end.on_switch]
    linked: list[list[int]] = []
    for i, end in enumerate(ends):
        if end is None:
            linked.append([])
        elif end.on_switch:
            linked.append([j for j in on_switch if j != i])
        else:
            linked.append(sorted(at[bus] for bus in end.remote if bus in at and at[bus] != i))
    return linked
