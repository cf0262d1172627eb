"""Running a script of ``launcher/children`` in the training Python: JSON in, one JSON document out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import as_file, files
from typing import Any

from launcher.errors import EnvironmentLacks, TrlfitError, UsageError

_KINDS: dict[str, type[TrlfitError]] = {"usage": UsageError, "environment": EnvironmentLacks}


def run_child(script: str, request: Mapping[str, object], *, python: str | None, timeout_s: float) -> dict[str, Any]:
    """Hand ``request`` to a child script on its stdin and return the document it prints.

    A child that finds something wrong prints ``{"error": {"kind": "usage" | "environment", "message": ...}}``.

    Args:
        script: file name inside ``launcher/children``.
        request: what the child is asked, as JSON.
        python: the training Python; None is the one running.
        timeout_s: after this long the child is ended.

    Raises:
        UsageError: the child found bad input.
        EnvironmentLacks: the child found something missing, or could not be run at all.
    """
    interpreter = python or sys.executable
    with as_file(files("launcher").joinpath("children", script)) as path:
        try:
            done = subprocess.run(
                [interpreter, str(path)],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            raise EnvironmentLacks(
                f"cannot start the training Python {interpreter}: {error.strerror}; name one with --python"
            ) from None
        except subprocess.TimeoutExpired:
            raise EnvironmentLacks(
                f"{script} gave no answer in {timeout_s:.0f} s; is a network drive or the hub slow?"
            ) from None
    return _document(script, interpreter, done)


def _document(script: str, interpreter: str, done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    try:
        document: object = json.loads(done.stdout)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise EnvironmentLacks(f"{script} failed in {interpreter}: {lines[-1].strip()[:300]}")
    error = document.get("error")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if isinstance(error, dict):
        kind: object = error.get("kind")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise _KINDS.get(str(kind), EnvironmentLacks)(str(error.get("message")))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return document  # pyright: ignore[reportUnknownVariableType]
