"""What is known of a run that is watched: fed with its events, asked by the screen. No widget here."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from launcher.ending.run_metrics import Predicted, as_integer, as_mapping, as_number, per_rank
from launcher.running.follow import Event, LogLine, MetricRow, Progress, StateChange
from launcher.running.run_record import PLAN, read_json
from launcher.running.runs import RunState
from planner.units import format_seconds

LOG_LINES = 5000
CHART_POINTS = 512


class RankMemory(NamedTuple):
    """Bytes of one rank: at the last step, and the highest so far."""

    rank: int
    now_bytes: int
    peak_bytes: int


class RunView:
    """One run, as its folder tells it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        plan = as_mapping(read_json(folder / PLAN))
        self.predicted = Predicted.from_plan(plan)
        memory = as_mapping(as_mapping(plan.get("best")).get("memory"))
        self.capacity_bytes = as_integer(memory.get("capacity_bytes"))
        self.model = str(as_mapping(plan.get("job")).get("model", ""))
        self.state: RunState | None = None
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self.num_lines = 0
        self.series: deque[int] = deque(maxlen=CHART_POINTS)
        """The fullest rank's bytes, step by step."""
        self.last: Mapping[str, Any] = {}
        self._line = ""
        self.lost = ""
        """Why it cannot be watched any more."""
        self._progress = Progress(folder)
        self._base: list[int | None] = []
        self._peaks: dict[int, int] = {}
        self._now: dict[int, int] = {}
        self._resident = False
        """The sizes are of resident memory, for want of a card."""

    def feed(self, event: Event) -> None:
        """Take one event in."""
        line = self._progress.feed(event)
        if line is not None:
            # Peaks stand above, in the unit of the bars.
            self._line = "  ".join(part for part in line.split("  ") if not part.startswith("peak "))
        if isinstance(event, StateChange):
            self.state = event.state
        elif isinstance(event, LogLine):
            if not event.redrawn:
                self.lines.append(event.text)
                self.num_lines += 1
        elif isinstance(event, MetricRow):
            self._row(event.row)

    def _row(self, row: Mapping[str, Any]) -> None:
        if row.get("event") == "start":
            self._base = per_rank(row, "rss_bytes" if "rss_bytes" in row else "peak_rss_bytes")
            return
        if row.get("event") != "step":
            return
        self.last = row
        sizes = per_rank(row, "peak_allocated_bytes")
        self._resident = not any(sizes)
        if self._resident:
            pairs = zip(per_rank(row, "peak_rss_bytes"), self._base, strict=False)
            sizes = [None if a is None or b is None else a - b for a, b in pairs]
        for rank, size in enumerate(sizes):
            if size:
                self._now[rank] = size
                self._peaks[rank] = max(size, self._peaks.get(rank, 0))
        if self._now:
            self.series.append(max(self._now.values()))

    @property
    def line(self) -> str:
        """The last step in words; of a run that is over, without the time that was left."""
        parts = self._line.split("  ")
        return "  ".join(part for part in parts if not (self.is_over and part.endswith(" left")))

    @property
    def ranks(self) -> list[RankMemory]:
        """Memory by rank, of those that have reported."""
        return [RankMemory(rank, self._now[rank], self._peaks[rank]) for rank in sorted(self._now)]

    @property
    def fraction(self) -> float | None:
        """Of the training, 0 to 1."""
        return self._progress.fraction

    @property
    def step(self) -> int | None:
        """The last step that reported."""
        return as_integer(self.last.get("step"))

    @property
    def loss(self) -> float | None:
        """Of the last step."""
        return as_number(self.last.get("loss"))

    @property
    def verdict(self) -> str:
        """Whether the memory will hold while the run goes on, and whether it was as predicted."""
        early = self._progress.verdict
        if early is not None and not self.is_over:
            return early.sentence
        expected = self.predicted
        if not self._peaks or expected.allocated_bytes is None:
            return ""
        peak = max(self._peaks.values())
        if self._resident:
            return "resident memory: on a CPU it grows by libraries and kernels' buffers too"
        if expected.high_bytes is not None and peak > expected.high_bytes:
            return "above the prediction"
        if expected.low_bytes is not None and peak < expected.low_bytes:
            return "below the prediction so far"
        return "as predicted"

    @property
    def is_live(self) -> bool:
        """The training goes on."""
        return self.state is not None and self.state.stage == "running" and not self.lost

    @property
    def is_over(self) -> bool:
        """It has an outcome."""
        return self.state is not None and self.state.is_over

    @property
    def waiting(self) -> str:
        """Before its first step."""
        return "no step yet: the model is being loaded" if self.is_live else "no step was made"

    def title(self) -> str:
        """The run's name and how it stands."""
        name = self.folder.name
        if self.lost:
            return f"{name}: {self.lost}"
        if self.state is None:
            return f"{name}: reading ..."
        if self.state.outcome is not None:
            return f"{name}: {self.state.outcome.sentence}"
        note = f" ({self.state.note})" if self.state.note else ""
        record = self.state.record
        attempt = f", attempt {record.attempt}" if record is not None and record.attempt > 1 else ""
        return f"{name}: {self.state.stage}{attempt}{self._so_long()}{note}"

    def _so_long(self) -> str:
        """`` for 21 min 44 s``, of a run that goes on."""
        record = None if self.state is None else self.state.record
        if record is None or not self.is_live:
            return ""
        try:
            started = datetime.fromisoformat(record.started_at)
        except ValueError:
            return ""
        return f" for {format_seconds(max(0.0, (datetime.now(started.tzinfo) - started).total_seconds()))}"


def chart(series: list[int], *, predicted: int | None, width: int, height: int, unicode: bool = True) -> list[str]:
    """A column a step, the newest at the right, and the prediction as a line across.

    Returns:
        ``height`` lines of ``width`` cells.
    """
    shown = series[-width:]
    top = max([*shown, predicted or 0, 1])
    blocks = " ▁▂▃▄▅▆▇█" if unicode else " .:#"
    levels = len(blocks) - 1
    mark = None if not predicted else min(height - 1, round(predicted / top * height - 0.5))
    lines: list[str] = []
    for row in reversed(range(height)):
        cells: list[str] = []
        for value in shown:
            filled = value / top * height - row
            cells.append(blocks[max(0, min(levels, round(filled * levels)))])
        cells = [" "] * (width - len(cells)) + cells
        if row == mark:
            cells = [("─" if unicode else "-") if cell == " " else cell for cell in cells]
        lines.append("".join(cells))
    return lines
