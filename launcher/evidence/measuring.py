"""Asking a child that traces or measures: its progress passed on, its failures as those of a probe."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from launcher.child_process import Answer, TooSlow, run_script
from launcher.errors import ProbeFailed

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

    def is_progress(line: bytes) -> bool:
        step = step_of(line)
        if step is not None and progress is not None:
            progress(*step)
        return step is not None

    try:
        answer = run_script(
            script,
            python=python,
            request=request,
            limit_s=limit_s,
            environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment},
            heard=is_progress,
        )
    except TooSlow:
        raise ProbeFailed(f"the {what} took longer than {limit_s:g} s and was ended; {otherwise}") from None
    return _document(answer, python or sys.executable, what)


def step_of(line: bytes | str) -> tuple[int, int, str, float] | None:
    """(done, asked for, what is running, seconds so far) of a line that tells of a step, None of any other."""
    try:
        step: Any = json.loads(line)
        return int(step["done"]), int(step["of"]), str(step.get("what", "")), float(step["seconds"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _document(answer: Answer, python: str, what: str) -> dict[str, Any]:
    if answer.code < 0:
        cause = ", most likely by the kernel for want of host memory" if answer.code == -signal.SIGKILL else ""
        raise ProbeFailed(f"the {what} was ended by signal {-answer.code}{cause}; nothing was kept")
    document = answer.document()
    if document is None:
        raise ProbeFailed(f"the {what} failed in {python} (exit code {answer.code}): {answer.last_words}")
    return document
