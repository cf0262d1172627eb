"""Running a child that traces or measures: bounded in time, gone with whoever asked, its progress passed on.

The child lives in a session of its own and holds our end of its stdin open: whether we are done, interrupted or killed,
nothing that it started outlives us.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from launcher.errors import EnvironmentLacks, ProbeFailed

CHILDREN = Path(__file__).resolve().parents[1] / "children"
_MAX_ANSWER_BYTES = 32 * 2**20
SAID_LINES = 200
"""Of a child's other words; the last of them explain a failure."""

Progress = Callable[[int, int, str, float], None]
"""Called with (done, asked for, what is running, seconds so far)."""


def ask_child(
    script: str,
    request: Mapping[str, object],
    *,
    python: str | None,
    limit_s: float,
    environment: Mapping[str, str],
    progress: Progress | None = None,
    what: str = "probe",
    otherwise: str = "--limit S gives it more",
) -> dict[str, Any]:
    """What a script of ``launcher/children`` answers; it and all that it started are gone when this returns or raises.

    Args:
        script: file name.
        request: handed over as one line of JSON.
        python: the training Python, None for the one running.
        limit_s: the child is ended after this long.
        environment: variables beside ours, which win.
        progress: told about every step.
        what: the child's work, in one word.
        otherwise: what is left to do when it took too long.

    Raises:
        EnvironmentLacks: the Python cannot be started or lacks a package.
        ProbeFailed: the child crashed, was killed, or took too long.
    """
    interpreter = python or sys.executable
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [interpreter, str(CHILDREN / script)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment},
            )
        except OSError as error:
            raise EnvironmentLacks(
                f"cannot start the training Python {interpreter}: {error.strerror}; name one with --python"
            ) from None
        try:
            said, late = _follow(process, json.dumps(request).encode() + b"\n", limit_s, progress)
        finally:
            _end(process)
        if late:
            raise ProbeFailed(f"the {what} took longer than {limit_s:g} s and was ended; {otherwise}")
        output.seek(0)
        return _answer(output.read(_MAX_ANSWER_BYTES), process.returncode, said, interpreter, what)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole session, if its first process has not ended and been waited for already."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    process.wait()


def _follow(
    process: subprocess.Popen[bytes], request: bytes, limit_s: float, progress: Progress | None
) -> tuple[Sequence[str], bool]:
    """Hand over the request and pass progress on: (what else was said, whether time ran out)."""
    assert process.stdin is not None and process.stderr is not None
    late = threading.Event()

    def give_up() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    def sweep() -> None:
        # As long as nobody has waited for it, its number is its own. What it started would hold the pipes open.
        with suppress(ChildProcessError, ProcessLookupError, PermissionError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    sweeper = threading.Thread(target=sweep if hasattr(os, "waitid") else lambda: None, daemon=True)
    sweeper.start()
    said: list[str] = []
    try:
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # It ended before it read; what it said comes below.
        for line in process.stderr:
            step = _progress_of(line)
            if step is None:
                said = [*said[-SAID_LINES:], line.decode("utf-8", "replace").strip()]
            elif progress is not None:
                progress(*step)
        sweeper.join()
        process.wait()
    finally:
        timer.cancel()
    return said, late.is_set()


def _progress_of(line: bytes) -> tuple[int, int, str, float] | None:
    try:
        step: Any = json.loads(line)
        return int(step["done"]), int(step["of"]), str(step.get("what", "")), float(step["seconds"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _answer(output: bytes, code: int, said: Sequence[str], python: str, what: str) -> dict[str, Any]:
    if code < 0:
        cause = ", most likely by the kernel for want of host memory" if code == -signal.SIGKILL else ""
        raise ProbeFailed(f"the {what} was ended by signal {-code}{cause}; nothing was kept")
    try:
        document: Any = json.loads(output)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        last = next((line for line in reversed(said) if line), "it said nothing")
        raise ProbeFailed(f"the {what} failed in {python} (exit code {code}): {last[:300]}")
    answer = cast("dict[str, Any]", document)
    if "error" in answer:
        raise EnvironmentLacks(str(answer["error"]["message"]))
    return answer
