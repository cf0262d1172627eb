"""What a follower of a run is told: log lines, metric rows, and changes of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.running.runs import RunState


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
    """The run's stage, attempt or note changed; the first and the last event."""

    state: RunState


Event = LogLine | MetricRow | BadRow | StateChange
