"""What somebody meets who opens the screens for the first time: names, edges, narrow tables, keys at the wrong time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.command import CommandList

from launcher.ending.outcomes import Outcome
from launcher.nvml.gpus import CardSample
from launcher.running.follow import MetricRow, StateChange
from launcher.running.runs import RunState
from planner.machine import Card
from tests.launcher.fake_run import GIB, make_run
from tests.tui.screens import screen_text, wait_for
from tests.tui.test_app import JOB, SIZES, folder, go, planned, row_of, session, settled
from tui import app as app_module
from tui import asked
from tui.cells import card_row, plan_row, reason_lines, shown_candidates
from tui.memory_bars import legend, memory_bars, short_legend
from tui.probe_view import ProbeView
from tui.run_view import RunView
from tui.session import Session

__all__ = ["folder"]
TWO_CARDS = {
    "schema": "trlfit.machine/1",
    "origin": "file",
    "spec": "box",
    "cards": [
        {"index": n, "name": "NVIDIA GeForce RTX 3090", "card_id": "RTX3090", "total_bytes": 24 * GIB,
         "used_bytes": used, "free_bytes": 24 * GIB - used, "compute_capability": "8.6"}
        for n, used in enumerate((0, 9 * GIB))
    ],
    "host": {"cores": 16, "total_bytes": 128 * GIB, "available_bytes": 20 * GIB},
}  # fmt: skip


def two_cards() -> str:
    """A job for two cards of which others have one in part, in a host of little memory."""
    Path("box.json").write_text(json.dumps(TWO_CARDS))
    return "model: Qwen/Qwen3-8B\nmethod: lora\nmachine: box.json\n"


# Plans


@pytest.mark.parametrize("size", SIZES)
async def test_what_others_hold_of_a_card_is_drawn(size: tuple[int, int]) -> None:
    async with session(size, two_cards()) as (app, _):
        text = screen_text(app)
        candidate = app.known.candidate
        assert candidate is not None and len(candidate["cards"]) == 2
        assert "of 24.0 on a card, 9.0 taken" in text
        assert "T9▚" in text and ("T taken by others" in text if size[1] < 30 else "T▚ taken by others 9.0" in text)


async def test_a_row_says_whether_the_card_or_the_host_is_too_small() -> None:
    async with session((120, 36), two_cards()) as (app, pilot):
        assert row_of(screen_text(app), "host")
        assert app.known.plan is not None and app.known.outcome is not None
        misses = app.known.outcome.result.near_misses
        assert {c.verdict.host_fits for c in misses} == {True, False}
        for place, candidate in enumerate(app.known.candidates):
            found = app.known._searched(place)
            assert found is not None
            assert (plan_row(1, candidate)[0] == "host") == (not found.verdict.host_fits)
        app.known.chosen = [plan_row(1, candidate)[0] for candidate in app.known.candidates].index("host")
        await go(pilot, "1", "2")
        assert "the host has 20.0 GiB free; the card has room" in screen_text(app)
        # It has no number of a plan that fits.
        assert "Ledger of miss 1" in await go(pilot, "3")


async def test_all_reasons_are_read_on_a_small_screen() -> None:
    async with session((80, 24), two_cards()) as (app, pilot):
        assert "e shows all, with time" in screen_text(app)
        alone = next(n for n, c in enumerate(app.known.candidates) if len(c["cards"]) == 1)
        await go(pilot, *["down"] * alone)
        text = " ".join((await go(pilot, "e")).replace("│", " ").split())
        candidate = app.known.candidate
        assert candidate is not None
        for reason in candidate["why"]:
            assert " ".join(reason.split()) in text
        assert f"cards {candidate['cards'][0]} of 0, 1" in text and "tokens/s" in text and "W█ weights" in text


def test_reasons_of_what_fits_say_nothing_of_the_host() -> None:
    Path("job.yaml").write_text(JOB)
    best = shown_candidates(planned())[0]
    assert reason_lines(best, {"available_bytes": 1}) == reason_lines(best)


# Bars


def memory(**gib: float) -> dict[str, object]:
    parts = {name: int(size * GIB) for name, size in gib.items()}
    return {"phases": [{"name": "loss", "parts": parts}], "peak_phase": "loss", "capacity_bytes": 80 * GIB}


@pytest.mark.parametrize("unicode", [True, False])
def test_the_edge_of_the_card_is_drawn_inside_a_bar_that_is_over_it(unicode: bool) -> None:
    line = memory_bars(memory(weights=160), width=118, unicode=unicode).plain
    # 100 cells of bar for 160 GiB and 2 %: the card's 80 end at cell 49.
    assert len(line) == 118 and line[10 + 49] == ("┃" if unicode else "|") and line.endswith("160.0 !")


def test_what_others_hold_ends_at_the_edge_and_counts() -> None:
    held = memory_bars(memory(weights=40), width=100, taken=30 * GIB).plain
    free = memory_bars(memory(weights=40), width=100).plain
    assert len(held) == len(free) and held.index("┃") == free.index("┃")
    assert held[: held.index("T30▚")] == free[: held.index("T30▚")] and held[held.index("┃") - 1] == "▚"
    assert held.rstrip().endswith("40.0") and "▚" not in free
    # 60 of 80 GiB is too much where others hold 30, and is drawn over theirs.
    over = memory_bars(memory(weights=60), width=100, taken=30 * GIB).plain
    assert over.rstrip().endswith("60.0 !") and "┃" in over


def test_no_entry_of_the_legend_is_broken() -> None:
    full = memory(weights=10, gradients=10, moment1=10, saved_activations=10, recompute=10, loss=10, slack=10)
    for width in (30, 60, 76, 116):
        lines = legend(full, width=width, taken=3 * GIB).plain.splitlines()
        assert max(map(len, lines)) <= max(width, 28)
        assert [entry[0] for line in lines for entry in line.split("   ")] == list("WGOARLXT")
    assert short_legend(full, width=76).startswith("W weights  G gradients  O moments  A saved  R working  L loss")
    assert len(short_legend(full, width=20)) <= 20


# Ledger


async def test_every_number_of_the_ledger_is_whole_on_a_narrow_terminal() -> None:
    async with session((80, 24), JOB + "pins: {recompute: full}\n") as (app, pilot):
        text = await go(pilot, "3")
        # The cursor is on a value from the start, and what it stands on is said.
        assert "embedding weights: 622,329,856 x 4 B / 8 GPUs" in text
        assert f"{151_936 * 4096 * 16 / 8 / 2**30:.2f}" in row_of(text, "embedding")
        table = app.screen.query_one("#groups")
        assert table.virtual_size.width <= 78
        await go(pilot, "enter", "2", "enter")
        await pilot.resize_terminal(120, 36)
        text = await go(pilot)
        # Another width brings the columns that were left out; edits and the cursor stay.
        assert row_of(text, "embedding")[1:5] == ["622.33", "M", "8", "2.00*"]
        assert "embedding weights: 622,329,856 x 2 B" in text
        await pilot.resize_terminal(60, 15)
        await go(pilot, *["right"] * 4)
        assert "embedding moment2" in await go(pilot, "enter")


async def test_a_cell_that_holds_no_value_says_so() -> None:
    async with session((80, 24)) as (app, pilot):
        text = await go(pilot, "3", "left", "left", "enter")
        assert "choose a value to set" in text and not app.screen.edit_line.is_open


# What is typed


async def test_enter_takes_the_one_thing_that_begins_so() -> None:
    async with session() as (app, pilot):
        text = await go(pilot, "3", "p", *"recom")
        assert "recompute=" in text
        # A knob has no value yet, so that the line stays open with it.
        await go(pilot, "enter")
        assert app.screen.edit_line.is_open and app.screen.query_one("#edit-input").value == "recompute="
        await go(pilot, *"sel", "enter")
        await settled(app, pilot)
        assert not app.screen.edit_line.is_open
        assert app.known.session.edits == {"pins.recompute": "selective"}


async def test_a_name_that_is_no_file_is_taken_for_one_of_the_hub(folder: Path) -> None:
    (folder / "rows.jsonl").touch()
    async with session((120, 36)) as (app, pilot):
        app.change("data.dataset", "rows")
        await settled(app, pilot)
        assert "no file of this name here: a hub id" in await go(pilot, "1")
        app.change("data.dataset", "rows.jsonl")
        await settled(app, pilot)
        assert "a hub id; i counts" not in screen_text(app)
        app.known.outcome = None
        assert "looked at when there is a plan" in " ".join((await go(pilot, "i")).split())


# Goal


async def test_the_form_says_where_the_job_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with session((80, 24), None) as (app, pilot):
        assert "Goal  an example; w saves a job" in screen_text(app)
        app.change("seq_len", 2048)
        await settled(app, pilot)
        assert "Goal  in no file yet; w saves it" in screen_text(app) and app.known.session.is_unsaved
        await go(pilot, "w", "enter")
        assert "Goal  job.yaml " in screen_text(app) and not app.known.session.is_unsaved
        app.change("seq_len", 1024)
        await settled(app, pilot)
        assert "job.yaml, changed here; w saves it" in screen_text(app)


async def test_pins_are_seen_and_taken_out() -> None:
    async with session((120, 36)) as (app, pilot):
        app.pin("recompute=full")
        await settled(app, pilot)
        text = await go(pilot, "1", "end")
        assert row_of(text, "pins")[:2] == ["pins", "recompute=full"]
        await go(pilot, "enter", "end", *", sharding=zero3")
        assert "sharding=zero3" in screen_text(app)
        await go(pilot, "enter")
        await settled(app, pilot)
        best = app.known.candidates[0]["choice"]
        assert (best["recompute"], best["sharding"]) == ("full", "zero3")
        await go(pilot, "backspace")
        await settled(app, pilot)
        assert app.known.session.job()[0].pins == {}


def test_leaving_says_the_command_of_a_job_that_no_file_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app_module.TrlfitApp, "run", lambda self: 0)
    monkeypatch.setattr(Session, "here", lambda file: Session(edits={"model": "Qwen/Qwen3-4B", "seq_len": 2048}))
    assert app_module.run_app() == 0
    assert capsys.readouterr().err.endswith("the same again: trlfit plan Qwen/Qwen3-4B --seq-len 2048\n")
    monkeypatch.setattr(Session, "here", lambda file: Session(edits={"model": "Qwen/Qwen3-8B", "method": "lora"}))
    assert app_module.run_app() == 0
    assert capsys.readouterr().err == ""


def test_a_step_of_hours_is_not_called_fine() -> None:
    Path("job.yaml").write_text(JOB)
    plan = planned()
    assert asked.checks(plan, "", "", None, "")[0].startswith("ok    the best plan takes")
    plan["best"]["time"]["step_s"] = 4e6
    assert asked.checks(plan, "", "", None, "")[0].startswith("slow  the best plan takes")
    plan["best"]["memory"]["device_bytes"] = 20 * 2**20
    assert "takes 20.0 MiB of each card" in asked.checks(plan, "", "", None, "")[0]


def test_cards_left_out_are_said_by_number() -> None:
    Path("job.yaml").write_text(JOB)
    plan = planned()
    plan["machine"]["notes"] = ["CUDA_VISIBLE_DEVICES=GPU-0001 leaves out 1 card", "a fan is broken"]
    lines = asked.checks(plan, "", "", None, "", [0, 3])
    assert "note  left out above: card 0, 3" in lines and "note  a fan is broken" in lines
    assert not any("CUDA_VISIBLE" in line for line in lines)
    assert any("CUDA_VISIBLE" in line for line in asked.checks(plan, "", "", None, ""))


def test_processes_that_cannot_be_seen_are_not_called_none() -> None:
    card = Card(index=0, name="NVIDIA A", total_bytes=24 * GIB, free_bytes=15 * GIB)
    sample = CardSample(index=0, used_bytes=9 * GIB, unknown={"processes": "it runs outside this container"})
    assert card_row(card, None)[-1] == "none" and card_row(card, sample)[-1] == "not in sight"


# Runs and probes


async def test_one_launch_at_a_time(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    async with session((80, 24), JOB + "data: {dataset: rows.jsonl}\n") as (app, pilot):
        app.known.launching = "checking the data of runs/one"
        text = " ".join((await go(pilot, "2", "L")).split())
        assert "a run is being written or checked" in text and "command.sh" not in text


def test_a_run_that_was_stopped_has_no_time_left(folder: Path) -> None:
    run = make_run(folder / "run")
    view = RunView(run)
    view.feed(MetricRow(row={"event": "start", "max_steps": 100}))
    for step in (1, 2, 3):
        view.feed(MetricRow(row={"event": "step", "step": step, "step_s": 2.0, "tokens": 100, "loss": 1.0}))
    assert view.line.endswith(" left")
    ended = Outcome(kind="stopped", sentence="stopped by somebody")
    view.feed(StateChange(state=RunState(folder=run, stage="over", outcome=ended)))
    assert "step 3/100" in view.line and "left" not in view.line


async def test_what_a_probe_says_is_not_cut() -> None:
    said = "1 and 2 layers of the job on the host: takes about 0.1 GiB and never more than the 12.3 GiB that are free"
    async with session((80, 24)) as (app, pilot):
        view = app.known.probe = ProbeView("steps of a model")
        view.say(said)
        text = await go(pilot, "5")
        assert said in " ".join(text.replace("│", " ").split()) and "Log  1 line," in text
        await pilot.resize_terminal(120, 36)
        await wait_for(pilot, lambda: said in screen_text(app))
        # A word is found in the line where it stands.
        await go(pilot, "slash", *"free", "enter")
        assert app.screen._found_at == 0  # type: ignore[attr-defined]


async def test_a_page_key_ends_nothing_where_the_list_of_the_palette_has_no_room() -> None:
    async with session((80, 24)) as (app, pilot):
        await pilot.resize_terminal(120, 4)
        await go(pilot, "ctrl+p", *"goal")
        found = app.screen.query_one(CommandList)
        await wait_for(pilot, lambda: found.option_count > 0)
        await go(pilot, "down", "pageup", "pagedown", "pageup", "escape")
        assert app.is_running and len(app.screen_stack) == 1


async def test_the_palette_is_drawn_in_ascii_where_there_is_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    async with session((80, 24)) as (app, pilot):
        await go(pilot, "ctrl+p")
        await wait_for(pilot, lambda: "go: goal" in screen_text(app))
        text = screen_text(app)
        assert text.isascii(), {sign for sign in text if not sign.isascii()}
        assert "Search for commands" in text
