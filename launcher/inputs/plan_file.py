"""plan.json: what `trlfit plan --json` printed, read back, whole or as far as an old plan is held against today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.errors import UsageError
from launcher.inputs.small_file import read_text
from launcher.inputs.validation_text import shown
from planner.advice.old_plan import OldPlan
from planner.choice import Choice
from planner.job import Job
from planner.machine import MAX_BYTES, Machine
from planner.plan import Knobs, Plan
from planner.planning import PLAN_SCHEMA
from planner.stack import Stack

MAX_PLAN_BYTES = 64 * 2**20


class _Part(BaseModel):
    """Part of a plan: what else a version of the document holds there is not looked at."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Sizes(_Part):
    device_bytes: int = Field(ge=0, le=MAX_BYTES)
    allocated_bytes: int = Field(ge=0, le=MAX_BYTES)


class _Pace(_Part):
    step_s: float = Field(gt=0)


class _Chosen(_Part):
    choice: Knobs
    memory: _Sizes
    time: _Pace | None


class _OldDocument(_Part):
    job: dict[str, Any]
    machine: Machine
    stack: Stack
    best: _Chosen


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UsageError: missing, too large, no JSON, or JSON of another kind.
    """
    try:
        data: Any = json.loads(read_text(path, "plan", MAX_PLAN_BYTES))
    except (ValueError, RecursionError):
        raise UsageError(f"plan {shown(path)} is not valid JSON") from None
    if not isinstance(data, dict):
        raise UsageError(f"plan {shown(path)} is no plan; make one with `trlfit plan --json`")
    return data  # pyright: ignore[reportUnknownVariableType]


def plan_of(document: dict[str, Any], path: Path) -> Plan:
    """The whole plan.

    Raises:
        UsageError: a field is missing, unknown or impossible.
    """
    try:
        return Plan.model_validate(document)
    except ValidationError as error:
        raise UsageError(_line(error, path)) from None


def read_old_plan(path: Path) -> OldPlan:
    """What a plan.json of this or an earlier version says of its best candidate.

    Raises:
        UsageError: not a plan, one that chose nothing, or one with a field that is missing or impossible.
    """
    document = read_document(path)
    if document.get("schema") != PLAN_SCHEMA:
        raise UsageError(f"plan {shown(path)} is no plan; make one with `trlfit plan --json`")
    if document.get("best") is None:
        raise UsageError(f"plan {shown(path)} chose nothing: there is nothing to hold against this machine")
    try:
        old = _OldDocument.model_validate(document)
    except ValidationError as error:
        raise UsageError(_line(error, path)) from None
    best = old.best
    return OldPlan(
        job={name: value for name, value in old.job.items() if name in Job.model_fields},
        machine=old.machine.model_dump(mode="json", by_alias=True),
        versions=old.stack.versions,
        choice=Choice.from_json(best.choice.model_dump(mode="json")),
        device_bytes=best.memory.device_bytes,
        allocated_bytes=best.memory.allocated_bytes,
        step_s=best.time.step_s if best.time else None,
    )


def _line(error: ValidationError, path: Path) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part)[:40] for part in first["loc"][:8])
    problem = first["msg"].removeprefix("Value error, ")
    return f"plan {shown(path)}: {where}: {problem[:1].lower()}{problem[1:160]}; make it with `trlfit plan --json`"
