"""The first screen: the live inventory of this machine and the plan table of the current job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Static

from launcher.errors import TrlfitError
from launcher.gpus import CardSample, Sampler
from launcher.job_file import resolve_job
from launcher.machines import resolve_machine
from launcher.plan_text import choice_words, machine_words
from launcher.planning import plan_job
from planner.job import Job
from planner.machine import Machine
from planner.units import format_gib, format_seconds

JOB_FILE = Path("job.yaml")
"""The current job: this file in the working directory."""
FALLBACK_JOB = {"model": "Qwen/Qwen3-8B", "method": "lora"}
"""Planned when there is no job file, so that the first screen shows a real plan."""
SAMPLE_S = 1.0

CARD_COLUMNS = ("#", "card", "used/total GiB", "util", "temp", "power", "other processes")
PLAN_COLUMNS = (
    "#",
    "GPUs",
    "train",
    "shard",
    "recompute",
    "offload",
    "loss",
    "mb x ga",
    "GiB",
    "free",
    "step",
    "verdict",
)


def current_job() -> tuple[Job, dict[str, str]]:
    """The job of this folder, or the fallback.

    Raises:
        UsageError: job.yaml is there but wrong.
    """
    if JOB_FILE.is_file():
        return resolve_job(JOB_FILE, {}, {})
    return resolve_job(None, FALLBACK_JOB, {})


def card_cells(machine: Machine, samples: dict[int, CardSample]) -> list[tuple[str, ...]]:
    """Rows of the inventory, live values over the first reading."""
    rows: list[tuple[str, ...]] = []
    for card in machine.cards:
        sample = samples.get(card.index)
        used = card.used_bytes if sample is None or sample.problem else sample.used_bytes
        util = card.utilisation_percent if sample is None else sample.utilisation_percent
        heat = card.temperature_c if sample is None else sample.temperature_c
        power = card.power_w if sample is None else sample.power_w
        processes = card.processes if sample is None else sample.processes
        names = ", ".join(f"pid {p.pid} {p.name or '?'} ({p.user or '?'})" for p in processes)
        rows.append(
            (
                str(card.index),
                card.name if card.usable else f"{card.name} (not usable)",
                f"{format_gib(used)}/{format_gib(card.total_bytes)}",
                "?" if util is None else f"{util}%",
                "?" if heat is None else f"{heat}C",
                "?" if power is None else f"{power:.0f} W",
                names or "none",
            )
        )
    return rows


def plan_cells(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the plan table: what fits, then the closest that does not."""
    shown = [c for c in plan["candidates"] if c["fits"]] + plan["near_misses"]
    rows: list[tuple[str, ...]] = []
    for number, candidate in enumerate(shown, 1):
        words, memory, time = (
            choice_words(candidate["choice"]),
            candidate["memory"],
            candidate["time"],
        )
        headroom = memory["headroom_bytes"]
        rows.append(
            (
                str(number) if candidate["fits"] else "-",
                str(candidate["num_gpus"]),
                words["train"],
                words["shard"],
                words["recompute"],
                words["offload"],
                words["loss"],
                words["mb x ga"],
                format_gib(memory["device_bytes"]),
                format_gib(headroom) if headroom is not None else "?",
                format_seconds(time["step_s"]) if time else "not known",
                "fits" if candidate["fits"] else candidate["why"][0],
            )
        )
    return rows


class TrlfitApp(App[int]):
    """Inventory above, plans below, reasons of the highlighted plan at the foot."""

    TITLE = "trlfit"
    CSS = """
    #head { height: auto; padding: 0 1; }
    #cards { height: auto; max-height: 12; }
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
        self._sampler: Sampler | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("reading this machine ...", id="head", markup=False)
            yield DataTable[str](id="cards", cursor_type="none")
            yield DataTable[str](id="plans", cursor_type="row")
            with VerticalScroll(id="why"):
                yield Static("", id="reasons", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#cards", DataTable).add_columns(*CARD_COLUMNS)
        self.query_one("#plans", DataTable).add_columns(*PLAN_COLUMNS)
        self.query_one("#plans", DataTable).focus()
        self.action_replan()
        self.set_interval(SAMPLE_S, self._sample_cards)

    def action_replan(self) -> None:
        self._set_head("planning ...")
        self._plan_in_background()

    @work(thread=True, exclusive=True, group="plan")
    def _plan_in_background(self) -> None:
        try:
            machine = resolve_machine("local")
            self.call_from_thread(self._show_machine, machine)
            job, origins = current_job()
            outcome = plan_job(job, origins, None, 12)
        except TrlfitError as error:
            self.call_from_thread(self._set_head, str(error))
            return
        self.call_from_thread(self._show_plan, outcome.document)

    def _show_machine(self, machine: Machine) -> None:
        self.machine = machine
        self._sampler = Sampler(machine.cards) if machine.cards else None
        self._fill_cards({})

    @work(thread=True, exclusive=True, group="sample")
    def _sample_cards(self) -> None:
        if self._sampler is not None:
            samples = {sample.index: sample for sample in self._sampler.sample()}
            self.call_from_thread(self._fill_cards, samples)

    def _fill_cards(self, samples: dict[int, CardSample]) -> None:
        table = cast("DataTable[str]", self.query_one("#cards", DataTable))
        table.clear()
        if self.machine is None:
            return
        for row in card_cells(self.machine, samples):
            table.add_row(*row)
        table.display = bool(self.machine.cards)

    def _show_plan(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        source = str(JOB_FILE) if JOB_FILE.is_file() else f"no {JOB_FILE} here, so an example"
        job = plan["job"]
        lines = [
            f"{job['model']}  {job['trainer']} {job['method']}  {job['seq_len']:,} tokens"
            f"  global batch {job['global_batch']}  on {machine_words(plan['machine'])}  ({source})",
            *plan["machine"]["notes"],
        ]
        if plan["best"] is None:
            lines.append(
                "nothing fits as asked: " + "; ".join(f"{c['flags']}: {c['sentence']}" for c in plan["changes"][:3])
            )
        self._set_head("\n".join(lines))
        table = cast("DataTable[str]", self.query_one("#plans", DataTable))
        table.clear()
        for row in plan_cells(plan):
            table.add_row(*row)
        self._show_reasons(0)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.data_table.id == "plans":
            self._show_reasons(event.cursor_row)

    def _show_reasons(self, row: int) -> None:
        if self.plan is None:
            return
        shown = [c for c in self.plan["candidates"] if c["fits"]] + self.plan["near_misses"]
        if row < len(shown):
            lines = [*shown[row]["why"], *(f"note: {text}" for text in shown[row]["warnings"])]
            self.query_one("#reasons", Static).update("\n".join(lines))

    def _set_head(self, text: str) -> None:
        self.query_one("#head", Static).update(text)


def run_app() -> int:
    """Open the app; returns an exit code."""
    return TrlfitApp().run() or 0
