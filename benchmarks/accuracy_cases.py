"""Cases: recorded runs and traces to replay, from the repository's files or a user's, checked row by row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from planner.job import Job
from planner.pins import parse_pins
from tests.planner.replay import Row, choice_of, measured_problem, rows, traced_model

METRICS = ("max_allocated", "max_reserved", "unknown")
KNOBS = (
    "loss_path", "recompute", "offload", "sharding", "micro_batch", "grad_accum", "optimizer", "weights", "attention"
)  # fmt: skip
"""What a row has to say; everything else has a default."""
_MEASURES = ("bytes", "max_seq_len", "step_s", "tokens_per_s_per_gpu")


class BadCases(Exception):
    """A file that is no list of cases: one line with the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """Rows by what they are compared with."""

    traced: tuple[Row, ...]
    """Whole models on one card, counted on fake tensors; rows that the library refuses are left out."""
    sharded: tuple[Row, ...]
    """The same for one rank of FSDP2."""
    measured: tuple[Row, ...]


def default_cases() -> Cases:
    """What docs/accuracy.md shows."""
    return _sorted([row for name in ("traced", "traced_fsdp", "traced_fsdp_more", "measured") for row in rows(name)])


def read_cases(paths: Iterable[Path]) -> Cases:
    """Cases of JSON lines files; tests/planner/data/README.md says what a row holds.

    Raises:
        BadCases: a file cannot be read, or a row is not one.
    """
    found: list[Row] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BadCases(f"{path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise BadCases(f"{path}: not UTF-8 text") from None
        rows_before = len(found)
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(_checked(line))
                except BadCases as error:
                    raise BadCases(f"{path}:{number}: {error}") from None
        if len(found) == rows_before:
            raise BadCases(f"{path}: no rows")
    return _sorted(found)


def _sorted(found: list[Row]) -> Cases:
    traced = [row for row in found if "measured" not in row and not row.get("refused")]
    return Cases(
        traced=tuple(row for row in traced if row["job"]["pins"]["sharding"] == "none"),
        sharded=tuple(row for row in traced if row["job"]["pins"]["sharding"] != "none"),
        measured=tuple(row for row in found if "measured" in row),
    )


def _checked(line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadCases(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadCases("not a JSON object")
    found = cast("Row", row)
    if not isinstance(found.get("id"), str) or not found["id"]:
        raise BadCases("id is missing or no text")
    job = found.get("job")
    if not isinstance(job, dict) or not isinstance(job.get("pins"), dict):
        raise BadCases("job with its pins is missing")
    _check_what_was_seen(found)
    try:
        stated = {key: value for key, value in job.items() if key not in ("pins", "stack")}
        parsed = Job.model_validate({"model": found["id"]} | stated if "config" in found else stated)
        job["pins"] = parse_pins(job["pins"])
    except ValidationError as error:
        first = error.errors()[0]
        raise BadCases(f"job {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise BadCases(f"pin {error}") from None
    missing = [knob for knob in KNOBS if knob not in job["pins"]]
    if missing:
        raise BadCases(f"pins lack {', '.join(missing)}")
    stack = job.get("stack", {})
    if not isinstance(stack, dict) or not all(isinstance(version, str) for version in stack.values()):
        raise BadCases('job stack is no object of versions such as {"trl": "1.16.0"}')
    count, _, card = parsed.machine.partition("x")
    if not count.isdecimal() or not card:
        raise BadCases(f"job machine {parsed.machine!r} is no NxCARD such as 8xH100-80GB")
    if parsed.trainer != "sft" and "measured" not in found:
        raise BadCases("traces are of sft alone")
    _try(found, int(count) * parsed.nodes)
    return found


def _check_what_was_seen(row: Row) -> None:
    measured = row.get("measured")
    if measured is None:
        if not isinstance(row.get("config"), dict):
            raise BadCases("neither measured nor the config of a trace")
        if not row.get("refused") and not _positive(row.get("allocated_bytes")):
            raise BadCases("allocated_bytes is missing or no positive number")
        return
    if not isinstance(measured, dict):
        raise BadCases("measured is no object")
    for key in _MEASURES:
        if key in measured and not _positive(measured[key]):
            raise BadCases(f"measured {key} is no positive number")
    if "bytes" in measured and measured.get("metric") not in METRICS:
        raise BadCases(f"measured metric is none of {', '.join(METRICS)}")
    if measured.get("oom") is not True and not any(key in measured for key in _MEASURES):
        raise BadCases(f"measured holds none of oom, {', '.join(_MEASURES)}")
    if not isinstance(row.get("config", {}), dict) or not isinstance(row.get("padded", False), bool):
        raise BadCases("config is no object, or padded neither true nor false")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _try(row: Row, gpus: int) -> None:
    """Whether the planner takes the row."""
    try:
        choice = choice_of(row)
        if choice.num_gpus != gpus:
            raise BadCases(f"sizes multiply to {choice.num_gpus} GPUs; the machine has {gpus}")
        model = measured_problem(row).judge.memory if "measured" in row else traced_model(row)
        model.estimate(choice)
    except (ValueError, LookupError, AssertionError) as error:
        raise BadCases(" ".join(str(error).split()) or repr(error)) from None
