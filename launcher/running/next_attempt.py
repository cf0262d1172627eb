"""Asking for the next plan from the supervisor, which itself stays without the planner: a child decides."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.ending.outcomes import Outcome
from launcher.ending.run_metrics import as_mapping
from launcher.paths import PACKAGES_FOLDER
from launcher.running.guard import die_with_parent

PLANNING_S = 900.0
"""A model that is traced again on a busy host takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAttempt:
    """What the child found: the files wait in ``.next``, or there is a problem."""

    sentence: str | None = None
    """What the plan alters."""
    resumed_from: str | None = None
    problem: str | None = None


def plan_next(folder: Path, outcome: Outcome, pause: Callable[[], bool]) -> NextAttempt:
    """Plan what follows an attempt that ran out of memory, and stage its files.

    Args:
        folder: The run folder.
        outcome: How the attempt ended; it is not in the folder yet.
        pause: Waits a moment; true when nobody wants a further attempt any more.
    """
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer:
        question.write(json.dumps(outcome.to_json()).encode())
        question.seek(0)
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "launcher.running.next_plan", str(folder)],
                cwd=PACKAGES_FOLDER,
                stdin=question,
                stdout=answer,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        except OSError as problem:
            return NextAttempt(problem=f"the planner did not start: {problem.strerror}")
        until = time.monotonic() + PLANNING_S
        while child.poll() is None:
            if pause() or time.monotonic() > until:
                child.kill()
                child.wait()
                return NextAttempt(problem=f"no plan within {PLANNING_S:.0f} s")
        answer.seek(0)
        try:
            found = as_mapping(json.loads(answer.read()))
        except ValueError:
            return NextAttempt(problem=f"the planner ended with exit code {child.returncode}")
    if found.get("error"):
        return NextAttempt(problem=str(found["error"]))
    checkpoint = found.get("resumed_from")
    return NextAttempt(
        sentence=str(found.get("sentence")), resumed_from=str(checkpoint) if checkpoint is not None else None
    )
