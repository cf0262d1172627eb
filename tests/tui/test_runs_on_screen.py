"""Runs on the screen: memory against the prediction, log, history; on run folders whose command is a small script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.ending.history import history_path
from launcher.running.follow import MetricRow, Tail, _news
from launcher.running.runs import run_state, start_run, stop_run
from tests.launcher.fake_run import GIB, PLAN, make_run, rows
from tests.tui.screens import screen_text, wait_for
from tests.tui.test_app import go, session
from tui.run_view import RunView

BOTH = pytest.mark.parametrize("size", [(80, 24), (120, 36)])
STEPS = rows(
    (1, 3.0, 2.2, [40 * GIB, 41 * GIB]), (2, 2.5, 2.0, [51 * GIB, 49 * GIB]), (3, 2.25, 2.1, [50 * GIB, 48 * GIB])
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "history"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return here


def finished(folder: Path, name: str = "one") -> Path:
    """A run that has ended well."""
    script = (
        f"import time\nopen('metrics.jsonl', 'w').write({STEPS!r})\nfor n in range(40):\n    print('log line', n)\n"
    )
    run = make_run(folder / "runs" / name, python=script)
    handle = start_run(run, detach=True)
    assert handle.wait(60).outcome is not None
    return run


@BOTH
async def test_a_run_that_is_over_is_opened_from_the_history(size: tuple[int, int], folder: Path) -> None:
    finished(folder)
    async with session(size) as (app, pilot):
        await wait_for(pilot, lambda: len(app.known.runs) == 1)
        text = await go(pilot, "6")
        row = next(line for line in text.splitlines() if "one" in line)
        # 51 GiB were seen of 50 predicted.
        assert "done" in row and "50.0 GiB" in row and "51.0 GiB" in row and "+2.0%" in row
        assert "peak memory median +2.0%" in text
        await go(pilot, "enter")
        await wait_for(pilot, lambda: "log line 39" in screen_text(app))
        text = screen_text(app)
        assert "[5 RUN]" in text and "one: finished after 3 steps" in text
        assert "step 3" in text and "loss 2.2500" in text and "(predicted 2.00 s)" in text
        ranks = [line for line in text.splitlines() if "rank " in line]
        assert len(ranks) == 2
        assert "50.00" in ranks[0] and "51.00" in ranks[0] and "predicted   50.00" in ranks[0]
        assert "as predicted" in text


async def test_a_word_is_found_in_the_log(folder: Path) -> None:
    run = finished(folder)
    async with session() as (app, pilot):
        app.show_run(run)
        await wait_for(pilot, lambda: "log line 39" in screen_text(app))
        await go(pilot, "slash")
        text = await go(pilot, *"line 7")
        assert "1 line" in text and "1 lines" not in text
        await go(pilot, "enter")
        assert "log line 7" in screen_text(app)
        await go(pilot, "slash")
        app.screen.query_one("#edit-input").value = "nowhere"
        await go(pilot, "enter")
        assert "does not stand in the log" in screen_text(app)


async def test_a_live_run_grows_and_is_cancelled(folder: Path) -> None:
    script = "import time\nfor n in range(3000):\n    print('line', n, flush=True)\n    time.sleep(0.05)\n"
    run = make_run(folder / "runs" / "long", python=script)
    start_run(run, detach=True)
    try:
        async with session((80, 24)) as (app, pilot):
            await wait_for(pilot, lambda: app.known.run_view is not None)
            await go(pilot, "5")
            await wait_for(pilot, lambda: "line 9" in screen_text(app))
            assert "long: running" in screen_text(app)
            text = await go(pilot, "q")
            assert "It goes on without this screen" in text
            await go(pilot, "escape", "X")
            await go(pilot, "X")
            await wait_for(pilot, lambda: "long: stopped" in screen_text(app))
            assert app.is_running
    finally:
        stop_run(run)
    state = run_state(run)
    assert state.outcome is not None and state.outcome.kind == "stopped"


async def test_looking_away_leaves_the_run(folder: Path) -> None:
    run = make_run(folder / "runs" / "long", python="import time\ntime.sleep(300)\n")
    start_run(run, detach=True)
    try:
        async with session() as (app, pilot):
            await wait_for(pilot, lambda: app.known.run_view is not None and app.known.run_view.is_live)
            text = await go(pilot, "5", "D")
            assert app.known.run_view is None and "6 opens it again" in text
            app.show_run(run)
            await wait_for(pilot, lambda: "long: running for" in screen_text(app))
            run.rename(folder / "elsewhere")
            await wait_for(pilot, lambda: "long: its folder is gone" in screen_text(app))
            (folder / "elsewhere").rename(run)
            # What is lost from sight is not asked about.
            await pilot.press("q")
            await wait_for(pilot, lambda: not app.is_running)
        assert run_state(run).stage == "running"
    finally:
        stop_run(run)


async def test_a_run_that_fell_over_says_why(folder: Path) -> None:
    script = "import sys\nprint('about to fall')\nsys.exit('ValueError: no such column: prompt')\n"
    run = make_run(folder / "runs" / "bad", python=script)
    assert start_run(run, detach=False).wait(60).outcome is not None
    async with session() as (app, pilot):
        app.show_run(run)
        await wait_for(pilot, lambda: "about to fall" in screen_text(app))
        outcome = run_state(run).outcome
        assert outcome is not None and " ".join(outcome.sentence.split()[:4]) in screen_text(app)


async def test_the_job_of_a_run_is_planned_again(folder: Path) -> None:
    run = finished(folder)
    (run / "job.yaml").write_text("model: google/gemma-3-1b-pt\nmachine: 1xH100-80GB\n")
    async with session() as (app, pilot):
        await wait_for(pilot, lambda: len(app.known.runs) == 1)
        await go(pilot, "6", "n")
        await wait_for(pilot, lambda: (app.known.plan or {}).get("job", {}).get("model") == "google/gemma-3-1b-pt")
        assert "[1 GOAL]" in screen_text(app)


@BOTH
async def test_nothing_yet(size: tuple[int, int]) -> None:
    history_path().parent.mkdir()
    history_path().write_bytes(b"no record\n\xff\n")
    async with session(size) as (_, pilot):
        assert "No run is watched" in await go(pilot, "5")
        text = await go(pilot, "6")
        assert "No run yet" in text and "note: skipped 2 unreadable lines" in text


def test_what_a_view_makes_of_events(folder: Path) -> None:
    """CPU runs report resident memory: what grows beyond the start row counts."""
    plan = json.loads(json.dumps(PLAN))
    plan["best"]["memory"] |= {"allocated_bytes": 2 * GIB, "low_bytes": GIB, "high_bytes": 3 * GIB}
    run = make_run(folder / "run", plan=plan)
    lines = [
        {"event": "start", "rss_bytes": [GIB, 2 * GIB], "max_steps": 4},
        {"event": "step", "step": 1, "step_s": 2.0, "peak_rss_bytes": [2 * GIB, 5 * GIB], "loss": None},
        {"event": "step", "step": 2, "step_s": 2.0, "peak_rss_bytes": [int(2.5 * GIB), 4 * GIB], "loss": 1.5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "log.txt").write_text("a\rb\nc\n")
    view = RunView(run)
    for event in _news(Tail(run / "log.txt"), Tail(run / "metrics.jsonl"), flush=True):
        view.feed(event)
    assert [(r.rank, r.now_bytes, r.peak_bytes) for r in view.ranks] == [
        (0, int(1.5 * GIB), int(1.5 * GIB)),
        (1, 2 * GIB, 3 * GIB),
    ]
    assert (view.step, view.loss, view.fraction, list(view.lines)) == (2, 1.5, 0.5, ["b", "c"])
    assert list(view.series) == [3 * GIB, 2 * GIB]
    # Resident memory is no measure of tensors, and no verdict is made of it.
    assert view.verdict.startswith("resident memory")


def test_a_view_says_early_whether_a_run_will_hold(folder: Path) -> None:
    """After three rows, as the command line does."""
    plan = json.loads(json.dumps(PLAN))
    plan["best"]["memory"] |= {"allocated_bytes": 2 * GIB, "reserved_bytes": 2 * GIB, "device_bytes": 3 * GIB}
    plan["best"]["memory"] |= {"capacity_bytes": 8 * GIB}
    run = make_run(folder / "run", plan=plan)
    row = {"event": "step", "step_s": 2.0, "peak_allocated_bytes": [2 * GIB], "loss": 1.0}
    view = RunView(run)
    for step in (1, 2, 3):
        assert "will hold" not in view.verdict
        view.feed(MetricRow(row={**row, "step": step}))
    assert view.verdict.startswith("peak 2.0 of 2.0 GiB predicted, will hold")


def test_a_long_log_is_kept_in_part(folder: Path) -> None:
    run = make_run(folder / "run")
    (run / "log.txt").write_text("".join(f"line {n}\n" for n in range(20_000)))
    view = RunView(run)
    for event in _news(Tail(run / "log.txt"), Tail(run / "metrics.jsonl")):
        view.feed(event)
    assert (len(view.lines), view.num_lines, view.lines[-1]) == (5000, 20_000, "line 19999")
