"""One card or MIG slice as NVML tells it: each field a value, or a sentence on why it has none."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from launcher.nvml.calls import Nvml, NvmlCode, NvmlRefused
from launcher.nvml.visible import DeviceName, SliceName
from planner.machine import Card, GpuProcess
from profiles.cards import card_for_nvml_name

_MEMORY_V2 = 0x02000028
_NOT_A_NUMBER = 2**32 - 1
_UNSEEN_BYTES = 1024**3
"""Use beyond this with no process in sight is worth a word; drivers keep less for themselves."""
_VGPU = 2
_PROHIBITED = 2
_EXCLUSIVE = 3

_PROCESS_LISTS: tuple[tuple[str, ...], ...] = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSlice:
    """A MIG slice and NVML's handle on it."""

    handle: Any
    name: SliceName


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCard:
    """A card as enumerated, before its fields are read."""

    physical_index: int
    handle: Any | None
    """None when the driver does not even give a handle: ``refusal`` says why."""
    refusal: NvmlRefused | None = None
    uuid: str | None = None
    mig: bool | None = None
    """Whether MIG is on; None where card or driver do not know MIG."""
    slices: tuple[FoundSlice, ...] = ()

    @property
    def name(self) -> DeviceName:
        """What CUDA_VISIBLE_DEVICES may call it."""
        return DeviceName(uuid=self.uuid, slices=tuple(part.name for part in self.slices))


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReading:
    """What changes while a card works."""

    total_bytes: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    reserved_bytes: int = 0
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    unknown: dict[str, str] = field(default_factory=dict[str, str])
    problem: str | None = None


class _Fields:
    """Reads fields of one card; a refused field lands in ``unknown`` with its sentence."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.unknown: dict[str, str] = {}

    def read(self, name: str, function: str, *arguments: Any) -> Any | None:
        try:
            return self._nvml.ask(function, *arguments)
        except NvmlRefused as refused:
            self.unknown[name] = refused.sentence
            return None

    def number(self, name: str, function: str, *arguments: Any) -> int | None:
        value = self.read(name, function, *arguments)
        if value == _NOT_A_NUMBER:
            self.unknown[name] = "the driver has no value for it"
            return None
        return value


def find_cards(nvml: Nvml) -> list[FoundCard]:
    """Every card of the machine in NVML's order, with its MIG slices.

    Raises:
        NvmlRefused: The driver does not even say how many there are.
    """
    return [_find_card(nvml, index) for index in range(int(nvml.ask("nvmlDeviceGetCount")))]


def _find_card(nvml: Nvml, index: int) -> FoundCard:
    try:
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    except NvmlRefused as refused:
        return FoundCard(physical_index=index, handle=None, refusal=refused)
    mig = _ask_or_none(nvml, "nvmlDeviceGetMigMode", handle)
    return FoundCard(
        physical_index=index,
        handle=handle,
        uuid=_ask_or_none(nvml, "nvmlDeviceGetUUID", handle),
        mig=None if mig is None else bool(mig[0]),
        slices=tuple(_find_slices(nvml, handle)) if mig is not None and mig[0] else (),
    )


def _find_slices(nvml: Nvml, handle: Any) -> list[FoundSlice]:
    found: list[FoundSlice] = []
    for index in range(_ask_or_none(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _ask_or_none(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if part is None:
            continue  # Positions without a slice are "not found"; they need not be the last ones.
        name = SliceName(
            uuid=_ask_or_none(nvml, "nvmlDeviceGetUUID", part),
            gpu_instance=_ask_or_none(nvml, "nvmlDeviceGetGpuInstanceId", part),
            compute_instance=_ask_or_none(nvml, "nvmlDeviceGetComputeInstanceId", part),
        )
        found.append(FoundSlice(handle=part, name=name))
    return found


def _ask_or_none(nvml: Nvml, function: str, *arguments: Any) -> Any | None:
    try:
        return nvml.ask(function, *arguments)
    except NvmlRefused:
        return None


def read_card(nvml: Nvml, found: FoundCard, part: FoundSlice | None, index: int) -> Card:
    """The card, or its slice ``part``, as the ``index``-th that a process sees."""
    if found.handle is None:
        return _silent_card(found, index)
    fields = _Fields(nvml)
    unit = part.handle if part else found.handle
    live = read_live(nvml, found.handle, part.handle if part else None)
    whole_bytes = _whole_bytes(nvml, found) if part else live.total_bytes
    name = fields.read("name", "nvmlDeviceGetName", unit)
    profile = card_for_nvml_name(name, whole_bytes or None) if name else None
    card = Card(
        index=index,
        physical_index=found.physical_index,
        uuid=part.name.uuid if part else found.uuid,
        name=name or "unknown card",
        card_id=profile.id if profile else None,
        total_bytes=live.total_bytes,
        mig_mode=_mig_mode(found, part),
        virtual=_ask_or_none(nvml, "nvmlDeviceGetVirtualizationMode", found.handle) == _VGPU,
    )
    if part is not None:
        card.compute_share = _compute_share(nvml, unit, found)
        card.memory_share = _share(live.total_bytes, whole_bytes)
    _fill_board(card, fields, found.handle)
    _fill_live(card, live)
    card.problem = live.problem or _idle_mig(found, part) or _compute_mode(nvml, found, live)
    card.usable = card.problem is None
    card.unknown = fields.unknown | live.unknown
    return card


def _fill_board(card: Card, fields: _Fields, handle: Any) -> None:
    """What the board as a whole has, sliced or not."""
    capability = fields.read("compute_capability", "nvmlDeviceGetCudaComputeCapability", handle)
    if capability is not None:
        card.compute_capability = f"{capability[0]}.{capability[1]}"
    card.pcie_generation = fields.number("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", handle)
    card.pcie_width = fields.number("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", handle)
    limit_mw = fields.number("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", handle)
    card.power_limit_w = None if limit_mw is None else limit_mw / 1000


def _fill_live(card: Card, live: LiveReading) -> None:
    card.used_bytes = live.used_bytes
    card.free_bytes = live.free_bytes
    card.reserved_bytes = live.reserved_bytes
    card.utilisation_percent = live.utilisation_percent
    card.temperature_c = live.temperature_c
    card.power_w = live.power_w
    card.processes = list(live.processes)


def _silent_card(found: FoundCard, index: int) -> Card:
    sentence = found.refusal.sentence if found.refusal else "the driver gives no handle on it"
    return Card(
        index=index,
        physical_index=found.physical_index,
        name="unknown card",
        total_bytes=0,
        usable=False,
        problem=_does_not_answer(sentence),
        unknown={"total_bytes": sentence},
    )


def _does_not_answer(sentence: str) -> str:
    return f"the card does not answer: {sentence}; `dmesg` says more, a reboot may bring it back"


def read_live(nvml: Nvml, card: Any, part: Any | None) -> LiveReading:
    """Memory, load and processes of a card, or of its slice ``part``.

    A slice has its own memory and processes; temperature and power are the whole card's.
    """
    unit = card if part is None else part
    try:
        memory, reserved_bytes = _memory(nvml, unit)
    except NvmlRefused as refused:
        if refused.code in (NvmlCode.NOT_SUPPORTED, NvmlCode.FUNCTION_NOT_FOUND):
            problem = "the driver does not tell how much memory this card has: name the machine instead"
        else:
            problem = _does_not_answer(refused.sentence)
        return LiveReading(problem=problem, unknown={"total_bytes": refused.sentence})
    fields = _Fields(nvml)
    load = None
    if part is None:
        load = fields.read("utilisation_percent", "nvmlDeviceGetUtilizationRates", card)
    else:
        fields.unknown["utilisation_percent"] = "a MIG slice has no counter of its own"
    power = fields.number("power_w", "nvmlDeviceGetPowerUsage", card)
    processes = _processes(nvml, unit, int(memory.used), fields.unknown)
    return LiveReading(
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        free_bytes=int(memory.free),
        reserved_bytes=reserved_bytes,
        utilisation_percent=int(load.gpu) if load is not None else None,
        temperature_c=fields.number("temperature_c", "nvmlDeviceGetTemperature", card, 0),
        power_w=None if power is None else power / 1000,
        processes=processes,
        unknown=fields.unknown,
    )


def _memory(nvml: Nvml, unit: Any) -> tuple[Any, int]:
    """NVML's memory structure and the driver's own share.

    The first version of the call (drivers before 510) counts that share as used.
    """
    version = nvml.constant("nvmlMemory_v2", _MEMORY_V2)
    try:
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", unit, version)
        return memory, int(memory.reserved)
    except NvmlRefused as refused:
        if refused.code in (NvmlCode.GPU_IS_LOST, NvmlCode.RESET_REQUIRED):
            raise
        return nvml.ask("nvmlDeviceGetMemoryInfo", unit), 0


def _processes(nvml: Nvml, unit: Any, used_bytes: int, unknown: dict[str, str]) -> tuple[GpuProcess, ...]:
    memory: dict[int, int | None] = {}
    for functions in _PROCESS_LISTS:
        try:
            listed = nvml.ask_first(functions, unit)
        except NvmlRefused as refused:
            unknown["processes"] = refused.sentence
            continue
        for process in listed:
            taken = process.usedGpuMemory
            # A process that computes and draws stands in both lists with the same memory.
            memory[int(process.pid)] = None if taken is None else int(taken)
    if any(taken is None for taken in memory.values()):
        unknown["processes"] = "the driver does not tell how much memory each process holds (WSL2, some containers)"
    elif not memory and used_bytes > _UNSEEN_BYTES and "processes" not in unknown:
        unknown["processes"] = "memory is taken and no process is in sight: it runs outside this container"
    return tuple(_process(pid, taken) for pid, taken in sorted(memory.items()))


def _process(pid: int, memory_bytes: int | None) -> GpuProcess:
    import psutil  # Costs 12 ms, and most cards are idle.

    name: str | None = None
    user: str | None = None
    own = False
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            name = process.name()
            user = process.username()
            own = hasattr(os, "getuid") and process.uids().real == os.getuid()
    except psutil.Error:
        pass  # It ended, or belongs to another container: the driver's figure still stands.
    return GpuProcess(pid=pid, name=name, user=user, memory_bytes=memory_bytes, own=own)


def _mig_mode(found: FoundCard, part: FoundSlice | None) -> Any:
    if part is not None:
        return "slice"
    return None if found.mig is None else "on" if found.mig else "off"


def _idle_mig(found: FoundCard, part: FoundSlice | None) -> str | None:
    if part is None and found.mig:
        return (
            "MIG is on and the card has no slice: make one (nvidia-smi mig -cgi ... -C) "
            f"or turn MIG off (nvidia-smi -i {found.physical_index} -mig 0)"
        )
    return None


def _compute_mode(nvml: Nvml, found: FoundCard, live: LiveReading) -> str | None:
    mode = _ask_or_none(nvml, "nvmlDeviceGetComputeMode", found.handle)
    if mode == _PROHIBITED:
        return "the card's compute mode is prohibited (nvidia-smi -c 0 allows computing)"
    if mode == _EXCLUSIVE and live.processes:
        pids = ", ".join(str(process.pid) for process in live.processes)
        return f"the card is in exclusive mode and process {pids} holds it"
    return None


def _whole_bytes(nvml: Nvml, found: FoundCard) -> int:
    try:
        return int(_memory(nvml, found.handle)[0].total)
    except NvmlRefused:
        return 0


def _compute_share(nvml: Nvml, part: Any, found: FoundCard) -> float:
    """Compute units of the slice over those of the card, in the units that MIG deals out."""
    attributes = _ask_or_none(nvml, "nvmlDeviceGetAttributes_v2", part)
    units = _ask_or_none(nvml, "nvmlDeviceGetMaxMigDeviceCount", found.handle)
    return _share(int(attributes.computeInstanceSliceCount), units or 0) if attributes else 1.0


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if part > 0 and whole > 0 else 1.0
