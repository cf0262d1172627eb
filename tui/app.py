"""The planning session on a terminal: one app, six screens, and workers that never block them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.worker import Worker, WorkerState

from launcher.diagnostics import report_note
from launcher.errors import TrlfitError
from launcher.paths import expanded
from tui import asked, work_in_threads
from tui.ascii import draw_in_ascii
from tui.keys import EVERYWHERE, SCREENS, bindings, shown_key
from tui.known import Known
from tui.leaving import DaemonThreads
from tui.messages import (
    CardsRead,
    CardsSampled,
    DataRead,
    LaunchRefused,
    PlanMade,
    ProbeEnded,
    ProblemMet,
    Warned,
)
from tui.runs_app import RunsApp
from tui.screens.base import PlanningScreen
from tui.screens.goal import GoalScreen
from tui.screens.modals import Question, keys_box
from tui.screens.plans import PlansScreen
from tui.session import JOB_FILE, Session

Json = Mapping[str, Any]
VISIBLE = "CUDA_VISIBLE_DEVICES"
DRAIN_S = 0.2
"""How often what a run has said is drawn."""


# Screens that are never the first one load when they are gone to.
def _ledger() -> Screen[Any]:
    from tui.screens.ledger import LedgerScreen

    return LedgerScreen()


def _files() -> Screen[Any]:
    from tui.screens.files import FilesScreen

    return FilesScreen()


def _run() -> Screen[Any]:
    from tui.screens.run import RunScreen

    return RunScreen()


def _history() -> Screen[Any]:
    from tui.screens.history import HistoryScreen

    return HistoryScreen()


class TrlfitApp(RunsApp):
    """What is planned, what is chosen, what runs; the screens show it."""

    TITLE = "trlfit"
    CSS = """
    .-ascii Panel { border: ascii $panel-lighten-2; }
    .-ascii _Box > Vertical, _Box.-ascii > Vertical { border: ascii $primary; }
    .-ascii #edit-choices { border-top: ascii $panel-lighten-2; }
    .-ascii Toast { border-left: ascii $panel-lighten-2; }
    .-ascii CommandPalette #--input, .-ascii CommandPalette CommandList { border: ascii $panel-lighten-2; }
    .-ascii CommandPalette LoadingIndicator { display: none; }
    """
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {
        "goal": GoalScreen,
        "plans": PlansScreen,
        "ledger": _ledger,
        "files": _files,
        "run": _run,
        "history": _history,
    }
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(EVERYWHERE)]

    def __init__(self, file: Path | None = None, *, python: str | None = None) -> None:
        """Open a job.

        Args:
            file: job file; None is this folder's, or an example.
            python: the training Python; None is the one running.
        """
        super().__init__(Known(session=Session.here(file), python=python))
        self.animation_level = "none"
        if not self.known.unicode:
            draw_in_ascii()
            self.add_class("-ascii")
        self._replaces: Path | None = None
        """A file that exists and may be replaced by one more Enter."""
        self._environ = dict(os.environ)
        """As it was before cards were left out."""

    def on_mount(self) -> None:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        self.switch_mode("plans" if self.known.session.file is not None else "goal")
        self.set_interval(DRAIN_S, self._drain)
        self.action_replan()
        self.read_runs()

    def get_key_display(self, binding: Binding) -> str:
        """Arrows and signs by their names, where the terminal has no more than ASCII."""
        shown = super().get_key_display(binding)
        if self.known.unicode or shown.isascii():
            return shown
        return "Bksp" if binding.key == "backspace" else shown_key(binding.key)

    def action_command_palette(self) -> None:
        from tui.screens.palette import Palette  # not before somebody asks for it

        if not any(isinstance(screen, Palette) for screen in self.screen_stack):
            self.push_screen(Palette())

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: every screen, every key of the one in front, and the themes."""
        for key in EVERYWHERE:
            prefix = "go" if key.action.startswith("mode") else "session"
            yield SystemCommand(f"{prefix}: {key.word.lower()}", key.says, partial(self.run_action, key.action))
        for key in SCREENS[self.current_mode]:
            action = partial(screen.run_action, key.action)
            yield SystemCommand(f"{self.current_mode}: {key.word.lower()}", key.says, action)
        yield SystemCommand("export: plan", "write the plan as `trlfit plan --json` prints it", self.action_export)
        for theme in sorted(self.available_themes):
            yield SystemCommand(f"theme: {theme}", "colours of the screens", partial(setattr, self, "theme", theme))

    # What the screens do

    def change(self, path: str, value: Any) -> None:
        """Set a field of the job, and plan again."""
        self.known.session.set(path, value)
        self._plan_again()

    def take(self, flags: str) -> None:
        """Take what a change of the job says in flags, and plan again."""
        try:
            self.known.session.take(flags)
        except TrlfitError as error:
            self.notify(f"{flags} is not set from here: {asked.on_screen(str(error))}", markup=False)
            return
        self.notify(f"{flags}; u takes it back", title="set", markup=False)
        self._plan_again()

    def reset(self, path: str) -> None:
        """A field of the job back to its default, and plan again."""
        self.known.session.reset(path)
        self._plan_again()

    def action_undo(self) -> None:
        if self.known.session.undo():
            self._plan_again()
        else:
            self.notify("nothing to undo")

    def toggle_card(self, index: int) -> None:
        """Take a card into the run, or leave it out."""
        card = next((c for c in self.known.cards if c.index == index), None)
        if card is None or not card.usable:
            return
        name = card.uuid or str(card.index)
        left = [c for c in self.known.cards if c.usable and not self.known.is_hidden(c)]
        if left == [card]:
            self.notify("one card has to stay")
            return
        self.known.session.hidden_cards ^= {name}
        self._plan_again()

    def pin(self, text: str) -> None:
        """Pin a knob, and plan again."""
        knob, _, value = text.partition("=")
        self.change(f"pins.{knob.strip()}", value.strip())

    def action_mode(self, name: str) -> None:
        if isinstance(self.screen, PlanningScreen) and self.screen.edit_line.is_open:
            self.screen.edit_line.close()
        self.switch_mode(name)

    def action_keys(self) -> None:
        self.push_screen(keys_box(self.current_mode))

    def action_copy(self) -> None:
        command = asked.command(self.known.session, self.known.cards)
        self.copy_to_clipboard(command)
        self.notify(command, title="copied", markup=False)

    def action_save(self) -> None:
        if not isinstance(self.screen, PlanningScreen):
            return
        self._replaces = None
        self.screen.edit_line.ask("save as", str(self.known.session.own_file or JOB_FILE), self._save)

    def _save(self, text: str) -> str | None:
        problem = self._write_file(text, self.known.session.save, self.known.session.own_file)
        if problem is None:
            self._plan_again()
        return problem

    def action_export(self) -> None:
        """Of the palette: the plan on the screen as the command writes it."""
        outcome = self.known.outcome
        if outcome is None or not isinstance(self.screen, PlanningScreen):
            self.notify("there is no plan yet")
            return
        self._replaces = None

        def write(text: str) -> str | None:
            from launcher.files import replace_file
            from launcher.output import json_lines

            return self._write_file(text, lambda file: replace_file(file.resolve(), json_lines(outcome.document)), None)

        self.screen.edit_line.ask("export the plan as", "plan.json", write)

    def _write_file(self, text: str, write: Callable[[Path], object], ours: Path | None) -> str | None:
        """Write a file that was named, asking before another than ``ours`` is replaced; what is wrong, or None."""
        if not text.strip():
            return "a file has a name"
        try:
            file = expanded(text.strip())
            if file not in (self._replaces, ours) and file.is_file():
                self._replaces = file
                return f"{file} exists; Enter once more replaces it"
            write(file)
        except (TrlfitError, OSError, ValueError) as error:  # a NUL
            return str(error) if isinstance(error, ValueError) else work_in_threads.error_line(error)
        self.notify(f"wrote {text.strip()}", markup=False)
        return None

    def action_leave(self) -> None:
        if self.known.launching:
            text = f"{self.known.launching}\nIt is not started yet, and leaving drops it."
            self.push_screen(Question("Quit", text, [("d", "drop it and quit")]), self._left)
            return
        probe, view = self.known.probe, self.known.run_view
        if probe is not None and probe.is_live and not probe.is_aside:
            text = f"A probe is running ({probe.name}), and leaving ends it."
            self.push_screen(Question("Quit", text, [("d", "end it and quit")]), self._left)
            return
        if view is None or not view.is_live:
            self.exit(0)
            return
        text = f"{view.folder.name} is running. It goes on without this screen; `trlfit` shows it again."
        self.push_screen(Question("Quit", text, [("d", "detach and quit"), ("X", "cancel the run")]), self._left)

    async def action_quit(self) -> None:
        """Textual's own way out asks the same."""
        self.action_leave()

    def _left(self, answer: str | None) -> None:
        if answer == "d":
            self.end_probe()
            self.exit(0)
        elif answer == "X":
            self.cancel_run()

    # Work in the background

    def action_replan(self) -> None:
        """Read the machine and the job file again."""
        self._plan_again()

    def plan_anew(self) -> None:
        self._plan_again()

    def _plan_again(self) -> None:
        if self.known.probe is not None and self.known.probe.is_aside:
            self.known.probe = None
        self.known.asked += 1
        self.known.status, self.known.problem = "planning ...", ""
        number, session, python = self.known.asked, self.known.session, self.known.python
        visible = asked.visible_devices(self.known.session, self.known.cards)
        if visible is None:
            visible = self._environ.get(VISIBLE)
        if visible is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = visible  # for the plan, and for the run that is launched from here
        self._in_thread(
            "plan", lambda: work_in_threads.make_plan(session, number, self._environ, python, self.post_message)
        )
        self._redraw()

    def inspect_data(self) -> None:
        """Look at the first rows of the data."""
        if self.known.outcome is None:
            self.notify("the data is looked at when there is a plan; `Checks` says what it waits for")
            return
        if not self.known.outcome.problem.inputs.job.data.dataset:
            self.notify("name the data first")
            return
        inputs = self.known.outcome.problem.inputs
        self.known.data_line = f"reading {inputs.job.data.dataset} ..."
        self._redraw()
        self._in_thread(
            "data",
            lambda: work_in_threads.inspect_data(inputs.job, inputs.architecture, self.known.python, self.post_message),
        )

    def plan_again(self, folder: Path) -> None:
        """The job of an earlier run, to plan again."""
        file = folder / "job.yaml"
        if not file.is_file():
            self.notify(f"{file} is gone", severity="warning", markup=False)
            return
        self.known.session.open(file)
        self.notify("the job of this run; u takes the one before back", markup=False)
        self.switch_mode("goal")
        self._plan_again()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """A bug in a worker is one line on the screen, and the app stays up."""
        if event.state is WorkerState.ERROR:
            line = work_in_threads.error_line(event.worker.error)
            said: dict[str, Message] = {"plan": ProblemMet(line, self.known.asked), "data": DataRead(None, line)}
            said["launch"] = LaunchRefused(line)
            if event.worker.group == "probe" and self.known.probe is not None:
                said["probe"] = ProbeEnded(self.known.probe, line)
            self.post_message(said.get(event.worker.group, Warned(line)))

    # News

    def on_cards_read(self, message: CardsRead) -> None:
        before, self.known.reading = self.known.reading, message.reading
        cards = message.reading.cards
        if cards and (before is None or before.cards != cards):
            self._in_thread(
                "sample", lambda: work_in_threads.sample_cards(cards, lambda: not self.app_focus, self.post_message)
            )
        self._redraw()

    def on_cards_sampled(self, message: CardsSampled) -> None:
        self.known.samples = {sample.index: sample for sample in message.samples}
        banner = asked.taken_banner(self.known.outcome, self.known.candidate, self.known.cards, self.known.samples)
        redraw, self.known.banner = banner != self.known.banner, banner
        if redraw:
            self._redraw()
        elif isinstance(self.screen, GoalScreen):
            for card in self.known.cards:
                self.screen.show_sample(card, self.known.samples.get(card.index))

    def on_plan_made(self, message: PlanMade) -> None:
        if message.asked != self.known.asked:
            return
        known = self.known
        before, now = known.plan, message.outcome.document
        if before is not None and any(before["job"][what] != now["job"][what] for what in ("data", "model", "trainer")):
            known.report, known.data_line = None, ""
        known.outcome, known.status, known.problem, known.banner, known.chosen = message.outcome, "", "", "", 0
        known.edition += 1
        self.end_aside("")
        self.tell_what_a_probe_changed()
        self._redraw()
        self.write_what_was_asked()

    def on_problem_met(self, message: ProblemMet) -> None:
        """The plans of an older question would contradict the line."""
        if message.asked in (0, self.known.asked):
            self.known.outcome, self.known.status, self.known.problem = None, message.line, message.line
            self.known.edition, self.known.chosen = self.known.edition + 1, 0
            self._asked_to_write = None
            self.end_aside(message.line)
        self._redraw()

    def on_warned(self, message: Warned) -> None:
        self.notify(message.line, severity="warning", markup=False)

    def on_data_read(self, message: DataRead) -> None:
        self.known.report, self.known.data_line = message.report, message.problem
        self._redraw()


def run_app(file: Path | None = None) -> int:
    """Open the app; returns an exit code. A job that no file has is said as a command line."""
    app = TrlfitApp(file)
    code = app.run() or 0
    if app.known.session.is_unsaved:
        report_note(f"the job is in no file; the same again: {asked.command(app.known.session, app.known.cards)}")
    return code
