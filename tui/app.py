"""The first screen: the live inventory of this machine and the plan table of the current job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import DataTable, Footer, Static
from textual.worker import Worker, WorkerState, get_current_worker  # pyright: ignore[reportUnknownVariableType]

from launcher.errors import TrlfitError
from launcher.gpus import CardSample, Sampler
from launcher.job_file import resolve_job
from launcher.machines import resolve_machine
from launcher.planning import plan_job
from planner.job import Job
from planner.machine import Machine
from tui.cells import CARD_COLUMNS, PLAN_COLUMNS, card_row, head_lines, plan_row, reason_lines, shown_candidates

JOB_FILE = Path("job.yaml")
"""The current job: this file in the working directory."""
FALLBACK_JOB = {"model": "Qwen/Qwen3-8B", "method": "lora"}
"""Planned when there is no job file, so that the first screen shows a real plan."""
NUM_CANDIDATES = 12
SAMPLE_S = 1.0


def current_job() -> tuple[Job, dict[str, str]]:
    """The job of this folder, or the fallback.

    Raises:
        UsageError: job.yaml is there but wrong.
    """
    if JOB_FILE.is_file():
        return resolve_job(JOB_FILE, {}, {})
    return resolve_job(None, FALLBACK_JOB, {})


@dataclass
class MachineRead(Message):
    """The cards of this machine are known."""

    machine: Machine


@dataclass
class CardsSampled(Message):
    """The cards were read again."""

    samples: Sequence[CardSample]


@dataclass
class PlanMade(Message):
    """The plan document of the current job."""

    plan: dict[str, Any]
    source: str


@dataclass
class ProblemMet(Message):
    """There is no plan, for a reason of one line."""

    line: str


class TrlfitApp(App[int]):
    """Inventory above, plans below, reasons of the highlighted plan at the foot."""

    TITLE = "trlfit"
    CSS = """
    #head { height: auto; max-height: 8; padding: 0 1; }
    #cards { height: auto; max-height: 10; }
    #plans { height: 1fr; min-height: 5; }
    #why { height: auto; max-height: 8; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "replan", "Plan again"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.animation_level = "none"
        self.machine: Machine | None = None
        self.plan: dict[str, Any] | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("reading this machine ...", id="head", markup=False)
            yield DataTable[str](id="cards", cursor_type="none")
            yield DataTable[Text](id="plans", cursor_type="row")
            with VerticalScroll(id="why", can_focus=False):
                yield Static("", id="reasons", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        for name in CARD_COLUMNS:
            self._cards.add_column(name, key=name)
        self._cards.display = False
        self._plans.add_columns(*PLAN_COLUMNS)
        self._plans.focus()
        self.action_replan()

    @property
    def _cards(self) -> DataTable[str]:
        return cast("DataTable[str]", self.query_one("#cards", DataTable))

    @property
    def _plans(self) -> DataTable[Text]:
        return cast("DataTable[Text]", self.query_one("#plans", DataTable))

    def action_replan(self) -> None:
        """Read the machine and the job again."""
        self._say("planning ...")
        self._plan_in_background()

    @work(thread=True, exclusive=True, group="plan", exit_on_error=False)
    def _plan_in_background(self) -> None:
        worker = cast("Worker[None]", get_current_worker())
        try:
            machine = resolve_machine("local")
            if not worker.is_cancelled:
                self.post_message(MachineRead(machine))
            source = str(JOB_FILE) if JOB_FILE.is_file() else f"no {JOB_FILE} here, so an example"
            job, origins = current_job()
            message: Message = PlanMade(plan_job(job, origins, None, NUM_CANDIDATES).document, source)
        except TrlfitError as error:
            message = ProblemMet(str(error))
        # An answer to an older question is dropped.
        if not worker.is_cancelled:
            self.post_message(message)

    @work(thread=True, exclusive=True, group="sample", exit_on_error=False)
    def _watch_cards(self, machine: Machine) -> None:
        worker = cast("Worker[None]", get_current_worker())
        with Sampler(machine.cards) as sampler:
            while not worker.cancelled_event.wait(SAMPLE_S):
                self.post_message(CardsSampled(sampler.sample()))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """A bug in a worker is one line on the screen, and the app stays up."""
        if event.state is WorkerState.ERROR:
            error = event.worker.error
            self.post_message(ProblemMet(f"bug in trlfit: {type(error).__name__}: {error}"))

    def on_machine_read(self, message: MachineRead) -> None:
        self.machine = message.machine
        self._cards.clear()
        for card in message.machine.cards:
            self._cards.add_row(*card_row(card, None), key=str(card.index))
        self._cards.display = bool(message.machine.cards)
        if message.machine.cards:
            self._watch_cards(message.machine)

    def on_cards_sampled(self, message: CardsSampled) -> None:
        if self.machine is None:
            return
        cards = {card.index: card for card in self.machine.cards}
        for sample in message.samples:
            if sample.index in cards:
                self._show_sample(str(sample.index), card_row(cards[sample.index], sample))

    def _show_sample(self, key: str, row: tuple[str, ...]) -> None:
        for name, value in zip(CARD_COLUMNS, row, strict=True):
            if self._cards.get_cell(key, name) != value:
                self._cards.update_cell(key, name, value, update_width=True)

    def on_plan_made(self, message: PlanMade) -> None:
        self.plan = message.plan
        self._say("\n".join(head_lines(message.plan, message.source)))
        self._plans.clear()
        for rank, candidate in enumerate(shown_candidates(message.plan), 1):
            style = "" if candidate["fits"] else "dim"
            self._plans.add_row(*(Text(cell, style) for cell in plan_row(rank, candidate)))
        self._show_reasons(0)

    def on_problem_met(self, message: ProblemMet) -> None:
        """The table of an older plan would contradict the line."""
        self.plan = None
        self._plans.clear()
        self.query_one("#reasons", Static).update("")
        self._say(message.line)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.data_table.id == "plans":
            self._show_reasons(event.cursor_row)

    def _show_reasons(self, row: int) -> None:
        shown = shown_candidates(self.plan) if self.plan is not None else []
        if row < len(shown):
            self.query_one("#reasons", Static).update("\n".join(reason_lines(shown[row])))

    def _say(self, text: str) -> None:
        self.query_one("#head", Static).update(text)


def run_app() -> int:
    """Open the app; returns an exit code."""
    return TrlfitApp().run() or 0
