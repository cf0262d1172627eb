"""Probes on the screen of runs: what they narrate, what they find, how they are ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tui.screens import screen_text, wait_for
from tests.tui.test_app import JOB, folder, go, session, settled
from tui import work_in_threads
from tui.messages import LayersTraced, PlanMade
from tui.probe_view import ProbeView

__all__ = ["folder"]
ROOT = Path(__file__).resolve().parents[2]
NARRATES = f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nfrom launcher.narration import narrate_step\n"
"""Beginning of a script that narrates as the command does."""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A Python that runs ``script``, whatever module it is asked for."""
    (folder / "script.py").write_text(script)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > words\nexec {sys.executable} script.py\n')
    python.chmod(0o755)
    monkeypatch.setattr(work_in_threads.sys, "executable", str(python))


def test_a_view_keeps_steps_and_words_apart() -> None:
    view = ProbeView("rates")
    view.say("trlfit: rates on GPU 0: takes about 2.0 GiB\ntrlfit: 2 of 4: streaming")
    assert view.fraction is None and view.lines[0] == "rates on GPU 0: takes about 2.0 GiB"
    view.step(1, 4, "streaming")
    assert (view.fraction, view.line) == (0.25, "1 of 4: streaming")
    view.say("bf16 product  41.2 TFLOP/s")
    assert list(view.lines)[-1] == "bf16 product  41.2 TFLOP/s" and view.num_lines == 3
    view.end("")
    assert not view.is_live and view.fraction == 1.0 and "done after" in view.title()


async def test_a_measurement_is_shown_and_planned_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        folder,
        monkeypatch,
        f"{NARRATES}narrate_step(0, 3, 'products', 0.5)\n"
        "while not os.path.exists('go'): time.sleep(0.05)\nprint('memory 3,350 GB/s')\n",
    )
    async with session((80, 24)) as (app, pilot):
        edition = app.known.edition
        text = await go(pilot, "P")
        assert "trlfit probe --job job.yaml --rates" in text
        await go(pilot, "down", "enter")
        await wait_for(pilot, lambda: "0 of 3: products" in screen_text(app))
        assert "1 of 3: products" in screen_text(app), "the narration stays in the log"
        assert "[5 RUN]" in screen_text(app) and "Probe: rates of this machine, running" in screen_text(app)
        assert "leaving ends it" in await go(pilot, "q")
        await go(pilot, "escape")
        (folder / "go").touch()
        await wait_for(pilot, lambda: "memory 3,350 GB/s" in screen_text(app) and app.known.edition > edition)
        assert "done after" in screen_text(app)
        assert "the best plan was" in screen_text(app)  # and is, with what was measured
        assert (folder / "words").read_text().split() == ["-m", "tui", "probe", "--job", "job.yaml", "--rates"]
        # Looking away from it shows runs again.
        assert "No run is watched" in await go(pilot, "D")


async def test_rates_take_the_machine_of_a_changed_job_and_nothing_else() -> None:
    async with session((80, 24)) as (app, pilot):
        app.change("method", "lora")
        app.change("machine", "cpu")
        text = await go(pilot, "P")
        assert "trlfit probe --job job.yaml --machine cpu --rates" in text
        assert "--method lora --machine cpu --measure" in text


async def test_a_measurement_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(folder, monkeypatch, f"{NARRATES}narrate_step(0, 2, 'x', 0.5)\ntime.sleep(600)\n")
    async with session() as (app, pilot):
        await go(pilot, "P", "down", "enter")
        await wait_for(pilot, lambda: "0 of 2: x" in screen_text(app))
        await go(pilot, "X", "X")
        await wait_for(pilot, lambda: "nothing of it is kept" in screen_text(app))


async def test_a_trace_of_planning_is_shown_in_the_same_place(folder: Path) -> None:
    async with session() as (app, pilot):
        outcome = app.known.outcome
        assert outcome is not None
        await go(pilot, "5")
        app.post_message(LayersTraced(1, 4, 2.0, app.known.asked - 1))  # of a question that was replaced
        app.post_message(LayersTraced(2, 4, 3.0, app.known.asked))
        await wait_for(pilot, lambda: "2 of 4" in screen_text(app))
        text = screen_text(app)
        assert "trace of the model's layers" in text and "50%" in text
        app.post_message(PlanMade(outcome, app.known.asked))
        await wait_for(pilot, lambda: "done after" in screen_text(app))
        (folder / "job.yaml").write_text(JOB.replace("4096", "2048"))
        app.action_replan()
        await settled(app, pilot)
        assert "No run is watched" in screen_text(app)
