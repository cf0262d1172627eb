"""Asks another Python for its packages; it may turn out to be anything."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import EnvironmentLacks
from planner.stack import PACKAGES

_SCRIPT = Path(__file__).resolve().parents[1] / "children" / "inspect_stack.py"
_MAX_ANSWER_BYTES = 1024**2


def ask_python(path: str, limit_s: float) -> dict[str, Any]:
    """What `launcher/children/inspect_stack.py` says when ``path`` runs it.

    Raises:
        EnvironmentLacks: It cannot be started, is no Python, crashed or took too long.
    """
    answer = _run([path, str(_SCRIPT), *PACKAGES], limit_s)
    # A wrapper or sitecustomize may print before it.
    last = answer.output.strip().rpartition("\n")[2]
    try:
        found: Any = json.loads(last)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and "python_version" in found:
        return found  # pyright: ignore[reportUnknownVariableType]
    raise EnvironmentLacks(f"--python {path} {_trouble(answer)}")


def _trouble(answer: _Answer) -> str:
    said = answer.errors.strip().rpartition("\n")[2].strip() or "it printed nothing to explain it"
    if answer.code < 0:
        return f"was ended by signal {-answer.code} when asked for its packages"
    if "Traceback" in answer.errors or "Fatal Python error" in answer.errors:
        return f"fails when asked for its packages: {said[:200]}"
    return f"does not answer like a Python (exit code {answer.code}): {said[:200]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    code: int
    output: str
    errors: str


def _run(command: list[str], limit_s: float) -> _Answer:
    """Run a program that may be anything: bounded in time and in what it prints."""
    where = f"--python {command[0]}"
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentLacks(f"{where} cannot be started: {error.strerror}") from None
    with process:
        try:
            output, errors = _read_both(process, limit_s)
            code = process.wait(timeout=1)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise EnvironmentLacks(f"{where} did not say in {limit_s:g} s which packages it has") from None
        except OverflowError:
            raise EnvironmentLacks(f"{where} does not answer like a Python: it prints on") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return _Answer(code=code, output=output, errors=errors)


def _read_both(process: subprocess.Popen[bytes], limit_s: float) -> tuple[str, str]:
    """Both streams until they end.

    Raises:
        TimeoutError: They did not end in time.
        OverflowError: More than any Python would say.
    """
    deadline = time.monotonic() + limit_s
    texts = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            ended = process.poll() is not None
            ready = selector.select(0 if ended else min(left_s, 0.1))
            if ended and not ready:
                break  # Something it started still holds the pipes.
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                texts[key.fileobj] += chunk  # type: ignore[index]
                if not chunk:
                    selector.unregister(key.fileobj)
                elif len(texts[key.fileobj]) > _MAX_ANSWER_BYTES:  # type: ignore[index]
                    raise OverflowError
    output, errors = (bytes(text).decode("utf-8", "replace") for text in texts.values())
    return output, errors
