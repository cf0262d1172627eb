"""What children do the same way: read a request, die with the parent, and those that measure stay below limits.

The request is one line on stdin, which then stays open: when it ends, whoever asked is gone, and the child ends itself
and all it started. It runs in a session of its own.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time

_STARTED = time.perf_counter()


def read_request() -> dict:
    """The request; from here on the end of stdin ends this process and its children."""
    line = sys.stdin.buffer.readline()
    end_with_stdin()
    return json.loads(line)


def end_with_stdin() -> None:
    """From here on the end of stdin ends this process, and its children where it leads their group."""
    threading.Thread(target=_until_stdin_ends, daemon=True).start()


def _until_stdin_ends() -> None:
    # Not through Python's buffer, whose lock would be held when this process ends by itself.
    while os.read(0, 65536):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def say(**what: object) -> None:
    """One line of progress."""
    print(json.dumps(what), file=sys.stderr, flush=True)


def seconds() -> float:
    """Since this process began to work."""
    return time.perf_counter() - _STARTED


def limit_memory(device: str, most_bytes: int) -> None:
    """Take no more than ``most_bytes`` of the card, or of the host beyond what is taken now.

    Whatever asks for more gets an out-of-memory error, and nobody else's process is in danger.
    """
    import torch  # those that only read a request pay nothing for it

    if device == "cuda":
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + most_bytes
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _data_bytes() -> int:
    """Writable private memory of this process, which RLIMIT_DATA counts."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
            for line in status:
                if line.startswith("VmData:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on the card or on the host."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return "can't allocate memory" in text or "CUDA out of memory" in text or "unable to mmap" in text


def versions(*packages: str) -> dict[str, str]:
    """Of the packages that are installed."""
    import importlib.metadata

    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_facts(device: str) -> dict[str, object]:
    """What the measurement ran on."""
    import torch

    if device == "cuda":
        return {"device": "cuda", "name": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {"device": "cpu", "threads": torch.get_num_threads()}
