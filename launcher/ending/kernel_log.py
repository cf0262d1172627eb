"""The kernel's own words on whom it killed for want of memory, where its log may be read (by root, mostly)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOG = Path("/dev/kmsg")
RECORD_BYTES = 8192
"""A record is at most this long (Documentation/ABI/testing/dev-kmsg)."""
_KILL = re.compile(
    r"[Oo]ut of memory(?: \(\w+\))?: Kill(?:ed)? process (?P<pid>\d+) \((?P<name>.*?)\).*?anon-rss:(?P<rss>\d+)kB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKill:
    """One process that the kernel killed; its pid is that of the machine's own namespace."""

    pid: int
    name: str
    resident_bytes: int
    """Anonymous memory that it held."""


def kills_since(since_s: float, log: Path = LOG) -> list[KernelKill] | None:
    """Out-of-memory kills on the whole machine, oldest first; None where the log cannot be read.

    Args:
        since_s: seconds of ``time.monotonic``, whose clock the kernel's log keeps too.
        log: another file in tests.
    """
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found: list[KernelKill] = []
        for record in _records(descriptor):
            head, _, text = record.partition(";")
            match = _KILL.search(text)
            if match is None or not _is_later(head, since_s):
                continue
            resident = int(match["rss"]) * 1024
            found.append(KernelKill(pid=int(match["pid"]), name=match["name"], resident_bytes=resident))
        return found
    finally:
        os.close(descriptor)


def _records(descriptor: int) -> Iterator[str]:
    """Every record there is: one a read of the device, lines of a plain file."""
    while True:
        try:
            data = os.read(descriptor, RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # overwritten while we read: the next read goes on behind it
            continue
        except OSError:
            return
        if not data:
            return
        yield from data.decode(errors="replace").splitlines()


def _is_later(head: str, since_s: float) -> bool:
    fields = head.split(",")
    return len(fields) > 2 and fields[2].isdigit() and int(fields[2]) / 1e6 >= since_s
