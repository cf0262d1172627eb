"""Work that takes longer than a frame: threads that only post messages, so that no screen ever waits.

What a thread needs of launcher and planner it imports itself, while the first frame is drawn.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, cast

from textual.message import Message
from textual.worker import Worker, get_current_worker  # pyright: ignore[reportUnknownVariableType]

from launcher.errors import ExitCode, TrlfitError
from tui.messages import (
    CardsRead,
    CardsSampled,
    DataRead,
    LaunchNarrated,
    LaunchRefused,
    LayersTraced,
    PlanMade,
    ProbeEnded,
    ProbeSaid,
    ProbeStepped,
    ProblemMet,
    RunLost,
    RunsRead,
    RunStarted,
    RunWritten,
    Warned,
)

if TYPE_CHECKING:
    from launcher.ending.history import HistoryRow
    from launcher.run_text.run_spec import RunSpec
    from launcher.running.follow import Event as RunEvent
    from planner.architecture import Architecture
    from planner.job import Job
    from planner.machine import Card
    from tui.probe_view import ProbeView
    from tui.run_view import RunView
    from tui.session import Session

Post = Callable[[Message], object]
NUM_CANDIDATES = 60
SAMPLE_S = 1.0
RESTING_SAMPLE_S = 5.0


class ScreenNarrator:
    """Narrates to the screen, from the thread that plans."""

    def __init__(self, post: Post, asked: int) -> None:
        self._post, self._asked = post, asked

    def warn(self, message: str) -> None:
        """A passing notice."""
        self._post(Warned(message))

    def traced(self, done: int, of: int, seconds: float) -> None:
        """The line above the plans, and a probe on the screen of runs."""
        self._post(LayersTraced(done, of, seconds, self._asked))


def error_line(error: BaseException | None) -> str:
    """What work ended with that nobody expected there: the system's refusal, or a bug of ours."""
    if isinstance(error, TrlfitError):
        return str(error)
    if isinstance(error, OSError):
        where = f" {error.filename!r}" if error.filename else ""
        return f"the system refused{where}: {error.strerror or error}"
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return str(error)
    return f"bug in trlfit: {type(error).__name__}: {error}"


def this_worker() -> Worker[None]:
    """The worker that runs."""
    return cast("Worker[None]", get_current_worker())


def make_plan(session: Session, asked: int, environ: Mapping[str, str], python: str | None, post: Post) -> None:
    """Read the cards and plan the job of the session.

    Args:
        session: what is asked.
        asked: number of the question.
        environ: the process's environment as it was before cards were left out: all of them are shown.
        python: the training Python.
        post: takes what was found.
    """
    from launcher.nvml.gpus import read_cards
    from launcher.planning import plan_job

    worker = this_worker()
    try:
        reading = read_cards(environ)
        if not worker.is_cancelled:
            post(CardsRead(reading))
        job, origins = session.job()
        outcome = plan_job(job, origins, python, NUM_CANDIDATES, narrator=ScreenNarrator(post, asked))
        message: Message = PlanMade(outcome, asked)
    except TrlfitError as error:
        message = ProblemMet(str(error), asked)
    # An answer to an older question is dropped.
    if not worker.is_cancelled:
        post(message)


def sample_cards(cards: Sequence[Card], rests: Callable[[], bool], post: Post) -> None:
    """Read the cards once a second, less often while nobody looks."""
    from launcher.nvml.gpus import Sampler

    worker = this_worker()
    with Sampler(cards) as sampler:
        while not worker.cancelled_event.wait(RESTING_SAMPLE_S if rests() else SAMPLE_S):
            post(CardsSampled(sampler.sample()))


def inspect_data(job: Job, architecture: Architecture, python: str | None, post: Post) -> None:
    """Look at the first rows of the job's data."""
    from launcher.run_text.run_spec import model_source
    from launcher.writing.data import check_data

    try:
        report = check_data(job, python=python, model_source=model_source(job, architecture))
        post(DataRead(report))
    except TrlfitError as error:
        post(DataRead(None, str(error)))


def trace_layers(view: ProbeView, job: Job, origins: Mapping[str, str], python: str | None, post: Post) -> None:
    """Trace what planning the job asks for with what is installed, and keep it."""
    from launcher.commands.probe import asked_options, probe_text
    from launcher.evidence.coefficient_store import keep
    from launcher.evidence.tracing import trace
    from launcher.planning import plan_inputs

    began, problem = time.monotonic(), ""

    def progress(done: int, of: int, _: float) -> None:
        post(ProbeStepped(view, done, of, "sets of options"))

    try:
        inputs = plan_inputs(job, origins, python, 1, trace=False)
        options = asked_options(inputs)
        document = trace(
            inputs.architecture,
            options,
            python=inputs.stack.python,
            progress=progress,
        )
        keep(document)
        text = probe_text(document, inputs.architecture, options, job.seq_len, time.monotonic() - began)
        post(ProbeSaid(view, text))
    except (TrlfitError, OSError) as error:
        problem = error_line(error)
    post(ProbeEnded(view, problem))


def measure(view: ProbeView, words: Sequence[str], post: Post) -> None:
    """Run `trlfit probe` with ``words`` beside the screens: its steps, its narration and its result, line by line."""
    from launcher.evidence.measuring import step_of
    from launcher.narration import STEPS_AS_EVENTS

    process = subprocess.Popen(
        [sys.executable, "-m", "tui", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, STEPS_AS_EVENTS: "1"},
    )
    view.end_it = lambda: os.killpg(process.pid, signal.SIGINT)
    last = ""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            step = step_of(line)
            if step is not None:
                done, of, what, _ = step
                post(ProbeStepped(view, done, of, what))
                continue
            last = line.strip() or last
            post(ProbeSaid(view, line.rstrip("\n")))
    code = process.wait()
    if code in (ExitCode.INTERRUPTED, -signal.SIGINT):
        last = "ended before it was done; nothing of it is kept"
    post(ProbeEnded(view, "" if code == 0 else (last.removeprefix("trlfit: ") or f"exit code {code}")))


def read_runs(post: Post) -> None:
    """Read the history."""
    from launcher.ending.history import history_rows

    notes: list[str] = []
    rows: list[HistoryRow] = history_rows(None, notes)
    post(RunsRead(rows, notes))


def launch(spec: RunSpec, folder: Path, *, start: bool, dropped: Event, post: Post) -> None:
    """Check and write a run, and start it.

    Args:
        spec: the run.
        folder: its folder.
        start: start it when it is written.
        dropped: set once nobody wants it any more.
        post: takes what is said.
    """
    from launcher.running.runs import start_run
    from launcher.writing.run_writing import write_checked

    try:
        post(LaunchNarrated(f"checking the data and the settings of {folder} in the training Python"))
        write_checked(spec, folder, note=lambda text: post(LaunchNarrated(text)))
        if dropped.is_set():
            post(LaunchRefused(f"dropped; {folder} had been written by then"))
            return
        if start:
            start_run(folder, detach=True)
        post(RunStarted(folder) if start else RunWritten(folder))
    except TrlfitError as error:
        post(LaunchRefused("dropped; nothing was written" if dropped.is_set() else str(error)))


def watch_run(view: RunView, put: Callable[[RunEvent], object], post: Post) -> None:
    """Hand every event of a run to ``put`` until it is over."""
    from launcher.running.follow import follow

    worker = this_worker()
    try:
        for event in follow(view.folder, stopped=lambda: worker.is_cancelled):
            put(event)
    except TrlfitError as error:
        post(RunLost(view, str(error) if view.folder.is_dir() else "its folder is gone"))


def end_run(folder: Path, post: Post) -> None:
    """End a run and everything that it started."""
    from launcher.running.runs import stop_run

    try:
        began = time.monotonic()
        stop_run(folder)
        post(Warned(f"{folder.name} ended in {time.monotonic() - began:.0f} s"))
    except TrlfitError as error:
        post(Warned(str(error)))
