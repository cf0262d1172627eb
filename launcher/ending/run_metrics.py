"""The two sides of "predicted and seen": numbers of plan.json and a summary of metrics.jsonl."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan said, from plan.json's ``best``."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    peak_phase: str | None = None
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any] | None) -> Predicted:
        """Take the numbers out of a plan; what is missing or of another kind stays None."""
        best = as_mapping((plan or {}).get("best"))
        memory, time = as_mapping(best.get("memory")), as_mapping(best.get("time"))
        phase = memory.get("peak_phase")
        return cls(
            allocated_bytes=as_integer(memory.get("allocated_bytes")),
            reserved_bytes=as_integer(memory.get("reserved_bytes")),
            device_bytes=as_integer(memory.get("device_bytes")),
            low_bytes=as_integer(memory.get("low_bytes")),
            high_bytes=as_integer(memory.get("high_bytes")),
            peak_phase=phase if isinstance(phase, str) else None,
            step_s=as_number(time.get("step_s")),
            low_s=as_number(time.get("low_s")),
            high_s=as_number(time.get("high_s")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What metrics.jsonl says, over the rows since its last start row."""

    started: bool = False
    ended: bool = False
    """The end row is there: the training function returned."""
    rows: int = 0
    """Step rows; fewer than steps when the trainer logs only every so often."""
    last_step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    """Of the last row that has a finite one."""
    first_bad_step: int | None = None
    """First row whose loss is nan or infinite, which train.py writes as null."""
    step_s: float | None = None
    """Median over the rows after the first, which also warms up."""
    tokens_per_s: float | None = None
    allocated_bytes: int | None = None
    """Peak over ranks and steps; None where no card reported one."""
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    """All that is in use on the fullest card, by whomever."""
    rss_growth_bytes: int | None = None
    """Largest growth of a rank's resident memory over its start row: what compares on CPU."""
    bad_lines: int = 0
    """Lines that are no JSON objects."""

    @property
    def memory_bytes(self) -> int | None:
        """The peak to compare with the plan's ``allocated_bytes``."""
        return self.allocated_bytes or self.rss_growth_bytes

    @property
    def memory_basis(self) -> Literal["allocated", "rss_growth"] | None:
        """Where ``memory_bytes`` comes from."""
        if self.allocated_bytes:
            return "allocated"
        return "rss_growth" if self.rss_growth_bytes else None

    def to_json(self) -> dict[str, Any]:
        """The fields, and the number that was compared with the plan."""
        basis = {"memory_bytes": self.memory_bytes, "memory_basis": self.memory_basis}
        return {**asdict(self), **basis}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metrics:
        """The inverse of ``to_json``."""
        return cls(**{key: data[key] for key in cls.__slots__ if key in data})


def read_metrics(path: Path) -> Metrics:
    """Summarise a metrics.jsonl; lines that are not JSON objects are counted and skipped."""
    rows: list[Mapping[str, Any]] = []
    bad = 0
    try:
        with path.open("rb") as file:
            for line in file:
                row = parse_row(line)
                if row is not None:
                    rows.append(row)
                elif line.strip():
                    bad += 1
    except OSError:
        pass
    return replace(summarise(rows), bad_lines=bad)


def parse_row(line: bytes | str) -> Mapping[str, Any] | None:
    """One line of metrics.jsonl, or None when it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("Mapping[str, Any]", row) if isinstance(row, dict) else None


def summarise(rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """Metrics of the rows since the last start row."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        if row.get("event") == "start":
            kept = []
        kept.append(row)
    start = kept[0] if kept and kept[0].get("event") == "start" else dict[str, Any]()
    ends = [row for row in kept if row.get("event") == "end"]
    steps = [row for row in kept if row.get("event") == "step"]
    losses = [(as_integer(row.get("step")), as_number(row["loss"])) for row in steps if "loss" in row]
    finite = [loss for _, loss in losses if loss is not None]
    times = [s for row in steps[1:] if (s := as_number(row.get("step_s"))) is not None]
    step_s = statistics.median(times) if times else None
    tokens = [t for row in steps[1:] if (t := as_number(row.get("tokens"))) is not None]
    numbers = [n for row in steps + ends if (n := as_integer(row.get("step"))) is not None]
    return Metrics(
        started=bool(start),
        ended=bool(ends),
        rows=len(steps),
        last_step=numbers[-1] if numbers else None,
        max_steps=as_integer(start.get("max_steps")),
        loss=finite[-1] if finite else None,
        first_bad_step=next((number for number, loss in losses if loss is None), None),
        step_s=step_s,
        tokens_per_s=statistics.median(tokens) / step_s if tokens and step_s else None,
        allocated_bytes=_peak(steps + ends, "peak_allocated_bytes"),
        reserved_bytes=_peak(steps + ends, "peak_reserved_bytes"),
        device_bytes=_peak(steps + ends, "device_used_bytes"),
        rss_growth_bytes=_growth(start, steps + ends),
    )


def as_mapping(value: object) -> Mapping[str, Any]:
    """A JSON object, or an empty one for anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def as_number(value: object) -> float | None:
    """A finite JSON number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def as_integer(value: object) -> int | None:
    """A JSON number cut to an integer, or None."""
    number = as_number(value)
    return None if number is None else int(number)


def per_rank(row: Mapping[str, Any], name: str) -> list[int | None]:
    """A field that holds one number per rank, or a single number."""
    value = row.get(name)
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    return [as_integer(item) for item in values]


def resident_base(start: Mapping[str, Any]) -> list[int | None]:
    """Resident memory of each rank at its start row, which growth is counted from."""
    return per_rank(start, "rss_bytes" if "rss_bytes" in start else "peak_rss_bytes")


def resident_growth(row: Mapping[str, Any], base: Sequence[int | None]) -> list[int | None]:
    """By how much each rank's resident memory has grown since its start row."""
    pairs = zip(per_rank(row, "peak_rss_bytes"), base, strict=False)
    return [None if now is None or before is None else now - before for now, before in pairs]


def _peak(steps: Sequence[Mapping[str, Any]], name: str) -> int | None:
    return max((v for row in steps for v in per_rank(row, name) if v), default=None)


def _growth(start: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> int | None:
    grown = [value for row in steps for value in resident_growth(row, resident_base(start))]
    return max((value for value in grown if value is not None and value > 0), default=None)
