"""Writing a run folder: whole or not at all, and never over a run that may still be going."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import EnvironmentLacks, UsageError
from launcher.files import beside, write_run_file
from launcher.running.processes import this_host
from launcher.running.run_record import OUTCOME, SILENT_S, last_write_s, read_record

RUN_MARKS = frozenset({"train.py", "accelerate.yaml", "command.sh"})
"""Files that make a folder a run folder."""


def write_run(folder: Path, files: Mapping[str, str], *, overwrite: bool = False) -> None:
    """Make ``folder`` hold exactly ``files``; .sh files become executable.

    All files are written to a folder beside it, which is then renamed: nobody sees half a run.

    Args:
        folder: a path that does not exist, an empty folder, or with ``overwrite`` a run folder.
        files: file name -> text.
        overwrite: replace a run folder whose run is over; its checkpoints and logs go with it.

    Raises:
        UsageError: the folder holds something else, or a run that is alive.
        EnvironmentLacks: no permission, no space, a bad path; nothing is left behind.
    """
    try:
        _check_target(folder, overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = beside(folder)
        staging.mkdir()
    except OSError as error:
        raise _lacks(folder, error) from None
    try:
        for name, text in files.items():
            write_run_file(staging / name, text)
        _swap(staging, folder, overwrite)
    except OSError as error:
        raise _lacks(folder, error) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def is_run_folder(folder: Path) -> bool:
    """Whether the folder was written by ``write_run``."""
    return all((folder / name).is_file() for name in RUN_MARKS)


def is_alive(folder: Path) -> bool:
    """Whether the run that was started from the folder may still be going."""
    record = read_record(folder)
    if record is None:
        return False
    host = this_host()
    if record.is_here(host):
        return record.is_supervised(host)
    # Started on another host of a shared file system, whose processes cannot be asked for.
    if (folder / OUTCOME).exists():
        return False
    written = last_write_s(folder)
    return written is not None and time.time() - written < SILENT_S


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder that does not exist yet")
    if not any(folder.iterdir()):
        return
    if not is_run_folder(folder):
        raise UsageError(f"{folder} holds other files; name a folder that does not exist yet")
    if is_alive(folder):
        raise UsageError(f"the run in {folder} is still going; stop it first")
    if not overwrite:
        raise _taken(folder)


def _taken(folder: Path) -> UsageError:
    return UsageError(f"{folder} holds a run already; name another folder, or overwrite it")


def _swap(staging: Path, folder: Path, overwrite: bool) -> None:
    """Put ``staging`` in the place of ``folder``, and put the old one back if that fails."""
    try:
        staging.rename(folder)  # also onto an empty folder, and never onto what another wrote meanwhile
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not overwrite:
            raise _taken(folder) from None
    old = beside(folder)
    folder.rename(old)
    try:
        staging.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _lacks(folder: Path, error: OSError) -> EnvironmentLacks:
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "no permission",
        errno.EPERM: "no permission",
        errno.EROFS: "the disk is read-only",
        errno.ENAMETOOLONG: "the name is too long",
        errno.ENOTDIR: "a part of the path is a file",
        errno.EEXIST: "a part of the path is a file",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return EnvironmentLacks(f"cannot write the run folder {folder}: {reason}; choose another place with -o")
