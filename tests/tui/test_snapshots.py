"""A few screens as pictures: colours, frames and alignment, which the tests of texts do not see.

    RENEW_SNAPSHOTS=1 pytest tests/tui/test_snapshots.py    draws them anew; look at them before committing

The plan on them is a file, so that they change with the screens alone. Ids, fonts and clip paths are left out.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from textual.pilot import Pilot

from launcher.nvml.gpus import CardSample
from launcher.nvml.reading import CardsReading
from launcher.running.follow import LogLine, MetricRow, StateChange
from launcher.running.runs import RunState
from planner.machine import Card
from tests.launcher.fake_run import GIB, make_run
from tests.tui.test_app import folder, go
from tests.tui.test_goal_screen import report
from tui.app import TrlfitApp
from tui.messages import CardsRead, CardsSampled, DataRead, PlanMade
from tui.run_view import RunView

__all__ = ["folder"]
SNAPSHOTS = Path(__file__).with_name("snapshots")
RENEW = "RENEW_SNAPSHOTS"
_LEFT_OUT = re.compile(
    r"@font-face \{.*?\}\s*|<clipPath.*?</clipPath>\s*| clip-path=\"[^\"]*\"| textLength=\"[^\"]*\"|terminal-\d+-",
    re.DOTALL,
)


def normal(svg: str) -> str:
    """The picture without what differs from drawing to drawing."""
    lines = _LEFT_OUT.sub("", svg).replace("<text", "\n<text").replace("<rect", "\n<rect").splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


async def check(app: TrlfitApp, pilot: Pilot[int], name: str) -> None:
    """Hold the screen against its picture, once it has settled: a box knows its scrollbar a moment after its text."""
    path, found = SNAPSHOTS / f"{name}.svg", normal(app.export_screenshot(title=name))
    if os.environ.get(RENEW):
        await pilot.pause(1.0)
        path.write_text(normal(app.export_screenshot(title=name)), encoding="utf-8")
    until = time.monotonic() + 10
    while found != path.read_text(encoding="utf-8") and time.monotonic() < until:
        await pilot.pause(0.2)
        found = normal(app.export_screenshot(title=name))
    assert path.stat().st_size < 50_000
    assert found == path.read_text(encoding="utf-8"), f"{path.name} looks different; {RENEW}=1 draws it anew"


@asynccontextmanager
async def drawn(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[TrlfitApp, Pilot[int]]]:
    """An app that plans nothing and shows the plan of the file."""
    document: dict[str, Any] = json.loads((SNAPSHOTS / "plan.json").read_text(encoding="utf-8"))
    Path("job.yaml").write_text(
        "model: Qwen/Qwen3-8B\nmachine: 8xH100-80GB\nmethod: full\ndata: {dataset: rows.jsonl}\n", encoding="utf-8"
    )
    monkeypatch.setattr(TrlfitApp, "_plan_again", lambda self: None)
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    app = TrlfitApp()
    async with app.run_test(size=size, notifications=True) as pilot:
        inputs = SimpleNamespace(machine=SimpleNamespace(origin="named"))
        outcome = SimpleNamespace(document=document, problem=SimpleNamespace(inputs=inputs))
        app.post_message(PlanMade(cast("Any", outcome), app.known.asked))
        await go(pilot)
        yield app, pilot


async def test_plans_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drawn((80, 24), monkeypatch) as (app, pilot):
        await go(pilot, "down")
        await check(app, pilot, "plans")
        await go(pilot, "question_mark")
        await check(app, pilot, "keys")


async def test_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drawn((80, 30), monkeypatch) as (app, pilot):
        card = Card(index=0, name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, free_bytes=80 * GIB)
        cards = (card, card.model_copy(update={"index": 1}))
        monkeypatch.setattr(app, "_in_thread", lambda group, work: None)
        app.post_message(CardsRead(CardsReading(cards=cards, driver="580.65")))
        samples = [
            CardSample(index=n, used_bytes=n * 12 * GIB, utilisation_percent=n * 97, temperature_c=31, power_w=70.0)
            for n in (0, 1)
        ]
        app.post_message(CardsSampled(samples))
        app.post_message(DataRead(report([*range(50, 850), *range(3900, 4200, 10)])))
        await go(pilot, "1", "down", "down")
        await check(app, pilot, "goal")


async def test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(Path("runs") / "one")
    async with drawn((80, 24), monkeypatch) as (app, pilot):
        view = app.known.run_view = RunView(run)
        view.feed(StateChange(state=RunState(folder=run, stage="running")))
        view.feed(MetricRow(row={"event": "start", "max_steps": 8}))
        for step in (1, 2, 3):
            view.feed(LogLine(text=f"{{'loss': {3 - step / 4}}}"))
            row = {"event": "step", "step": step, "loss": 3 - step / 4, "step_s": 2.1, "tokens": 8192}
            view.feed(MetricRow(row={**row, "peak_allocated_bytes": [(40 + step) * GIB, 49 * GIB]}))
        await go(pilot, "5")
        await check(app, pilot, "run")
