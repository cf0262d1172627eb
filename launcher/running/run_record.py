"""What a started run keeps in its folder: the file names, run.json, the lock, earlier attempts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.ending.run_metrics import as_number
from launcher.files import replace_file, take_permissions, write_run_file
from launcher.running.processes import Boot, Host, alive

COMMAND = "command.sh"
PLAN = "plan.json"
LOG = "log.txt"
METRICS = "metrics.jsonl"
RUN = "run.json"
OUTCOME = "outcome.json"
DATA = "data.json"
"""What the check of the data found, lengths among it."""
NOTES = ".notes.json"
"""What the supervisor has to say while the run goes on: name -> sentence."""
NEXT = ".next"
"""Files of a plan that takes the place of the folder's own when the run is started again."""
STOP_REQUEST = ".stop.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""Where train.py saves the trained model at the end."""
LOCK = ".run.lock"
ATTEMPTS = "attempts"
RESERVE = ".outcome.reserve"
RESERVE_BYTES = 32 << 10
"""Kept on the disk for outcome.json, so that a run that filled the disk can still say so."""
RUN_SCHEMA = "trlfit.run/1"
RESUME = "RESUME"
"""Environment variable that tells train.py to go on from its last checkpoint."""
PYTHON = "PYTHON"
"""Environment variable by which command.sh takes another Python than its own."""
MARKER = "TRLFIT_RUN"
"""Environment variable of every process of a run; its value is the resolved folder."""

HEARTBEAT_S = 15.0
"""The supervisor touches run.json this often, for readers on other hosts of a shared disk."""
SILENT_S = 300.0
"""A run on another host is lost after this long: caches and clocks of shared disks lag."""

_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
_STALE_CLAIM_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """run.json: who runs what, where, since when."""

    id: str
    """Folder name, start and pid: one attempt, also in the history."""
    folder: str
    command: tuple[str, ...]
    started_at: str
    """UTC, ISO 8601."""
    host: str
    boot_id: str | None
    boot_time_s: float
    pid_namespace: str | None
    supervisor_pid: int
    supervisor_start: float
    """As ``processes.create_time`` gives it."""
    guard_pid: int | None = None
    """Process that ends the run should the supervisor be killed."""
    child_pid: int | None = None
    """Leader of the run's process group; None until it is started."""
    child_start: float | None = None
    oom_kills: Mapping[str, int]
    """The kernel's out-of-memory counters when the run started."""
    grace_s: float
    attempt: int = 1
    """Counts what one launch started: more than 1 after an automatic retry."""
    retries_left: int = 0
    resumed_from: str | None = None
    """Name of the checkpoint that the training goes on from."""
    after: str | None = None
    """How the attempt before this one ended, as one sentence; only of a retry."""
    change: str | None = None
    """What a retry altered, as one sentence."""

    @property
    def boot(self) -> Boot:
        """The boot that the pids belong to."""
        return Boot(id=self.boot_id, time_s=self.boot_time_s)

    def is_here(self, host: Host) -> bool:
        """Whether pids of this record can be looked up by a process on ``host``."""
        if self.host != host.name:
            return False
        # Across a reboot namespaces are new as well; the answer "dead" then needs no lookup.
        return not self.boot.same(host.boot) or self.pid_namespace == host.pid_namespace

    def is_supervised(self, host: Host) -> bool:
        """Whether the supervisor lives; only for records of this host."""
        return self.boot.same(host.boot) and alive(self.supervisor_pid, self.supervisor_start)

    def to_json(self) -> dict[str, Any]:
        """The content of run.json."""
        return {"schema": RUN_SCHEMA, **asdict(self), "command": list(self.command)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRecord | None:
        """The inverse of ``to_json``; None when fields are missing or of another kind."""
        values = {key: data[key] for key in cls.__slots__ if key in data}
        try:
            values["command"] = tuple(values["command"])
            record = cls(**values)
        except (KeyError, TypeError):
            return None
        whole = (
            all(isinstance(values[name], str) for name in ("id", "folder", "started_at", "host"))
            and all(
                as_number(values[name]) is not None for name in ("supervisor_pid", "supervisor_start", "boot_time_s")
            )
            and isinstance(values["oom_kills"], Mapping)
        )
        return record if whole else None


def marker_of(folder: Path) -> str:
    """``TRLFIT_RUN=FOLDER``, as it stands in the environment of the run's processes."""
    return f"{MARKER}={folder.resolve()}"


def utc_now() -> str:
    """The time as files of a run state it: ``2026-07-22T14:03:55.120+00:00``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, or None when it is missing, unreadable or something else."""
    if not path.is_file():
        return None  # a pipe would be waited for
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None  # pyright: ignore[reportUnknownVariableType]


def read_record(folder: Path) -> RunRecord | None:
    """run.json of a folder, or None."""
    data = read_json(folder / RUN)
    return RunRecord.from_json(data) if data else None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object so that no reader ever sees half a file; ``read_json`` reads it.

    Raises:
        OSError: the folder is read-only or the disk is full; nothing is left behind.
    """
    replace_file(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def claim(folder: Path, *, wait_s: float, write: bool = True) -> int | None:
    """Take the folder's lock, or None when another process keeps it for ``wait_s``.

    The lock goes with the last process that holds the descriptor: the supervisor, then its guard.

    Args:
        folder: The run folder.
        wait_s: How long to try.
        write: False to take it without creating the file, in a folder that may be read-only.

    Raises:
        OSError: the lock file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    descriptor = os.open(folder / LOCK, flags | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as problem:
            if problem.errno in _NO_FLOCK:
                if _claim_by_name(folder):
                    return descriptor
            elif problem.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise
        if time.monotonic() >= until:
            os.close(descriptor)
            return None
        time.sleep(0.02)


def release(folder: Path, descriptor: int) -> None:
    """Give the lock back."""
    with contextlib.suppress(OSError):  # never made, or a read-only folder
        (folder / f"{LOCK}.name").unlink()
    os.close(descriptor)


def _claim_by_name(folder: Path) -> bool:
    """The lock where the disk knows no flock (Lustre without it): a name created exclusively."""
    name = folder / f"{LOCK}.name"
    try:
        # Its holder's heartbeat keeps run.json fresh; a claim older than both is a dead one's.
        newest = max(p.stat().st_mtime for p in (name, folder / RUN) if p.exists())
        if time.time() - newest > _STALE_CLAIM_S:
            name.unlink(missing_ok=True)
    except (ValueError, OSError):
        pass
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def set_aside(folder: Path, outcome: Mapping[str, Any] | None = None, *, anew: bool = False) -> None:
    """Move what an earlier attempt left into ``attempts/N/``, so that a new one starts clean.

    A plan that waits in ``.next`` then takes the place of the folder's files, which are kept there too. Whatever
    moment this is killed at, the next start completes it.

    Args:
        folder: The run folder.
        outcome: Of an attempt whose supervisor goes on with the next: it is kept with the attempt, and run.json stays
            until it is replaced, so that a reader finds the run running throughout.
        anew: The training starts from the beginning: checkpoints and model are the earlier attempt's, which the trainer
            would rotate away and overwrite, and a later resume would take for its own.

    Raises:
        OSError: the folder is read-only.
    """
    for name in (STOP_REQUEST, NOTES):
        (folder / name).unlink(missing_ok=True)
    names = [LOG, METRICS, RUN, OUTCOME, *((CHECKPOINTS, MODEL) if anew else ())]
    old = [folder / name for name in names if (folder / name).exists()]
    pending = sorted((folder / NEXT).iterdir()) if (folder / NEXT).is_dir() else []
    if not old and not pending:
        return
    number = 1
    while (folder / ATTEMPTS / str(number)).exists():
        number += 1
    target = folder / ATTEMPTS / str(number)
    target.mkdir(parents=True)
    if outcome is not None:
        write_json(target / OUTCOME, outcome)
    for path in old:
        if outcome is not None and path.name == RUN:
            shutil.copy2(path, target)
        else:
            path.rename(target / path.name)
    for path in pending:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(folder / path.name, target)
        path.replace(folder / path.name)
    with contextlib.suppress(OSError):
        (folder / NEXT).rmdir()


def stage_next(folder: Path, files: Mapping[str, str]) -> None:
    """Put the files of a plan into ``.next``, whole or not at all; ``set_aside`` puts them in place.

    Raises:
        OSError: the folder is read-only or the disk is full; nothing is left behind.
    """
    part = folder / f"{NEXT}.{os.getpid()}"
    for left in folder.glob(f"{NEXT}.*"):
        shutil.rmtree(left, ignore_errors=True)  # by one that was killed
    try:
        part.mkdir()
        for name, text in files.items():
            write_run_file(part / name, text)
            take_permissions(part / name, folder / name)
        forget_next(folder)
        part.rename(folder / NEXT)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def forget_next(folder: Path) -> None:
    """Drop a plan that waits."""
    shutil.rmtree(folder / NEXT, ignore_errors=True)


def last_write_s(folder: Path) -> float | None:
    """Seconds since the epoch when the run last wrote anything, or None."""
    times: list[float] = []
    for name in (LOG, METRICS, RUN):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)
