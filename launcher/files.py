"""Files that are there whole or not at all: written beside and renamed, so writers may run at once and be killed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

FORGOTTEN_S = 3600.0
"""A half-written file this old belongs to a writer that was killed."""
_LONGEST_STEM = 40
"""Characters of the file's own name in that of the one beside it: a name has 255 bytes, a character at most four."""


def replace_file(path: Path, text: str) -> None:
    """Write a file whole and to the disk, in the place of one that is there, whose permissions it takes.

    A link is replaced too: resolve it first where it is to stay one.

    Raises:
        OSError: the folder cannot be written, or the disk is full; nothing is left behind.
        ValueError: the path names no file.
    """
    part = beside(path)
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        take_permissions(part, path)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def beside(path: Path) -> Path:
    """A hidden name in the same folder that nobody else takes, for what is renamed to ``path`` when it is whole.

    Raises:
        ValueError: the path has no name.
    """
    return path.with_name(f".{path.name[:_LONGEST_STEM]}.{os.getpid()}-{time.monotonic_ns()}.part")


def write_run_file(path: Path, text: str) -> None:
    """A new file of a run: .sh files are executable, as far as the umask lets them.

    Raises:
        OSError: it is there already, or cannot be written.
    """
    mode = 0o777 if path.suffix == ".sh" else 0o666
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        # Surrogates reach us in file names of the command line; they go back to the bytes they were.
        file.write(text.encode("utf-8", "surrogateescape"))


def take_permissions(new: Path, old: Path) -> None:
    """Give ``new`` the permissions of ``old``, where that is there.

    Raises:
        OSError: one of them cannot be looked at.
    """
    # Some disks know one mode for all files and refuse to change it.
    with suppress(FileNotFoundError, PermissionError):
        wanted = old.stat().st_mode & 0o777
        if wanted != new.stat().st_mode & 0o777:
            new.chmod(wanted)


def folder_to_keep_in(folder: Path) -> Path:
    """``folder``, made where it is not there, and free of what killed writers left behind.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > FORGOTTEN_S:
                path.unlink()
    return folder
