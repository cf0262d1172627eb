"""`trlfit plan --compare A B`."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from launcher.errors import ExitCode, UsageError
from launcher.output import print_json_lines, print_text
from launcher.planning import answered, inputs_from_args
from planner.advice.comparison import NoSuchRank, Side, compare

EXAMPLE = "give a rank of the plan (1) or pins (recompute=full,offload=activations)"


def run_compare(args: argparse.Namespace) -> int:
    """Compare two candidates; exit 3 when neither fits."""
    first, second = (_side(text) for text in args.compare)
    inputs = inputs_from_args(args)
    try:
        document = answered(partial(compare, first=first, second=second), inputs)
    except NoSuchRank as error:
        raise UsageError(f"--compare: {error}") from None
    if args.json:
        print_json_lines(document)
    else:
        from launcher.text.comparison import comparison_text

        print_text(comparison_text(document))
    fits = any(side["candidate"]["fits"] for side in document["sides"])
    return ExitCode.DONE if fits else ExitCode.NOTHING_FITS


def _side(text: str) -> Side:
    """``3`` as a rank; ``recompute=full,offload=activations,optimizer`` as pins.

    A word without ``=`` belongs to the knob before it.
    """
    if text.strip().isascii() and text.strip().isdigit() and len(text.strip()) <= 4:
        return int(text)
    pins: dict[str, Any] = {}
    knob = ""
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if sign:
            knob = name.strip()
            if knob in pins:
                raise UsageError(f"--compare {text[:60]!r}: {knob[:40]} twice; give it once")
            pins[knob] = value.strip()
        elif knob:
            pins[knob] += f",{part.strip()}"
        else:
            raise UsageError(f"--compare {text[:60]!r} is neither; {EXAMPLE}")
    return pins
