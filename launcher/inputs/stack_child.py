"""Asks another Python for its packages; it may turn out to be anything."""

from __future__ import annotations

import re
from typing import Any

from launcher.child_process import Answer, TooSlow, run_script
from launcher.errors import EnvironmentLacks
from planner.stack import PACKAGES

_MAX_ANSWER_BYTES = 1024**2


def ask_python(path: str, limit_s: float) -> dict[str, Any]:
    """What `launcher/children/inspect_stack.py` says when ``path`` runs it.

    Raises:
        EnvironmentLacks: It cannot be started, is no Python, crashed or took too long.
    """
    try:
        answer = run_script(
            "inspect_stack.py", python=path, arguments=PACKAGES, limit_s=limit_s, most_bytes=_MAX_ANSWER_BYTES
        )
    except TooSlow:
        raise EnvironmentLacks(f"--python {path} did not say in {limit_s:g} s which packages it has") from None
    found = answer.document()
    if found is None or not _is_ours(found):
        raise EnvironmentLacks(f"--python {path} {_trouble(answer)}")
    return found


def _is_ours(found: dict[str, Any]) -> bool:
    """Whether the script said it, and not a program that prints JSON of its own."""
    versions, notes = found.get("versions"), found.get("notes")
    return (
        isinstance(found.get("python_version"), str)
        and re.fullmatch(r"\d+\.\d+.*", found["python_version"]) is not None
        and isinstance(versions, dict)
        and all(isinstance(version, str) for version in versions.values())  # pyright: ignore[reportUnknownVariableType]
        and isinstance(notes, list)
        and isinstance(found.get("cuda"), str | None)
    )


def _trouble(answer: Answer) -> str:
    if answer.code < 0:
        return f"was ended by signal {-answer.code} when asked for its packages"
    if any("Traceback" in line or "Fatal Python error" in line for line in answer.said):
        return f"fails when asked for its packages: {answer.last_words}"
    return f"does not answer like a Python (exit code {answer.code}): {answer.last_words}"
