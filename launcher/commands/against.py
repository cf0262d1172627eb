"""`trlfit plan --against plan.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from launcher.errors import ExitCode
from launcher.flags import job_flags
from launcher.inputs.job_file import job_over
from launcher.inputs.plan_file import read_old_plan
from launcher.inputs.validation_text import shown
from launcher.output import print_json_lines, print_text
from launcher.planning import answered, inputs_of_job, job_from_args
from launcher.text.wrapping import wrapped
from planner.advice.old_plan import held_against
from planner.units import format_gib, format_seconds

Json = Mapping[str, Any]


def run_against(args: argparse.Namespace) -> int:
    """Hold an old plan against this machine; exit 3 when its choice cannot run here any more."""
    old = read_old_plan(args.against)
    if args.job is None and args.model is None:
        flags, names = job_flags(args)
        job, origins = job_over(old.job, f"plan {shown(args.against)}", flags, names)
    else:
        job, origins = job_from_args(args)
    inputs = inputs_of_job(job, origins, args)
    document = answered(partial(held_against, old=old), inputs)
    if args.json:
        print_json_lines(document)
    else:
        print_text(against_text(document))
    return ExitCode.DONE if document["holds"] else ExitCode.NOTHING_FITS


def against_text(document: Json) -> str:
    """For people: what changed, then whether the choice holds."""
    lines: list[str] = []
    for section, entries in document["changed"].items():
        for entry in entries:
            pair = [_value(entry["field"], value) for value in entry["values"]]
            text = f"{section:<8} {entry['field']}: {pair[0]} -> {pair[1]}"
            lines += wrapped(text, "  ", " " * 11)
    head = "what changed since that plan" if lines else "job, machine and stack are those of that plan"
    return "\n".join(
        [
            head,
            *lines,
            "",
            *([] if document["refused"] else [_predicted(document["prediction"])]),
            *(f"note: {words}" for words in document["adapted"]),
            *wrapped(document["sentence"]),
        ]
    )


def _predicted(prediction: Json) -> str:
    """Of the choice, then and now."""
    sizes = " -> ".join(format_gib(size) for size in prediction["device_bytes"])
    times = " -> ".join("not known" if step is None else format_seconds(step) for step in prediction["step_s"])
    return f"predicted for its choice: {sizes} GiB per GPU, {times} per step"


def _value(field: str, value: Any) -> str:
    if value is None:
        return "none"
    if field.endswith("_bytes"):
        return f"{format_gib(value)} GiB"
    if field == "cards":
        names = sorted(set(map(str, value)))
        return f"{len(value)} x {', '.join(names)}" if value else "none"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)
