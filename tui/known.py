"""What is known while a session goes on: the job, the machine, the plan, the run; and what follows from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import TrlfitError
from tui import asked, cells
from tui.fields import Field, fields_for
from tui.session import Session

if TYPE_CHECKING:
    from launcher.ending.history import HistoryRow
    from launcher.nvml.gpus import CardSample
    from launcher.nvml.reading import CardsReading
    from launcher.writing.data import DataReport
    from planner.machine import Card
    from planner.planning import PlanOutcome
    from planner.search.search import Candidate
    from tui.probe_view import ProbeView
    from tui.run_view import RunView

Json = Mapping[str, Any]


def _has_unicode() -> bool:
    """What the locale says of the terminal; Python's own answer is UTF-8 also where the locale is C."""
    named = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "utf-8")
    return "utf" in named.lower()


@dataclass
class Known:
    """One piece of state for all screens."""

    session: Session
    python: str | None = None
    reading: CardsReading | None = None
    """The cards of this machine, whatever the job is planned for, and those that are left out."""
    samples: dict[int, CardSample] = field(default_factory=dict[int, "CardSample"])
    outcome: PlanOutcome | None = None
    asked: int = 0
    """Number of the last question; answers to older ones are dropped."""
    edition: int = 0
    """Another one with every plan that is made, or that there is none."""
    status: str = "planning ..."
    problem: str = ""
    banner: str = ""
    chosen: int = 0
    """Which of the candidates."""
    report: DataReport | None = None
    data_line: str = ""
    runs: Sequence[HistoryRow] = ()
    run_notes: Sequence[str] = ()
    """What of the history could not be read."""
    run_view: RunView | None = None
    probe: ProbeView | None = None
    """The last one, until a run is opened or it is looked away from."""
    launching: str = ""
    """What the writing of a run says, while it goes on."""
    refused: str = ""
    """Why the last one did not start."""
    unicode: bool = field(default_factory=_has_unicode)

    @property
    def plan(self) -> Json | None:
        """The plan document."""
        return None if self.outcome is None else self.outcome.document

    @property
    def current_plan(self) -> Json | None:
        """The same, unless another model, method or machine is being planned: its facts would be read as theirs."""
        plan = self.plan
        return plan if plan is not None and asked.is_of(plan, self.session) else None

    @property
    def candidates(self) -> list[Json]:
        """What fits, best first, then what does not."""
        return [] if self.plan is None else cells.shown_candidates(self.plan)

    @property
    def candidate(self) -> Json | None:
        """The chosen one."""
        found = self.candidates
        return found[self.chosen] if self.chosen < len(found) else None

    @property
    def taken_bytes(self) -> int:
        """What others hold of the fullest card of the chosen candidate, as it was planned with."""
        if self.plan is None or self.candidate is None:
            return 0
        cards = {card["index"]: card["used_bytes"] for card in self.plan["machine"]["cards"]}
        most = max((cards.get(index, 0) for index in self.candidate["cards"]), default=0)
        return most if most > asked.TAKEN_BYTES else 0

    @property
    def reasons(self) -> list[str]:
        """Why the chosen candidate is as it is."""
        if self.plan is None or self.candidate is None:
            return []
        return cells.reason_lines(self.candidate, self.plan["machine"]["host"])

    @property
    def facts(self) -> list[str]:
        """The chosen candidate in words: its reasons, then its time, its cards and what it needs of the host."""
        candidate, plan = self.candidate, self.plan
        return [] if candidate is None or plan is None else [*self.reasons, *cells.fact_lines(candidate, plan)]

    @property
    def chosen_name(self) -> str:
        """``plan 3``, or ``miss 1``, the closest of those that do not fit."""
        fitting = 0 if self.plan is None else sum(c["fits"] for c in self.plan["candidates"])
        return f"plan {self.chosen + 1}" if self.chosen < fitting else f"miss {self.chosen - fitting + 1}"

    @property
    def method(self) -> str:
        """Of the job, as far as it can be read."""
        try:
            return self.session.job()[0].method
        except TrlfitError:
            return "full"

    @property
    def cards(self) -> list[Card]:
        """Of this machine."""
        return [] if self.reading is None else list(self.reading.cards)

    def subject(self, room: int) -> str:
        """What is planned, for the first line."""
        return asked.subject(self.session, room=room, unicode=self.unicode)

    def checks(self) -> list[str]:
        """What speaks for or against the job."""
        left_out = [card.index for card in self.cards if self.is_hidden(card)]
        return asked.checks(self.current_plan, self.problem, self.status, self.report, self.data_line, left_out)

    def form_rows(self) -> list[tuple[Field, str, str]]:
        """Rows of the goal form: field, value, what was found out."""
        plan = self.current_plan
        return [
            (field, self.value_of(field), asked.finding(field, plan, self.report)) for field in fields_for(self.method)
        ]

    def value_of(self, field: Field) -> str:
        """What a field says now."""
        try:
            return field.text(self.session.job()[0])
        except TrlfitError:
            return str(self.session.edits.get(field.path, ""))

    def cards_title(self) -> str:
        """Over the cards."""
        driver = self.reading.driver if self.reading is not None else None
        return f"GPUs of this machine, driver {driver}" if driver and self.cards else "GPUs of this machine"

    def no_cards_line(self) -> str:
        """In the place of cards."""
        if self.reading is None:
            return "reading this machine ..."
        why = self.reading.notes[0] if self.reading.notes else "no card is visible"
        return f"{why}; for cards elsewhere set machine below, such as 8xH100-80GB"

    def is_hidden(self, card: Card) -> bool:
        """The run must not use it."""
        return (card.uuid or str(card.index)) in self.session.hidden_cards

    def nothing_lines(self) -> list[str]:
        """In the place of reasons, where there is no plan."""
        return [asked.on_screen(self.problem)] if self.problem else [self.status]

    @property
    def watched(self) -> RunView | ProbeView | None:
        """What the screen of runs shows."""
        if self.probe is None or (self.run_view is not None and self.probe.is_aside):
            return self.run_view
        return self.probe

    @property
    def changes(self) -> list[Json]:
        """What would fit, or help."""
        return [] if self.plan is None else list(self.plan["changes"])

    def textbook_lines(self, width: int) -> str:
        """The textbook beside this stack, for lines of ``width`` cells."""
        from launcher.text.plan import gap_text  # nothing of this is in the first frame

        document = self.ledger()
        return "no plan is chosen" if document is None else gap_text(document["textbook"], width)

    @property
    def on_card(self) -> bool:
        """What is planned lies on cards, not in the memory of a host."""
        return self.plan is None or bool(self.plan["machine"]["cards"])

    def ledger(self) -> Json | None:
        """The ledger of the chosen plan."""
        from launcher.commands.ledger import ledger_document  # the planner's modules come with the first plan
        from planner.ledger.one_choice import OneChoice

        found = self._searched(self.chosen)
        if self.outcome is None or found is None:
            return None
        return ledger_document(OneChoice(problem=self.outcome.problem_of(found), candidate=found, refusals=()))

    def side_by_side(self, first: int, second: int) -> str:
        """Two of the candidates, as `plan --compare` has them."""
        from launcher.text.comparison import comparison_text
        from planner.advice.comparison import Compared, compared

        sides: list[Compared] = []
        for place in (first, second):
            found = self._searched(place)
            if self.outcome is None or found is None:
                return "no plan is chosen"
            asked = f"plan {place + 1} of the list"
            sides.append(Compared(asked=asked, problem=self.outcome.problem_of(found), candidate=found))
        assert self.outcome is not None
        return comparison_text(compared(self.outcome.problem.inputs, *sides))

    def _searched(self, place: int) -> Candidate | None:
        """A candidate as the search has it."""
        if self.outcome is None or self.plan is None:
            return None
        from planner.search.search import distinct

        result, fitting = self.outcome.result, sum(c["fits"] for c in self.plan["candidates"])
        if place < fitting:
            return distinct(result.fitting, place + 1)[-1]
        misses = distinct(result.near_misses, len(self.plan["near_misses"]))
        return misses[place - fitting] if place - fitting < len(misses) else None

    def files(self) -> tuple[dict[str, str], str]:
        """(files of the chosen plan by name, or why there are none)."""
        from launcher.run_text.run_files import render_run  # see tui/asked.py
        from launcher.writing.run_target import spec_of

        try:
            if self.outcome is None:
                return {}, self.problem or self.status
            if not self.outcome.problem.inputs.job.data.dataset:
                return {}, asked.NO_DATA
            if self.candidate is not None and not self.candidate["fits"]:
                return {}, "the chosen plan does not fit"
            spec, _ = spec_of(self.outcome, self.chosen + 1, self.python)
            return render_run(spec), ""
        except TrlfitError as error:
            return {}, asked.on_screen(str(error))

    def last_folder(self) -> Path | None:
        """Of the last run of this model that still exists."""
        model = self.plan["job"]["model"] if self.plan is not None else None
        return next((row.folder for row in self.runs if row.exists and row.model == model), None)
