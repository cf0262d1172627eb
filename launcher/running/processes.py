"""Processes of a run: which are alive, which belong to it, and how to end every one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_S = 10.0
"""Between TERM and KILL: enough for a data loader to close, short enough for a person to wait."""
REFUSES_S = 5.0
"""Wait for the killed to vanish; in uninterruptible sleep (dead disk, hung driver) none does."""
_POLL_S = 0.02
_RESCAN_S = 0.5
_LINUX = sys.platform == "linux"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if _LINUX else 100
_DEAD_STATES = frozenset("ZXx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """Which boot of the machine: pids and start times mean nothing across two of them."""

    id: str | None
    """The kernel's random id of this boot; None where there is none."""
    time_s: float
    """Seconds since the epoch, off by as much as the clock was stepped since."""

    def same(self, other: Boot) -> bool:
        """Whether both name one boot."""
        if self.id and other.id:
            return self.id == other.id
        return abs(self.time_s - other.time_s) < 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where pids are looked up: a machine's boot and, in containers, the pid namespace."""

    name: str
    boot: Boot
    pid_namespace: str | None


@dataclass(frozen=True, slots=True)
class Mark:
    """One process for good: its pid, and its start so that a reused pid is another process."""

    pid: int
    create_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillReport:
    """What ``kill_tree`` did."""

    ended: int
    """Processes that were signalled and are gone."""
    left: tuple[int, ...]
    """Pids that survived KILL: in uninterruptible sleep, or another user's."""


@dataclass(frozen=True, slots=True)
class _Look:
    dead: bool
    parent: int
    group: int
    create_time: float


def this_boot() -> Boot:
    """The running boot."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = None
    return Boot(id=boot_id, time_s=psutil.boot_time())


def this_host() -> Host:
    """Where this process looks up pids."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = None
    return Host(name=socket.gethostname(), boot=this_boot(), pid_namespace=namespace)


def create_time(pid: int) -> float | None:
    """When a process started, or None when it does not exist.

    On Linux in seconds since boot, which no step of the clock alters: a supervisor must not look
    dead because the time was corrected. Elsewhere psutil's seconds since the epoch.
    """
    look = _look(pid)
    return look.create_time if look else None


def alive(pid: int, create_time: float) -> bool:
    """Whether the process that had this pid and this start still runs; a zombie does not."""
    look = _look(pid)
    # psutil reports whole clock ticks outside Linux, through a boot time that may move.
    tolerance_s = 0.005 if _LINUX else 1.0
    return look is not None and not look.dead and abs(look.create_time - create_time) < tolerance_s


def stopped(pids: Collection[int]) -> list[int]:
    """Those that somebody has stopped, with SIGSTOP or a debugger: they wait to be continued."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                found.append(pid)
    return sorted(found)


def members(
    *,
    root: int | None = None,
    group: int | None = None,
    marker: str | None = None,
    exclude: Collection[int] = (),
) -> set[Mark]:
    """Living processes of a run: descendants of a root, members of a group, bearers of a marker.

    Args:
        root: A pid; it is itself left out, and so is the calling process.
        group: A process group id that is known to be the run's own.
        marker: ``NAME=value`` as it stands in the environment a process was started with. It finds
            those that left both tree and group with setsid and a double fork.
        exclude: Pids to leave alone.
    """
    looks = {pid: look for pid in psutil.pids() if (look := _look(pid)) and not look.dead}
    found = {pid for pid, look in looks.items() if group is not None and look.group == group}
    if root is not None:
        found |= _descendants(root, looks)
    if marker is not None:
        found |= {pid for pid in looks.keys() - found if _has_marker(pid, marker)}
    found -= {os.getpid(), *exclude}
    return {Mark(pid, looks[pid].create_time) for pid in found}


def kill_tree(
    *,
    root: int | None = None,
    group: int | None = None,
    marker: str | None = None,
    grace_s: float = GRACE_S,
    exclude: Collection[int] = (),
    hurry: Callable[[], bool] = lambda: False,
) -> KillReport:
    """End every process of a run: TERM, a grace, KILL, until a fresh look finds none.

    Args:
        root: See ``members``, as are group, marker and exclude.
        group: A process group id.
        marker: ``NAME=value`` of the environment.
        grace_s: Seconds between TERM and KILL.
        exclude: Pids to leave alone.
        hurry: Asked while waiting; true ends the grace at once.
    """

    def find() -> set[Mark]:
        return members(root=root, group=group, marker=marker, exclude=exclude)

    kill_at = time.monotonic() + grace_s
    give_up_at: float | None = None
    signalled: set[Mark] = set()
    targets = find()
    while targets:
        now = time.monotonic()
        forced = now >= kill_at or hurry()
        if forced and give_up_at is None:
            give_up_at = now + REFUSES_S
        if give_up_at is not None and now >= give_up_at:
            break
        for mark in targets if forced else targets - signalled:
            _send(mark, signal.SIGKILL if forced else signal.SIGTERM)
        signalled |= targets
        rescan_at = now + _RESCAN_S
        until = rescan_at if forced else min(rescan_at, kill_at)
        _wait_gone(targets, until, (lambda: False) if forced else hurry)
        targets = find()
    left = tuple(sorted(mark.pid for mark in targets))
    return KillReport(ended=len(signalled - targets), left=left)


def oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """How often the kernel has killed for want of memory: ``cgroup`` (ours) and ``machine``.

    A counter that cannot be read is left out. Sources: memory.events (cgroup v2),
    memory.oom_control (v1), /proc/vmstat.

    Args:
        root: The file system's root; another one in tests.
    """
    counts: dict[str, int] = {}
    for file in _cgroup_files(root):
        if (count := _counter(file, "oom_kill")) is not None:
            counts["cgroup"] = count
            break
    if (count := _counter(root / "proc/vmstat", "oom_kill")) is not None:
        counts["machine"] = count
    return counts


def _look(pid: int) -> _Look | None:
    if not _LINUX:
        return _look_psutil(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold both: fields count from the last bracket (proc(5)).
    fields = stat[stat.rindex(b")") + 2 :].split()
    # A first thread that ended is a zombie while others run on, and hold their card.
    dead = fields[0].decode() in _DEAD_STATES and int(fields[17]) <= 1
    return _Look(
        dead=dead,
        parent=int(fields[1]),
        group=int(fields[2]),
        create_time=int(fields[19]) / _TICKS_PER_S,
    )


def _look_psutil(pid: int) -> _Look | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return _Look(dead, process.ppid(), os.getpgid(pid), process.create_time())
    except psutil.ZombieProcess:
        return _Look(True, 0, 0, 0.0)
    except (psutil.Error, OSError):
        return None


def _descendants(root: int, looks: dict[int, _Look]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, look in looks.items():
        children.setdefault(look.parent, []).append(pid)
    found: set[int] = set()
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue.extend(children.get(pid, ()))
    return found


def _has_marker(pid: int, marker: str) -> bool:
    if _LINUX:
        try:
            return os.fsencode(marker) in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or just gone
            return False
    name, _, value = marker.partition("=")
    try:
        return psutil.Process(pid).environ().get(name) == value
    except (psutil.Error, OSError):
        return False


def _send(mark: Mark, number: signal.Signals) -> None:
    if alive(mark.pid, mark.create_time):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(mark.pid, number)


def _wait_gone(targets: set[Mark], until: float, hurry: Callable[[], bool]) -> None:
    while time.monotonic() < until and not hurry():
        if not any(alive(mark.pid, mark.create_time) for mark in targets):
            return
        time.sleep(_POLL_S)


def _cgroup_files(root: Path) -> list[Path]:
    """Event files of this process's memory control group, the nearest first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.strip("/")
        # The bare mount comes last: in a container the path may be the host's, and ours the root.
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                files += [root / mount / inside / "memory.events", root / mount / "memory.events"]
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            files += [root / mount / p / "memory.oom_control" for p in (inside, "")]
    return files


def _counter(file: Path, name: str) -> int | None:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return None
    return None
