"""What is known of a probe that runs or ran: a trace of the model's layers, or a measurement. No widget here.

It is shown where runs are: the run's screen asks both views the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from planner.units import format_seconds

if TYPE_CHECKING:
    from tui.run_view import RankMemory

LINES = 2000


class ProbeKind(NamedTuple):
    """One thing that may be probed: how it is asked for, what it does and takes."""

    word: str
    flags: tuple[str, ...]
    says: str
    fields: frozenset[str] | None = None
    """Of the job that its command takes; None is all of them."""


KINDS = (
    ProbeKind("trace", (), "count what each layer saves and needs, on the real classes and no data: seconds, no GPU"),
    ProbeKind(
        "rates",
        ("--rates",),
        "measure what this machine reaches: products, memory, links; about 20 s",
        frozenset({"machine"}),
    ),
    ProbeKind("job", ("--measure",), "a few steps of the job here with random weights, at small depth; minutes"),
    ProbeKind("whole", ("--whole",), "three steps of the best plan itself, on all of its ranks; minutes"),
)


@dataclass(eq=False)
class ProbeView:
    """One probe, as it tells of itself."""

    name: str
    is_aside: bool = False
    """It runs as a part of planning; a run that is watched stays in front of it."""
    started: float = field(default_factory=time.monotonic)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    num_lines: int = 0
    fraction: float | None = None
    line: str = ""
    problem: str = ""
    end_it: Callable[[], None] | None = None
    """Ends the command that it is; a trace is a helper of ours."""
    took_s: float | None = None
    """Once it is over."""
    ranks: Sequence[RankMemory] = ()
    """Of runs only."""

    @property
    def is_live(self) -> bool:
        """It goes on."""
        return self.took_s is None

    @property
    def waiting(self) -> str:
        """Before its first step."""
        return "starting"

    def title(self) -> str:
        """What it is and how it stands."""
        if self.took_s is None:
            return f"Probe: {self.name}, running for {format_seconds(time.monotonic() - self.started)}"
        return f"Probe: {self.name}, {'no result' if self.problem else 'done'} after {format_seconds(self.took_s)}"

    def step(self, done: int, of: int, what: str) -> None:
        """``done`` of ``of`` steps are behind it."""
        self.fraction = done / of if of else None
        self.line = f"{done} of {of}{': ' + what if what else ''}"

    def say(self, text: str) -> None:
        """Take in what it wrote."""
        for line in text.splitlines():
            self.lines.append(line.removeprefix("trlfit: "))
            self.num_lines += 1

    def end(self, problem: str) -> None:
        """It is over; ``problem`` is empty where it went well."""
        self.took_s, self.problem = time.monotonic() - self.started, problem
        self.fraction = self.fraction if problem else 1.0
        self.line = problem or "the plans count with it"
