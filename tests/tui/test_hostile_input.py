"""What a person, a file or a slow helper may do to the screens: they stay up, say so, and are left at once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path

import psutil
import pytest
from textual.events import Key

from tests.launcher.fake_run import make_run
from tests.tui.screens import screen_text, wait_for
from tests.tui.test_app import JOB, folder, go, session, settled
from tui.asked import finding
from tui.fields import FIELDS
from tui.leaving import HELPERS
from tui.screens.base import PlanningScreen
from tui.screens.modals import Question, TextBox

__all__ = ["folder"]


async def save_as(pilot, name: str) -> str:  # type: ignore[no-untyped-def]
    await go(pilot, "w")
    pilot.app.screen.query_one("#edit-input").value = name
    return await go(pilot, "enter")


async def test_brackets_are_text_everywhere() -> None:
    async with session() as (app, pilot):
        await go(pilot, "1")
        app.change("data.dataset", "[bold]d[/bold][/x]")
        await settled(app, pilot)
        assert "[bold]d[/bold][/x]" in screen_text(app)
        app.show_run(make_run(Path("runs") / "[bold]x", python="print(1)"))
        await wait_for(pilot, lambda: "[bold]x: written" in screen_text(app))


HOSTILE = "\x1b[31m\a'\"`$(reboot)`\0/../../[/b]\u0663\U0001f917"
"""Controls, quotes, a path, markup, digits and signs of other scripts."""


async def test_every_field_takes_whatever_is_typed() -> None:
    """What is refused keeps the line open with a word; what is not is planned, or said to be no job."""
    async with session((80, 24)) as (app, pilot):
        await go(pilot, "1")
        form, line = app.screen.table("form"), app.screen.edit_line
        typed = [field for field, _, _ in app.known.form_rows() if not field.choices]
        assert len(typed) >= 9
        for field in typed:
            form.move_cursor(row=[row.path for row, _, _ in app.known.form_rows()].index(field.path))
            await pilot.press("enter")
            app.screen.query_one("#edit-input").value = HOSTILE
            await pilot.press("enter")
            if line.is_open:
                assert str(app.screen.query_one("#edit-says").content).strip(), field.path
                await pilot.press("escape")
                continue
            await settled(app, pilot)
            shown = screen_text(app) + app.known.problem
            assert "bug in trlfit" not in shown and "\x1b" not in shown, (field.path, shown)
            # Whether there is such data is looked at by i, and before a launch.
            assert bool(app.known.problem) == (field.path != "data.dataset"), field.path
            await go(pilot, "u")
        await settled(app, pilot)
        assert app.known.session.edits == {} and app.known.plan is not None


async def test_a_mark_goes_with_the_plans_that_it_was_set_in() -> None:
    async with session() as (app, pilot):
        await go(pilot, "end", "space")
        many = len(app.known.candidates)
        app.change("machine", "1xT4")
        await settled(app, pilot)
        assert len(app.known.candidates) < many
        text = await go(pilot, "space")
        assert isinstance(app.screen, PlanningScreen) and "*over" in text


async def test_odd_places_to_save_to_are_a_line_and_nothing_is_replaced_unasked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other.yaml").write_text("precious")
    async with session() as (_, pilot):
        for name, words in (
            ("~nobody-of-that-name/x", "No such file"),
            ("a\0b", "null byte"),
            ("missing/x.yaml", "No such file"),
            ("/", "is a folder"),
            ("/dev/null", "is a device"),
        ):
            assert words in " ".join((await save_as(pilot, name)).split()), name
            await go(pilot, "escape")
        assert not Path("/dev/null").is_file()

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("launcher.files.os.fsync", full)
            assert "No space left on device" in " ".join((await save_as(pilot, "job.yaml")).split())
        assert (folder / "job.yaml").read_text() == JOB and [path.name for path in folder.glob(".*")] == []
        await go(pilot, "escape")
        assert "Enter once more replaces it" in await save_as(pilot, "other.yaml")
        assert (folder / "other.yaml").read_text() == "precious"
        await go(pilot, "enter")
        assert "Qwen/Qwen3-8B" in (folder / "other.yaml").read_text()


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x.jsonl", "x" * 300, "a\0b"])
def test_data_of_an_odd_name_are_a_file_that_is_not_here(name: str) -> None:
    field = next(field for field in FIELDS if field.path == "data.dataset")
    plan = {"job": {"data": {"dataset": name}}}
    assert finding(field, plan, None).startswith("no file of this name here")


async def test_nothing_is_undone_over_another_file() -> None:
    async with session() as (app, pilot):
        app.change("method", "lora")
        await save_as(pilot, "lora.yaml")
        await settled(app, pilot)
        await go(pilot, "u")
        assert "nothing to undo" in screen_text(app)
        assert app.known.session.job()[0].method == "lora"


@pytest.mark.parametrize("editor", ["'no end", " ", "/no/such/editor"])
async def test_an_editor_that_does_not_start_is_a_line(editor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", editor)
    async with session(job=JOB + "data: {dataset: rows.jsonl}\n") as (app, pilot):
        text = await go(pilot, "4", "e")
        assert "does not start" in text or "no editor can be opened here" in text
        assert app.is_running


@pytest.mark.parametrize("kind", ["large", "pipe"])
async def test_a_job_file_that_cannot_be_read_at_every_key_is_refused(kind: str, folder: Path) -> None:
    if kind == "pipe":
        os.mkfifo(folder / "job.yaml")
    else:
        (folder / "job.yaml").write_text(JOB + "trl:\n" + "".join(f"  k{n}: {n}\n" for n in range(10_000)))
    app_session = session(job=None)
    began = time.monotonic()
    async with app_session as (app, pilot):
        app.known.session.file = Path("job.yaml")
        await go(pilot, "1", "r")
        await settled(app, pilot)
        text = " ".join((await go(pilot, "1")).split())
        assert ("no plain file" if kind == "pipe" else "larger than 64 KiB") in text
    assert time.monotonic() - began < 20


async def test_a_plan_json_of_nonsense_is_drawn() -> None:
    async with session() as (app, pilot):
        run = make_run(Path("runs") / "odd", python="print(1)")
        sizes = {"allocated_bytes": -5_000_000, "capacity_bytes": -1, "device_bytes": 0}
        (run / "plan.json").write_text(json.dumps({"best": {"memory": sizes}}))
        row = {"event": "step", "step": 1, "peak_allocated_bytes": [10**28, -1, "a", None]}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        app.show_run(run)
        await wait_for(pilot, lambda: "rank 0" in screen_text(app))


def helpers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if any(HELPERS in word for word in p.cmdline())]


async def test_quitting_waits_for_no_helper(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    slow = folder / "python"
    slow.write_text("#!/bin/sh\nsleep 600\n")
    slow.chmod(0o755)
    began = 0.0
    async with session(job=JOB + "data: {dataset: rows.jsonl}\n") as (app, pilot):
        app.known.python = str(slow)
        await go(pilot, "1", "i")
        await wait_for(pilot, lambda: bool(helpers()))
        began = time.monotonic()
        await pilot.press("q")
        await wait_for(pilot, lambda: not app.is_running)
    # The end of asyncio's loop waits for its threads.
    await asyncio.get_running_loop().shutdown_default_executor()
    assert time.monotonic() - began < 10
    assert not helpers()


async def test_a_launch_that_is_being_checked_is_not_dropped_unasked(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    slow = folder / "python"
    slow.write_text("#!/bin/sh\nsleep 600\n")
    slow.chmod(0o755)
    async with session(job=JOB + "data: {dataset: rows.jsonl}\n") as (app, pilot):
        app.known.python = str(slow)
        await go(pilot, "4", "W", "W")
        await wait_for(pilot, lambda: bool(helpers()))
        await go(pilot, "q")
        assert isinstance(app.screen, Question) and "leaving drops it" in screen_text(app)
        await go(pilot, "d")
        await wait_for(pilot, lambda: not app.is_running)
    assert not (folder / "runs").exists()


async def test_a_launch_that_is_being_checked_can_be_dropped(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    slow = folder / "python"
    slow.write_text("#!/bin/sh\nsleep 600\n")
    slow.chmod(0o755)
    async with session(job=JOB + "data: {dataset: rows.jsonl}\n") as (app, pilot):
        app.known.python = str(slow)
        await go(pilot, "4", "W", "W", "5")
        await wait_for(pilot, lambda: bool(helpers()))
        assert "Drop it?" in await go(pilot, "X")
        await go(pilot, "X")
        await wait_for(pilot, lambda: "not started: dropped; nothing was written" in screen_text(app))
        assert not helpers() and app.known.launching == ""
        # The next one may be asked for.
        assert "job.yaml" in await go(pilot, "4", "W")
        assert not (folder / "runs").exists()


async def test_a_key_typed_twice_in_haste_closes_one_box() -> None:
    async with session() as (app, pilot):
        answers: list[str | None] = []
        question, words = Question("Quit", "Really?", [("X", "end it")]), TextBox("Words", lambda width: "some")
        app.push_screen(question, answers.append)
        await pilot.pause()
        for _ in range(3):  # all of them before the first is looked at
            question.post_message(Key("X", "X"))
        await wait_for(pilot, lambda: isinstance(app.screen, PlanningScreen))
        app.push_screen(words, answers.append)
        await pilot.pause()
        for _ in range(2):
            words.dismiss("")
        await wait_for(pilot, lambda: isinstance(app.screen, PlanningScreen))
        await pilot.pause()
        assert answers == ["X", ""] and app.is_running and "[2 PLANS]" in screen_text(app)
