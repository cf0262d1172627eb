"""Following a run from its folder: log lines, metric rows and state as events, progress as text."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.outcomes import Outcome
from launcher.run_metrics import (
    Predicted,
    as_integer,
    as_mapping,
    as_number,
    parse_row,
    per_rank,
)
from launcher.run_record import LOG, METRICS, PLAN, read_json
from launcher.runs import RunState, run_state
from planner.units import format_bytes, format_seconds

POLL_S = 0.2
STATE_S = 0.5
"""Asking whether a process lives costs more than looking at two file sizes."""
CHUNK_BYTES = 1 << 20
BACKLOG_BYTES = 64 << 10
"""Of an old log, the end is enough; metrics are always read from their first row."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BAR = re.compile(r"^\s*\d+%\|.*\| (\d+)/(\d+) \[")
"""transformers' own bar, which alone has no words before it: ``17%|███  | 138/814 [``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of log.txt."""

    text: str
    redrawn: bool = False
    """Ended by a carriage return: a progress bar that draws over itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """A row of metrics.jsonl."""

    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A line of metrics.jsonl that is no JSON object."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """The run's stage changed; the first and the last event."""

    state: RunState


Event = LogLine | MetricRow | BadRow | StateChange


class Tail:
    """Whole lines of a growing file, however they arrive, also when it is cut or replaced."""

    def __init__(self, path: Path, backlog_bytes: int | None = None) -> None:
        """Nothing is opened yet; the file may not exist.

        Args:
            path: The file.
            backlog_bytes: Start this far before its present end, at a line; None for its beginning.
        """
        self._path = path
        self._backlog_bytes = backlog_bytes
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def lines(self, *, flush: bool = False) -> Iterator[tuple[str, bool]]:
        """New lines, each with whether a carriage return ended it.

        Args:
            flush: Also give a last line that has no end: nothing more will be written.
        """
        for data in self._chunks():
            start = 0
            self._rest += data
            # A carriage return at the very end may be half of a line end.
            for match in _LINE_END.finditer(self._rest):
                if match.group() == b"\r" and match.end() == len(self._rest) and not flush:
                    break
                yield self._text(self._rest[start : match.start()]), match.group() == b"\r"
                start = match.end()
            self._rest = self._rest[start:]
        if flush and self._rest:
            yield self._text(self._rest.rstrip(b"\r")), self._rest.endswith(b"\r")
            self._rest = b""

    def _chunks(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._place(status.st_ino, status.st_size)
                file.seek(self._offset)
                while data := file.read(CHUNK_BYTES):
                    self._offset += len(data)
                    yield data
        except OSError:  # not there yet, or out of reach for a moment
            return

    def _place(self, inode: int, size: int) -> None:
        if self._inode is None and self._backlog_bytes is not None and size > self._backlog_bytes:
            self._offset = size - self._backlog_bytes
            with self._path.open("rb") as file:
                file.seek(self._offset)
                self._offset += len(file.readline())
        elif self._inode not in (None, inode) or size < self._offset:
            self._offset, self._rest = 0, b""
        self._inode = inode

    @staticmethod
    def _text(line: bytes) -> str:
        return line.decode(errors="replace")


def follow(folder: Path, *, poll_s: float = POLL_S, backlog_bytes: int | None = BACKLOG_BYTES) -> Iterator[Event]:
    """Events of a run until it is over; of one that is over, what it left.

    Closing the iterator, or an interrupt inside it, leaves the run alone.

    Args:
        folder: A run folder. One that was not started gives its state and ends.
        poll_s: Seconds between looks at the files.
        backlog_bytes: How much of a log that exists already to give; None for all.

    Raises:
        UsageError: not a run folder.
    """
    state = run_state(folder)
    yield StateChange(state=state)
    log = Tail(state.folder / LOG, backlog_bytes)
    metrics = Tail(state.folder / METRICS)
    asked_at = time.monotonic()
    while state.stage == "running":
        yield from _news(log, metrics)
        time.sleep(poll_s)
        if time.monotonic() - asked_at >= STATE_S:
            before, state = state, run_state(folder)
            asked_at = time.monotonic()
            if state.stage == "running" and state.note != before.note:
                yield StateChange(state=state)
    ended = state.is_over
    yield from _news(log, metrics, flush=ended)
    if ended:
        yield StateChange(state=state)


def _news(log: Tail, metrics: Tail, *, flush: bool = False) -> Iterator[Event]:
    for text, redrawn in log.lines(flush=flush):
        if text or not redrawn:
            yield LogLine(text=text, redrawn=redrawn)
    for text, _ in metrics.lines(flush=flush):
        row = parse_row(text)
        if row is not None:
            yield MetricRow(row=row)
        elif text.strip():
            yield BadRow(text=text)


class Progress:
    """One line of text per step row: step, loss, speed, peak, time left, each with its prediction."""

    def __init__(self, folder: Path) -> None:
        """Read what was predicted, and how long it goes, from the folder's plan.

        Args:
            folder: The run folder.
        """
        plan = as_mapping(read_json(folder / PLAN))
        settings = as_mapping(as_mapping(plan.get("job")).get("trl"))
        self._predicted = Predicted.from_plan(plan)
        self._epochs = as_number(settings.get("num_train_epochs"))
        steps = as_integer(settings.get("max_steps"))
        self._max_steps = steps if steps and steps > 0 else None
        self._base_rss: list[int | None] = []
        self._last: Mapping[str, Any] = {}

    def feed(self, event: Event) -> str | None:
        """The line to show for an event, or None."""
        if isinstance(event, LogLine):
            if bar := _BAR.match(event.text):
                self._max_steps = int(bar.group(2))
        elif isinstance(event, MetricRow):
            row = event.row
            if row.get("event") == "start":
                self._base_rss = per_rank(row, "rss_bytes" if "rss_bytes" in row else "peak_rss_bytes")
                self._max_steps = as_integer(row.get("max_steps")) or self._max_steps
            elif row.get("event") == "step":
                self._last = row
                return self._line(row)
        return None

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
            parts.append(f"{step_s:.2f} s/step" + (f" (predicted {expected:.2f})" if expected else ""))
        tokens = as_number(row.get("tokens"))
        if tokens is not None and step_s:
            parts.append(f"{tokens / step_s:,.0f} tokens/s")
        if peak := self._peak(row):
            expected_bytes = self._predicted.allocated_bytes
            text = f"peak {format_bytes(peak)}"
            text += f" (predicted {format_bytes(expected_bytes)})" if expected_bytes else ""
            parts.append(text)
        if self.left_s is not None:
            parts.append(f"{format_seconds(self.left_s)} left")
        return "  ".join(parts)

    def _peak(self, row: Mapping[str, Any]) -> int | None:
        allocated = [v for v in per_rank(row, "peak_allocated_bytes") if v]
        if allocated:
            return max(allocated)
        now = per_rank(row, "peak_rss_bytes")
        pairs = zip(now, self._base_rss, strict=False)
        return max((a - b for a, b in pairs if a is not None and b is not None), default=None)


def narrate(
    folder: Path,
    write: Callable[[str], object],
    *,
    log: bool = False,
    every_s: float = 5.0,
    poll_s: float = POLL_S,
) -> RunState | None:
    """Tell a run's progress in lines until it is over.

    Args:
        folder: A run folder.
        write: Takes each line, without its end.
        log: Also every line of log.txt that is not drawn over.
        every_s: Least seconds between two progress lines; the first and the last are always told.
        poll_s: Seconds between looks at the files.

    Returns:
        The last state, or None when Ctrl-C ended the telling: the run goes on.
    """
    progress = Progress(folder)
    state: RunState | None = None
    told_at: float | None = None
    waiting: str | None = None
    try:
        for event in follow(folder, poll_s=poll_s):
            if isinstance(event, StateChange):
                state = event.state
            elif log and isinstance(event, LogLine) and not event.redrawn:
                write(event.text)
            line = progress.feed(event)
            now = time.monotonic()
            if line is not None and (told_at is None or now - told_at >= every_s):
                write(line)
                told_at, waiting = now, None
            elif line is not None:
                waiting = line
    except KeyboardInterrupt:
        return None
    if waiting is not None:
        write(waiting)
    return state


def closing_lines(outcome: Outcome, folder: Path, num_log_lines: int = 15) -> list[str]:
    """What to say at the end: the sentence, and after a failure where to look."""
    lines = [outcome.sentence]
    if outcome.kind not in ("done", "stopped"):
        texts = [text for text, _ in Tail(folder / LOG, BACKLOG_BYTES).lines(flush=True)]
        lines += [f"  {text}" for text in texts if text.strip()][-num_log_lines:]
        lines.append(f"the whole log: {folder / LOG}")
    return lines
