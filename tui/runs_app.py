"""The half of the app that starts, watches and ends trainings and probes."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual.app import App

from launcher.errors import TrlfitError
from tui import asked, cells, work_in_threads
from tui.known import Json, Known
from tui.leaving import end_helpers
from tui.messages import (
    LaunchNarrated,
    LaunchRefused,
    LayersTraced,
    ProbeEnded,
    ProbeSaid,
    ProbeStepped,
    RunLost,
    RunsRead,
    RunStarted,
    RunWritten,
)
from tui.plain import plain
from tui.probe_view import KINDS, ProbeKind, ProbeView
from tui.screens.base import PlanningScreen
from tui.screens.modals import Picker, Question

if TYPE_CHECKING:
    from launcher.running.follow import Event


PROBE_NAMES = {
    "trace": "trace of {model}",
    "rates": "rates of this machine",
    "job": "steps of {model} at small depth",
    "whole": "steps of the best plan of {model}",
}
"""By the words of the kinds."""


class RunsApp(App[int]):
    """What is known, threads, and everything that goes on in a folder or a child."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known
        self._news: deque[Event] = deque()
        self._before_probe: Json | None = None
        """The plan without what a probe has just found, until there is one with it."""
        self._dropped = threading.Event()
        """Set when the launch that is being checked is not wanted any more."""
        self._asked_to_write: bool | None = None
        """Whether to start as well, of what was asked for while planning."""

    def notify(self, message: str, **about: Any) -> None:
        """Say something in passing; names in it come from outside."""
        super().notify(plain(message), **about)

    def plan_anew(self) -> None:
        """Plan the job again."""
        raise NotImplementedError

    def _in_thread(self, group: str, work: Callable[[], object]) -> None:
        self.run_worker(work, group=group, exclusive=True, thread=True, exit_on_error=False)

    def _redraw(self) -> None:
        if isinstance(self.screen, PlanningScreen):
            self.screen.refresh_view()

    def _redraw_run(self) -> None:
        if isinstance(self.screen, PlanningScreen) and self.screen.NAME == "run":
            self.screen.refresh_view()

    def read_runs(self) -> None:
        """Read the history."""
        self._in_thread("history", lambda: work_in_threads.read_runs(self.post_message))

    def launch(self) -> None:
        """Show what would be run; one more key runs it."""
        self._ask_to_write(start=True)

    def write(self) -> None:
        """The same, without starting it."""
        self._ask_to_write(start=False)

    def _ask_to_write(self, *, start: bool) -> None:
        if self.known.launching:
            self.notify("a run is being written or checked; 5 shows it, X there drops it")
            return
        if self.known.status and not self.known.problem:
            # The plan on the screen is that of the job before the last edit.
            self._asked_to_write = start
            self.notify("planning; what would be written is shown with the plan")
            return
        try:
            text, spec, folder = asked.launch_text(
                self.known.outcome, self.known.chosen, self.known.candidate, self.known.python, start=start
            )
        except (TrlfitError, OSError) as error:
            self.notify(work_in_threads.error_line(error), severity="error", markup=False)
            return

        def answered(answer: str | None) -> None:
            if answer:
                self.known.launching, self.known.refused = f"writing {folder} ...", ""
                if start:
                    self.known.run_view = self.known.probe = None
                    self.switch_mode("run")
                dropped = self._dropped = threading.Event()
                work = partial(
                    work_in_threads.launch, spec, folder, start=start, dropped=dropped, post=self.post_message
                )
                self._in_thread("launch", work)

        taken = self.known.banner if start else ""
        going = [row.folder.name for row in self.known.runs if row.state == "running" and row.exists] if start else []
        if going and not taken:
            taken = f"{', '.join(going)} {'is' if len(going) == 1 else 'are'} running on this machine"
        if taken:
            text = Text(f"{taken}\n\n", "bold") + text
        answers = [("L", f"write and launch{' all the same' if taken else ''}")] if start else [("W", "write")]
        self.push_screen(Question("Launch" if start else "Write", text, answers), answered)

    def write_what_was_asked(self) -> None:
        """Show what was asked for while the plan was not there yet."""
        start, self._asked_to_write = self._asked_to_write, None
        if start is not None and isinstance(self.screen, PlanningScreen):
            self._ask_to_write(start=start)

    def show_run(self, folder: Path) -> None:
        """Go to a run and watch it."""
        if self.known.probe is not None and not self.known.probe.is_live:
            self.known.probe = None  # it was read
        self._attach_run(folder)
        self.switch_mode("run")

    def cancel_watched(self) -> None:
        """Ask, then end the run or the probe that is shown, or what is still being checked."""
        if self.known.launching and self.known.watched is None:
            self._drop_launch()
        elif isinstance(self.known.watched, ProbeView):
            self._cancel_probe(self.known.watched)
        else:
            self.cancel_run()

    def _drop_launch(self) -> None:
        def answered(answer: str | None) -> None:
            if answer and self.known.launching:
                self._dropped.set()
                self.known.launching = "dropping it ..."
                end_helpers()
                self._redraw()

        text = f"{self.known.launching}\nIt is not started yet. Drop it?"
        self.push_screen(Question("Cancel", text, [("X", "drop it")]), answered)

    def _cancel_probe(self, view: ProbeView) -> None:
        if not view.is_live:
            self.notify("the probe is over")
            return

        def answered(answer: str | None) -> None:
            if answer:
                self.end_probe()

        self.push_screen(
            Question("Cancel", f"End this probe ({view.name})? Nothing of it is kept.", [("X", "end it")]), answered
        )

    def cancel_run(self) -> None:
        """Ask, then end the run."""
        view = self.known.run_view
        if view is None or not view.is_live:
            self.notify("no run goes on here")
            return

        def answered(answer: str | None) -> None:
            if answer:
                self._in_thread("end", lambda: work_in_threads.end_run(view.folder, self.post_message))

        self.push_screen(
            Question("Cancel", f"End {view.folder.name} and all of its processes?", [("X", "end it")]), answered
        )

    def detach(self) -> None:
        """Look away; what runs goes on."""
        if isinstance(self.known.watched, ProbeView):
            self.known.probe = None if not self.known.watched.is_live else self.known.probe
            self._redraw()
            return
        if self.known.run_view is not None:
            goes_on = "goes on" if self.known.run_view.is_live else "stays where it is"
            self.notify(f"{self.known.run_view.folder.name} {goes_on}; 6 opens it again", markup=False)
        self.known.run_view = None
        self.workers.cancel_group(self, "watch")
        self._redraw()

    def on_launch_narrated(self, message: LaunchNarrated) -> None:
        self.known.launching = message.line
        self._redraw()

    def on_run_written(self, message: RunWritten) -> None:
        self.known.launching = ""
        self.notify(f"{message.folder} is written; `trlfit launch {message.folder}` starts it", markup=False)
        self._redraw()

    def on_runs_read(self, message: RunsRead) -> None:
        self.known.runs, self.known.run_notes = message.rows, message.notes
        if self.known.run_view is None and not self.known.launching:
            live = next((row for row in message.rows if row.state == "running" and row.exists), None)
            if live is not None:
                self.notify(f"{live.folder.name} is running; 5 shows it", markup=False)
                self._attach_run(live.folder)
        self._redraw()

    def _attach_run(self, folder: Path) -> None:
        """Watch a run without going to it."""
        from tui.run_view import RunView  # with what follows a run: 40 ms

        view = RunView(folder)
        news: deque[Event] = deque()
        self.known.run_view, self.known.launching, self.known.refused, self._news = view, "", "", news
        self._in_thread("watch", lambda: work_in_threads.watch_run(view, news.append, self.post_message))

    def on_run_started(self, message: RunStarted) -> None:
        self.show_run(message.folder)
        self.read_runs()

    def on_run_lost(self, message: RunLost) -> None:
        message.view.lost = message.line
        self.notify(f"{message.view.folder.name}: {message.line}", severity="warning", markup=False)
        self._redraw()

    def on_launch_refused(self, message: LaunchRefused) -> None:
        self.known.launching, self.known.refused = "", f"not started: {message.line}"
        self.notify(message.line, severity="error", markup=False, timeout=10)
        self._redraw()

    def _drain(self) -> None:
        """Take in what the run has said since the last look."""
        if not self._news or self.known.run_view is None:
            return
        while self._news:
            self.known.run_view.feed(self._news.popleft())
        self._redraw_run()
        if self.known.run_view.is_over:
            self.read_runs()

    # Probes

    def probe(self) -> None:
        """Ask what to probe, and start it."""
        if self.known.probe is not None and self.known.probe.is_live:
            self.notify(f"{self.known.probe.name} goes on; 5 shows it, X there ends it", markup=False)
            return
        offers = [(f"{kind.word:<6} {self._probe_command(kind)}", kind.says) for kind in KINDS]

        def answered(answer: str | None) -> None:
            if answer:
                self._start_probe(KINDS[int(answer)])

        self.push_screen(Picker("Probe this job", offers, "arrows choose, Enter starts it"), answered)

    def _probe_command(self, kind: ProbeKind) -> str:
        python = ("--python", self.known.python) if self.known.python else ()
        return self.known.session.command("probe", *kind.flags, *python, fields=kind.fields)

    def _start_probe(self, kind: ProbeKind) -> None:
        try:
            job, origins = self.known.session.job()
        except TrlfitError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        view = ProbeView(PROBE_NAMES[kind.word].format(model=job.model))
        self.known.probe = view
        if kind.flags:
            words = shlex.split(self._probe_command(kind))[1:]
            work = partial(work_in_threads.measure, view, words, self.post_message)
        else:
            work = partial(work_in_threads.trace_layers, view, job, origins, self.known.python, self.post_message)
        self._in_thread("probe", work)
        self.switch_mode("run")

    def end_probe(self) -> None:
        """End a probe that runs, and what it started."""
        view = self.known.probe
        if view is None or not view.is_live:
            return
        if view.end_it is None:
            end_helpers()
        else:
            with contextlib.suppress(OSError):  # it has just ended
                view.end_it()

    def on_layers_traced(self, message: LayersTraced) -> None:
        if message.asked != self.known.asked:
            return
        so_far = f"{message.done} of {message.of} sets, {message.seconds:.0f} s"
        self.known.status = f"tracing the model's layers, once: {so_far}"
        self._redraw()
        view = self.known.probe
        if view is not None and view.is_live and not view.is_aside:
            return
        if view is None or not view.is_live:
            view = self.known.probe = ProbeView("trace of the model's layers, for this plan", is_aside=True)
        view.step(message.done, message.of, "sets of options")
        self._show_probe(view)

    def end_aside(self, problem: str) -> None:
        """The plan is made, or there is none: so is what was traced for it."""
        view = self.known.probe
        if view is not None and view.is_aside and view.is_live:
            view.say(f"traced {view.line}")
            view.end(problem)

    def on_probe_stepped(self, message: ProbeStepped) -> None:
        message.view.step(message.done, message.of, message.what)
        self._show_probe(message.view)

    def on_probe_said(self, message: ProbeSaid) -> None:
        message.view.say(message.text)
        self._show_probe(message.view)

    def on_probe_ended(self, message: ProbeEnded) -> None:
        message.view.end(message.problem)
        self._show_probe(message.view)
        self.notify(
            f"{message.view.name}: {message.problem or f'done; {message.view.line}'}",
            severity="warning" if message.problem else "information",
            markup=False,
        )
        if not message.problem:
            self._before_probe = self.known.plan
            self.plan_anew()

    def tell_what_a_probe_changed(self) -> None:
        """The first plan with it beside the last one without."""
        before, self._before_probe = self._before_probe, None
        view, now = self.known.probe, self.known.plan
        if before is None or now is None or view is None or view.is_live or before["job"] != now["job"]:
            return
        view.say(f"the best plan was {cells.best_words(before)}, and is {cells.best_words(now)}")
        self._show_probe(view)

    def _show_probe(self, view: ProbeView) -> None:
        if view is self.known.probe:
            self._redraw_run()
