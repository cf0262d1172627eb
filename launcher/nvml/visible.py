"""CUDA_VISIBLE_DEVICES, read as CUDA reads it: the value and the cards in, positions out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_NUMBER = re.compile(r"[+-]?[0-9]+")
_OLD_MIG_NAME = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d+)/(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceName:
    """What identifies a MIG slice."""

    uuid: str | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceName:
    """What identifies a card, in NVML's order."""

    uuid: str | None
    slices: tuple[SliceName, ...] = ()


Unit = tuple[int, int | None]
"""Position of a card, and of the slice inside it (None for the whole card)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What a process would see, in its order, and what is odd about the value."""

    units: tuple[Unit, ...]
    notes: tuple[str, ...] = ()


def visible_units(value: str | None, devices: Sequence[DeviceName]) -> Visible:
    """The cards that ``CUDA_VISIBLE_DEVICES=value`` leaves, in that order.

    As CUDA does: the first entry decides between numbers, ``GPU-`` and ``MIG-`` names; names may be
    shortened as long as they stay unambiguous; an entry that names no card ends the list; a card
    named twice leaves none; an empty value leaves none. A number or name of a card that is cut in
    MIG slices means its first slice.

    Args:
        value: The variable, None when it is not set (then every card and every slice).
        devices: The cards of the machine in NVML's order.
    """
    if value is None:
        return Visible(units=tuple(unit for i in range(len(devices)) for unit in _all(i, devices)))
    if not value.strip():
        return Visible(units=(), notes=("CUDA_VISIBLE_DEVICES is empty and hides every card",))
    prefix = next((known for known in ("GPU-", "MIG-") if value.startswith(known)), "")
    entries: list[str] = []
    stopper: str | None = None
    for token in value.split(","):
        entry = _entry(token, prefix)
        if entry is None:
            stopper = token
            break
        if entry in entries:
            return _twice(value, entry)
        entries.append(entry)
    units: list[Unit] = []
    for entry in entries:
        unit = _resolve(entry, prefix, devices)
        if unit is None:
            stopper = entry
            break
        if unit in units:
            return _twice(value, entry)
        units.append(unit)
    return _stopped(value, stopper, units) if stopper is not None else Visible(units=tuple(units))


def _all(position: int, devices: Sequence[DeviceName]) -> list[Unit]:
    slices = devices[position].slices
    return [(position, i) for i in range(len(slices))] or [(position, None)]


def _entry(token: str, prefix: str) -> str | None:
    """One entry as CUDA takes it, None where it stops reading.

    Numbers are read like C's strtoul: what follows the digits is ignored.
    """
    if prefix:
        return token if token.startswith(prefix) else None
    number = _NUMBER.match(token.strip())
    if number is None or int(number[0]) < 0:
        return None
    return str(int(number[0]))


def _resolve(entry: str, prefix: str, devices: Sequence[DeviceName]) -> Unit | None:
    if not prefix:
        return _whole(int(entry), devices) if int(entry) < len(devices) else None
    if prefix == "GPU-":
        found = _only(_cards_named(entry, devices))
        return None if found is None else _whole(found, devices)
    return _only(_slices_named(entry, devices))


def _whole(position: int, devices: Sequence[DeviceName]) -> Unit:
    return (position, 0 if devices[position].slices else None)


def _cards_named(prefix: str, devices: Sequence[DeviceName]) -> list[int]:
    return [i for i, device in enumerate(devices) if (device.uuid or "").startswith(prefix)]


def _slices_named(entry: str, devices: Sequence[DeviceName]) -> list[Unit]:
    """Slices by their own name, or by the older ``MIG-GPU-<card>/<instance>/<instance>``."""
    old = _OLD_MIG_NAME.fullmatch(entry)
    if old is None:
        return [
            (i, j)
            for i, device in enumerate(devices)
            for j, part in enumerate(device.slices)
            if (part.uuid or "").startswith(entry)
        ]
    wanted = (int(old[2]), int(old[3]))
    return [
        (i, j)
        for i in _cards_named(old[1], devices)
        for j, part in enumerate(devices[i].slices)
        if (part.gpu_instance, part.compute_instance) == wanted
    ]


_Found = TypeVar("_Found")


def _only(found: list[_Found]) -> _Found | None:
    return found[0] if len(found) == 1 else None


def _twice(value: str, entry: str) -> Visible:
    note = f"CUDA_VISIBLE_DEVICES={value} names card {entry} twice, and CUDA then shows none"
    return Visible(units=(), notes=(note,))


def _stopped(value: str, stopper: str, units: list[Unit]) -> Visible:
    note = f"CUDA_VISIBLE_DEVICES={value}: {stopper.strip()!r} is no single card here, and CUDA stops reading there"
    return Visible(units=tuple(units), notes=(note,))
