"""What a check of a run to be written answers, or why there is no answer, in the words of the commands that write."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from launcher.child_process import TooSlow, run_script
from launcher.errors import EnvironmentLacks


def run_child(script: str, request: Mapping[str, object], *, python: str | None, timeout_s: float) -> dict[str, Any]:
    """Hand ``request`` to a script of ``launcher/children`` and return the document it prints.

    Args:
        script: file name.
        request: what the child is asked, as JSON.
        python: the training Python; None is the one running.
        timeout_s: after this long the child is ended.

    Raises:
        UsageError: the child found bad input.
        EnvironmentLacks: the child found something missing, or could not be run at all.
    """
    try:
        answer = run_script(script, python=python, request=request, limit_s=timeout_s)
    except TooSlow:
        raise EnvironmentLacks(
            f"{script} gave no answer in {timeout_s:.0f} s; is a network drive or the hub slow?"
        ) from None
    document = answer.document()
    if document is None:
        raise EnvironmentLacks(f"{script} failed in {python or sys.executable}: {answer.last_words}")
    return document
