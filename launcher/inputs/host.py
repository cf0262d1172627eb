"""Memory and cores that a process may use here: the host's, or less under a container's limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from planner.machine import Host
from planner.units import format_bytes

_NO_LIMIT = 2**60
"""Version 1 control groups write a number near 2^63 for "no limit"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One control group on the way from this process to the root."""

    limit_bytes: int | None = None
    held_bytes: int = 0
    """In use, without file pages that the kernel gives up when asked."""
    cores: float | None = None


def read_host(root: Path = Path("/")) -> Host:
    """Memory and cores of this machine, lowered to what control groups and affinity leave.

    Args:
        root: Where ``proc`` and ``sys`` are; tests lay out their own.
    """
    import psutil  # 12 ms that planning for a named machine does not pay.

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    cores = psutil.cpu_count() or 1
    limits: list[str] = []
    groups = _groups(root)
    for group in groups:
        if group.limit_bytes is None:
            continue
        available = min(available, max(0, group.limit_bytes - group.held_bytes))
        total = min(total, group.limit_bytes)
    if total < memory.total:
        whole = format_bytes(int(memory.total))
        limits.append(f"a control group allows {format_bytes(total)} of the host's {whole}")
    allowed = _affinity(cores)
    if allowed < cores:
        limits.append(f"CPU affinity allows {allowed} of {cores} cores")
    quota = min((group.cores for group in groups if group.cores is not None), default=None)
    if quota is not None and quota < allowed:
        limits.append(f"a control group allows the time of {quota:g} of {cores} cores")
        allowed = max(1, int(quota))
    return Host(
        total_bytes=total, available_bytes=min(available, total), cores=allowed, bf16=_has_bf16(root), limits=limits
    )


def cpu_name(root: Path = Path("/")) -> str:
    """What the processor calls itself: ``AMD EPYC 9554 64-Core Processor``; its architecture where it does not."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return os.uname().machine if hasattr(os, "uname") else "CPU"


def _has_bf16(root: Path) -> bool | None:
    """What torch asks before it hands bf16 products to oneDNN (aten/src/ATen/native/mkldnn/Utils.h @2.13.0)."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return {"avx512bw", "avx512vl", "avx512dq"} <= set(value.split())
        if key.strip() == "Features" and "bf16" in value.split():
            return True
    return None


def _affinity(cores: int) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return cores
    return min(cores, max(1, len(os.sched_getaffinity(0))))


def _groups(root: Path) -> list[_Group]:
    """Control groups that bind this process, of version 2 and of version 1's controllers."""
    found: list[_Group] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for base in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                found += [_version_2(folder) for folder in _chain(root / base, path)]
        if "memory" in controllers.split(","):
            folders = _chain(root / "sys/fs/cgroup/memory", path)
            found += [_memory_1(folder) for folder in folders]
        if "cpu" in controllers.split(","):
            folders = _chain(root / "sys/fs/cgroup/cpu", path)
            found += [_cpu_1(folder) for folder in folders]
    return found


def _chain(mount: Path, path: str) -> list[Path]:
    """The group's folder and those above it.

    A container often sees the path of the host but only its own group, mounted as the root; folders
    that are not there drop out and the mount itself remains.
    """
    parts = [part for part in path.strip("/").split("/") if part not in ("", "..")]
    folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def _version_2(folder: Path) -> _Group:
    quota = _text(folder / "cpu.max").split()
    cores = None
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        cores = int(quota[0]) / int(quota[1])
    limit = _number(folder / "memory.max")
    held = 0
    if limit is not None:
        given_up = _stat(folder / "memory.stat", "inactive_file")
        held = max(0, (_number(folder / "memory.current") or 0) - given_up)
    return _Group(limit_bytes=limit, held_bytes=held, cores=cores)


def _memory_1(folder: Path) -> _Group:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or not 0 < limit < _NO_LIMIT:
        return _Group()
    given_up = _stat(folder / "memory.stat", "total_inactive_file")
    held = max(0, (_number(folder / "memory.usage_in_bytes") or 0) - given_up)
    return _Group(limit_bytes=limit, held_bytes=held)


def _cpu_1(folder: Path) -> _Group:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return _Group(cores=quota / period if quota and period and quota > 0 else None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # Absent or not ours to read: no limit that we know of.


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _number(path: Path) -> int | None:
    """None for an absent file and for ``max``."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0
