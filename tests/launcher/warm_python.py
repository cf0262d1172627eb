"""A Python that is called like any other and has the training libraries imported before it starts.

Importing torch, transformers and TRL takes five seconds of a core, and one small training on two ranks does so three
times. Here one process imports them once and forks for every start. What is started has the environment, folder,
arguments, streams and exit code that it would have; it is a session of its own and dies with the process that stands
in for it. A start whose environment says something to the libraries as they are imported, and not what the first
process was told, gets an ordinary Python.
"""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = Path(__file__).with_name("warm_forks") / "server.py"
CLIENT = Path(__file__).with_name("warm_forks") / "client.py"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


@functools.cache
def place() -> Path:
    """A folder of this test process, for the socket and for what datasets caches."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def warm_variables() -> dict[str, str]:
    """What a start must say to be a fork."""
    return {**ENVIRONMENT, "HF_DATASETS_CACHE": str(place() / "datasets")}


def warm_environment() -> dict[str, str]:
    """Our own environment with these."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **warm_variables()}


@functools.cache
def warm_python() -> str:
    """The program to call; its first process ends with this one."""
    socket, program = place() / "socket", place() / "python"
    reader, writer = os.pipe()
    os.set_inheritable(writer, False)
    server = subprocess.Popen(
        [sys.executable, str(SERVER), str(socket), str(program)], stdin=reader, stdout=subprocess.PIPE,
        env=warm_environment(),
    )  # fmt: skip
    os.close(reader)
    atexit.register(server.wait)
    atexit.register(os.close, writer)
    assert server.stdout is not None
    said = server.stdout.readline()
    server.stdout.close()
    assert said == b"ready\n", "the training libraries cannot be imported"
    words = [sys.executable, "-S", "-E", str(CLIENT), str(socket), sys.executable]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return str(program)
