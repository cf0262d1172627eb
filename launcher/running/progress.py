"""A run's figures while it goes on, each against its prediction: as values, as a line of text, and as a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.ending.run_metrics import (
    Predicted,
    as_integer,
    as_mapping,
    as_number,
    parse_row,
    per_rank,
    resident_base,
    resident_growth,
)
from launcher.running.early_verdict import BatchMemory, EarlyVerdict, Seen, early_verdict
from launcher.running.run_events import Event, LogLine, MetricRow, StateChange
from launcher.running.run_record import DATA, METRICS, PLAN, read_json
from planner.units import format_bytes, format_rate, format_seconds

UNEVEN = 0.98
"""Ranks whose peaks differ by more are named: with even shards and lengths they do not."""
_BAR = re.compile(r"^\s*\d+%\|.*\| (\d+)/(\d+) \[")
"""transformers' own bar, which alone has no words before it: ``17%|███  | 138/814 [``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Peaks of one rank so far, in bytes; None where it does not report them."""

    rank: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    """All that is in use on its card, by whomever."""
    resident_bytes: int | None
    """On a CPU: growth of resident memory since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """How a run stands; what has not been reported is None."""

    step: int | None
    max_steps: int | None
    fraction: float | None
    loss: float | None
    step_s: float | None
    tokens_per_s: float | None
    left_s: float | None
    batch_tokens: int | None
    """The largest micro-batch so far, padding included."""
    ranks: tuple[RankFigures, ...]
    predicted: Predicted
    verdict: EarlyVerdict | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "ranks": [asdict(rank) for rank in self.ranks]}


class Progress:
    """Fed with a run's events; one line of text per step row, and everything as values at any time."""

    def __init__(self, folder: Path) -> None:
        """Read what was predicted, and how long it goes, from the folder's plan.

        Args:
            folder: The run folder.
        """
        self._folder = folder
        self._attempt: str | None = None
        self._read()

    def _read(self) -> None:
        plan = as_mapping(read_json(self._folder / PLAN))
        settings = as_mapping(as_mapping(plan.get("job")).get("trl"))
        self._batch = BatchMemory(plan)
        self._data = read_json(self._folder / DATA)
        self._predicted = self._batch.predicted
        self._epochs = as_number(settings.get("num_train_epochs"))
        steps = as_integer(settings.get("max_steps"))
        self._max_steps = steps if steps and steps > 0 else None
        self._begin({})

    def _begin(self, start: Mapping[str, Any]) -> None:
        self._base = resident_base(start)
        self._max_steps = as_integer(start.get("max_steps")) or self._max_steps
        self._last: Mapping[str, Any] = {}
        self._rows = 0
        self._peaks: dict[str, dict[int, int]] = {}

    def feed(self, event: Event) -> str | None:
        """The line to show for an event, or None."""
        if isinstance(event, StateChange):
            record = event.state.record
            if record is not None and self._attempt not in (None, record.id):
                self._read()  # another attempt, by another plan
            self._attempt = record.id if record is not None else self._attempt
        elif isinstance(event, LogLine):
            if bar := _BAR.match(event.text):
                self._max_steps = int(bar.group(2))
        elif isinstance(event, MetricRow):
            return self._row(event.row)
        return None

    def _row(self, row: Mapping[str, Any]) -> str | None:
        if row.get("event") == "start":
            self._begin(row)
        if row.get("event") in ("step", "end"):
            for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "batch_tokens"):
                self._note(name, per_rank(row, name))
            self._note("resident", resident_growth(row, self._base))
        if row.get("event") != "step":
            return None
        self._last = row
        self._rows += 1
        return self._line(row)

    def _note(self, name: str, values: list[int | None]) -> None:
        highest = self._peaks.setdefault(name, {})
        for rank, value in enumerate(values):
            if value is not None:
                highest[rank] = max(value, highest.get(rank, 0))

    def _highest(self, name: str) -> int | None:
        return max(self._peaks.get(name, {}).values(), default=None)

    @property
    def fraction(self) -> float | None:
        """How much of the training is behind it, 0 to 1, or None when its length is not known."""
        step = as_number(self._last.get("step"))
        if step is not None and self._max_steps:
            return min(1.0, step / self._max_steps)
        epoch = as_number(self._last.get("epoch"))
        return min(1.0, epoch / self._epochs) if epoch is not None and self._epochs else None

    @property
    def left_s(self) -> float | None:
        """Seconds of training to go at the speed of the last row."""
        step, step_s = as_number(self._last.get("step")), as_number(self._last.get("step_s"))
        fraction = self.fraction
        if step is None or step_s is None or not fraction:
            return None
        return step * (1 / fraction - 1) * step_s

    @property
    def verdict(self) -> EarlyVerdict | None:
        """Whether the run will hold; None before there is enough to say."""
        allocated = self._highest("peak_allocated_bytes")
        seen = Seen(
            rows=self._rows,
            epoch=as_number(self._last.get("epoch")),
            peak_bytes=allocated or self._highest("resident") or 0,
            resident=not allocated,
            reserved_bytes=self._highest("peak_reserved_bytes"),
            device_bytes=self._highest("device_used_bytes"),
            batch_tokens=self._highest("batch_tokens"),
        )
        return early_verdict(self._batch, self._data, seen)

    @property
    def live(self) -> Live:
        """Everything that is known now."""
        row = self._last
        tokens, step_s = as_number(row.get("tokens")), as_number(row.get("step_s"))
        of = self._peaks
        ranks = sorted({rank for name, peaks in of.items() if name != "batch_tokens" for rank in peaks})
        return Live(
            step=as_integer(row.get("step")),
            max_steps=self._max_steps,
            fraction=self.fraction,
            loss=as_number(row.get("loss")),
            step_s=step_s,
            tokens_per_s=tokens / step_s if tokens is not None and step_s else None,
            left_s=self.left_s,
            batch_tokens=self._highest("batch_tokens"),
            ranks=tuple(
                RankFigures(
                    rank=rank,
                    allocated_bytes=of.get("peak_allocated_bytes", {}).get(rank),
                    reserved_bytes=of.get("peak_reserved_bytes", {}).get(rank),
                    device_bytes=of.get("device_used_bytes", {}).get(rank),
                    resident_bytes=of.get("resident", {}).get(rank),
                )
                for rank in ranks
            ),
            predicted=self._predicted,
            verdict=self.verdict,
        )

    def _line(self, row: Mapping[str, Any]) -> str:
        step = as_integer(row.get("step"))
        total = f"/{self._max_steps}" if self._max_steps else ""
        parts = [f"step {'?' if step is None else step}{total}"]
        if "loss" in row:
            loss = as_number(row["loss"])
            parts.append("loss not a number" if loss is None else f"loss {loss:.4f}")
        step_s = as_number(row.get("step_s"))
        if step_s is not None:
            expected = self._predicted.step_s
            predicted_s = f" (predicted {format_seconds(expected)})" if expected else ""
            parts.append(f"{format_seconds(step_s)}/step{predicted_s}")
        tokens = as_number(row.get("tokens"))
        if tokens is not None and step_s:
            parts.append(f"{format_rate(tokens / step_s)} tokens/s")
        predicted = self._predicted
        if allocated := [v for v in per_rank(row, "peak_allocated_bytes") if v]:
            parts.append(_against("peak", max(allocated), predicted.allocated_bytes, allocated))
            for name, field, expected_bytes in (
                ("reserved", "peak_reserved_bytes", predicted.reserved_bytes),
                ("card", "device_used_bytes", predicted.device_bytes),
            ):
                if values := [v for v in per_rank(row, field) if v]:
                    parts.append(_against(name, max(values), expected_bytes))
        elif resident := max((v for v in resident_growth(row, self._base) if v is not None), default=0):
            parts.append(_against("peak", resident, predicted.allocated_bytes))
        if self.left_s:
            parts.append(f"{format_seconds(self.left_s)} left")
        return "  ".join(parts)


def live(folder: Path) -> Live:
    """How the run of a folder stands, read from its files.

    Args:
        folder: A run folder, running, over, or copied from another machine.
    """
    progress = Progress(folder)
    try:
        with (folder / METRICS).open("rb") as file:
            for line in file:
                if (row := parse_row(line)) is not None:
                    progress.feed(MetricRow(row=row))
    except OSError:
        pass
    return progress.live


def _against(name: str, value: int, expected: int | None, ranks: Sequence[int] = ()) -> str:
    words = [f"predicted {format_bytes(expected)}"] if expected else []
    if ranks and min(ranks) < UNEVEN * value:
        words.append(f"{format_bytes(min(ranks))} on rank {list(ranks).index(min(ranks))}")
    return f"{name} {format_bytes(value)}" + (f" ({', '.join(words)})" if words else "")
