"""What workers tell the app: frozen values, posted from threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from launcher.ending.history import HistoryRow
    from launcher.nvml.gpus import CardSample
    from launcher.nvml.reading import CardsReading
    from launcher.writing.data import DataReport
    from planner.planning import PlanOutcome
    from tui.probe_view import ProbeView
    from tui.run_view import RunView


@dataclass
class CardsRead(Message):
    """The cards of this machine are known."""

    reading: CardsReading


@dataclass
class CardsSampled(Message):
    """The cards were read again."""

    samples: Sequence[CardSample]


@dataclass
class PlanMade(Message):
    """The plan of the current job."""

    outcome: PlanOutcome
    asked: int
    """Which question it answers."""


@dataclass
class Warned(Message):
    """Something that does not keep the work from being done."""

    line: str


@dataclass
class ProblemMet(Message):
    """There is no plan, for a reason of one line."""

    line: str
    asked: int = 0


@dataclass
class DataRead(Message):
    """The first rows of the data were looked at."""

    report: DataReport | None
    problem: str = ""


@dataclass
class RunsRead(Message):
    """The history of runs."""

    rows: Sequence[HistoryRow]
    notes: Sequence[str] = ()


@dataclass
class RunStarted(Message):
    """A run was written and started."""

    folder: Path


@dataclass
class LaunchNarrated(Message):
    """What the writing and starting of a run say while they go on."""

    line: str


@dataclass
class RunWritten(Message):
    """A run was written, and not started."""

    folder: Path


@dataclass
class LaunchRefused(Message):
    """A run could not be written or started, for a reason of one line."""

    line: str


@dataclass
class RunLost(Message):
    """A run that was watched cannot be any more: its folder is gone."""

    view: RunView
    line: str


@dataclass
class LayersTraced(Message):
    """Planning traces the model's layers, and is so far with it."""

    done: int
    of: int
    seconds: float
    asked: int


@dataclass
class ProbeStepped(Message):
    """A probe is at another step."""

    view: ProbeView
    done: int
    of: int
    what: str = ""


@dataclass
class ProbeSaid(Message):
    """A probe wrote something: narration, or its result."""

    view: ProbeView
    text: str


@dataclass
class ProbeEnded(Message):
    """A probe is over; the problem is empty where it went well."""

    view: ProbeView
    problem: str = ""
