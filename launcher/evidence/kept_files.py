"""Files of the user's cache: written beside and renamed, so that writers may run at once and be killed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

FORGOTTEN_S = 3600.0
"""A half-written file this old belongs to a writer that was killed."""


def write_kept(path: Path, text: str) -> None:
    """Write a file of the cache whole, in the place of one that is there.

    Raises:
        OSError: the folder cannot be written, or the disk is full; nothing is left behind.
    """
    beside = path.with_name(f".{path.stem}.{os.getpid()}-{time.monotonic_ns()}.part")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


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
