"""The six screens under Pilot, at both sizes, on real plans."""

from __future__ import annotations

import ctypes.util
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from launcher import cli
from launcher.cli import build_parser
from launcher.output import json_lines
from launcher.planning import plan_from_args
from tests.tui.screens import screen_colours, screen_text, wait_for
from tui.app import TrlfitApp
from tui.keys import EVERYWHERE, SCREENS, shown_key
from tui.screens.base import NAMES, PlanningScreen

SIZES = [(80, 24), (120, 36)]
BOTH = pytest.mark.parametrize("size", SIZES)
JOB = "model: Qwen/Qwen3-8B\nmethod: full\nseq_len: 4096\nmachine: 8xH100-80GB\n"

no_driver = pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has a driver")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a history of its own."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "history"))
    for name in ("NO_COLOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return here


@asynccontextmanager
async def session(
    size: tuple[int, int] = (120, 36), job: str | None = JOB
) -> AsyncIterator[tuple[TrlfitApp, Pilot[int]]]:
    """An app whose first plan is made."""
    if job is not None:
        Path("job.yaml").write_text(job)
    app = TrlfitApp()
    async with app.run_test(size=size, notifications=True) as pilot:
        await settled(app, pilot)
        yield app, pilot


async def settled(app: TrlfitApp, pilot: Pilot[int]) -> None:
    """Until the last question is answered."""
    await wait_for(pilot, lambda: not any(w.group == "plan" and not w.is_finished for w in app.workers))
    await pilot.pause()


async def go(pilot: Pilot[int], *keys: str) -> str:
    await pilot.press(*keys)
    await pilot.pause(0.05)
    await pilot.pause()
    return screen_text(pilot.app)


def planned(*words: str) -> dict[str, Any]:
    """What `trlfit plan --json` says about the job of this folder."""
    arguments = build_parser("plan").parse_args(["plan", *(words or ("--job", "job.yaml")), "--top", "60"])
    document: dict[str, Any] = json.loads(json_lines(plan_from_args(arguments).document))
    return document


def row_of(text: str, first: str) -> list[str]:
    """Cells of the table row that begins with a word."""
    return next(line.strip("│ ").split() for line in text.splitlines()[1:] if line.strip("│ ").split()[:1] == [first])


# Screens


@BOTH
async def test_the_screen_is_the_plan_of_the_command(
    size: tuple[int, int],
) -> None:
    async with session(size) as (app, _):
        text = screen_text(app)
        document = planned()
        assert json.dumps(app.known.plan, sort_keys=True) == json.dumps(document, sort_keys=True)
    best = document["best"]
    memory = best["memory"]
    cells = row_of(text, "1")
    for size_bytes in (memory["device_bytes"], memory["headroom_bytes"]):
        assert f"{size_bytes / 2**30:.1f}" in cells
    assert best["choice"]["sharding"] in cells and f"{best['time']['step_s']:.2f}" in cells
    assert f"Peak in {memory['peak_phase']}: {memory['allocated_bytes'] / 2**30:.1f} GiB allocated" in text
    assert " ".join(best["why"][0].split()) in " ".join(text.split())
    for phase in memory["phases"]:
        bar = next(line for line in text.splitlines() if line.strip("│ ").startswith(phase["name"]))
        assert f"{phase['bytes'] / 2**30:.1f}" in bar


@BOTH
async def test_every_screen_by_its_digit(size: tuple[int, int]) -> None:
    async with session(size) as (_, pilot):
        for digit, name in enumerate(NAMES, 1):
            text = await go(pilot, str(digit))
            first, *_, foot = text.splitlines()
            assert f"[{digit} {name.upper()}]" in first and "Qwen3-8B" in first
            assert "? Keys" in foot and "q Quit" in foot and len(foot) <= 78
            assert max(map(len, text.splitlines()), default=0) <= size[0]


async def test_every_key_is_in_the_list() -> None:
    async with session((80, 24)) as (app, pilot):
        for digit, name in ((1, "goal"), (5, "run")):
            await go(pilot, str(digit), "question_mark")
            seen = screen_text(app)
            scroll = app.screen.query_one("VerticalScroll")
            while scroll.scroll_y < scroll.max_scroll_y:
                scroll.scroll_page_down(animate=False)
                await pilot.pause()
                seen += screen_text(app)
            assert "Esc back" in seen
            for key in (*SCREENS[name], *EVERYWHERE):
                assert key.word in seen and shown_key(key.key) in seen, key
            # Letters of the bars are explained where there is no room for the legend.
            assert "W weights, G gradients" in seen
            await go(pilot, "escape")
            assert isinstance(app.screen, PlanningScreen)


def test_no_key_means_two_things() -> None:
    everywhere = {key.key: key.action for key in EVERYWHERE}
    for name, keys in SCREENS.items():
        own = [key.key for key in keys]
        assert len(own) == len(set(own)), name
        # A screen may give a key of everywhere its own sense, and says so in its list.
        assert {key for key in own if key in everywhere} <= {"r", "u"}, name
        assert all(key.says and key.word for key in keys)


async def test_an_example_where_there_is_no_job_file() -> None:
    async with session((80, 24), job=None) as (app, _):
        text = " ".join(screen_text(app).split())
        assert "[1 GOAL]" in text and "Qwen/Qwen3-8B" in text and "lora" in text
        assert app.known.plan is not None


@no_driver
@BOTH
async def test_no_gpu_is_said_and_no_empty_inventory_is_drawn(size: tuple[int, int]) -> None:
    async with session(size) as (_, pilot):
        text = await go(pilot, "1")
    assert "no NVIDIA driver here" in text
    assert "used/total" not in text


# The job


async def test_a_field_is_edited_and_planned_at_once() -> None:
    async with session((80, 24)) as (app, pilot):
        before = app.known.plan
        await go(pilot, "1")
        for _ in range(4):
            await go(pilot, "down")
        text = await go(pilot, "enter")
        assert "max length" in text.rstrip().splitlines()[-1]
        field = app.screen.query_one("#edit-input")
        field.value = ""
        text = await go(pilot, "n", "o")
        assert "is not a number of tokens" in text
        await go(pilot, "enter")
        assert app.known.plan is before
        field.value = ""
        await go(pilot, *"8k", "enter")
        await settled(app, pilot)
        assert "8,192" in screen_text(app)
        expected = planned("--job", "job.yaml", "--seq-len", "8192")
        assert app.known.plan is not None and app.known.plan["best"] == expected["best"]
        await go(pilot, "u")
        await settled(app, pilot)
        assert app.known.plan["job"]["seq_len"] == 4096


async def test_a_choice_is_stepped_through_by_enter() -> None:
    async with session() as (app, pilot):
        await go(pilot, "1", "down", "down", "enter")
        await settled(app, pilot)
        assert app.known.plan is not None and app.known.plan["job"]["method"] == "lora"
        assert "LoRA rank" in screen_text(app)
        await go(pilot, "backspace")
        await settled(app, pilot)
        assert app.known.plan["job"]["method"] == "full"


async def test_escape_leaves_a_field_as_it_was() -> None:
    async with session() as (app, pilot):
        await go(pilot, "1", "enter")
        text = await go(pilot, *"zzz", "escape")
        assert "zzz" not in text
        assert app.known.session.edits == {}
        assert "[2 PLANS]" in await go(pilot, "2")


async def test_a_broken_job_file_is_one_line_until_it_is_mended(folder: Path) -> None:
    async with session((80, 24), "model: Qwen/Qwen3-8B\nseq_len: [\n") as (app, pilot):
        broken = " ".join(screen_text(app).split())
        assert "job file 'job.yaml' line 3" in broken and "Traceback" not in broken
        assert app.known.plan is None
        (folder / "job.yaml").write_text(JOB)
        await go(pilot, "r")
        await settled(app, pilot)
        assert row_of(screen_text(app), "1")
        (folder / "job.yaml").write_text("model: Qwen/Qwen3-8B\nseqlen: 4096\n")
        await go(pilot, "r")
        await settled(app, pilot)
        # The table of the older plan must not stay beside the error.
        text = " ".join(screen_text(app).split())
        assert "seqlen is not a field of a job" in text and "saved activations" not in text


async def test_a_job_is_saved_and_its_command_copied(folder: Path) -> None:
    async with session() as (app, pilot):
        await go(pilot, "1", "down", "down", "enter")
        await settled(app, pilot)
        text = await go(pilot, "y")
        assert app.clipboard == "trlfit plan --job job.yaml --method lora"
        assert app.clipboard in text
        await go(pilot, "w")
        app.screen.query_one("#edit-input").value = "other.yaml"
        await go(pilot, "enter")
        await settled(app, pilot)
        saved = (folder / "other.yaml").read_text()
        assert "method: lora" in saved and "Qwen/Qwen3-8B" in saved
        assert app.known.session.command() == "trlfit plan --job other.yaml"
        assert (folder / "job.yaml").read_text() == JOB


# Plans


async def test_the_bars_follow_the_cursor() -> None:
    async with session() as (app, pilot):
        document = planned()
        second = document["candidates"][1]
        assert second["why"][0] not in screen_text(app)
        text = await go(pilot, "down")
        assert second["why"][0] in text
        text = await go(pilot, "ctrl+end")
        assert "over the card" in text or "into the reserve" in text


async def test_plans_are_filtered_and_sorted() -> None:
    async with session() as (app, pilot):
        everything = app.screen.query_one("#plans").row_count
        await go(pilot, "slash", *"zero3", "enter")
        table = app.screen.query_one("#plans")
        shown = [" ".join(str(cell) for cell in table.get_row_at(row)) for row in range(table.row_count)]
        assert 0 < len(shown) < everything and all("zero3" in row for row in shown)
        await go(pilot, "slash")
        app.screen.query_one("#edit-input").value = ""
        await go(pilot, "enter")
        while "GiB ^" not in screen_text(app):
            await go(pilot, "s")
        column = [str(c.label).split()[0] for c in table.ordered_columns].index("GiB")

        def sizes() -> list[float]:
            return [float(str(table.get_row_at(row)[column])) for row in range(table.row_count)]

        assert sizes() == sorted(sizes()) and len(sizes()) == everything
        await go(pilot, "S")
        assert sizes() == sorted(sizes(), reverse=True)


async def test_two_plans_side_by_side() -> None:
    async with session() as (app, pilot):
        await go(pilot, "space", "down", "down", "down")
        text = await go(pilot, "space")
        first, _, _, fourth = planned()["candidates"][:4]
        assert "Plans 1 and 4" in text and "B - A" in text
        differing = [knob for knob in first["choice"] if first["choice"][knob] != fourth["choice"][knob]]
        assert differing and all(f" {knob} " in text for knob in differing)
        for candidate in (first, fourth):
            assert f"{candidate['memory']['device_bytes'] / 2**30:.1f}" in text
        await go(pilot, "escape")
        assert isinstance(app.screen, PlanningScreen)


async def test_nothing_fits_and_what_would() -> None:
    async with session(job=JOB.replace("8xH100-80GB", "1xRTX4090")) as (app, pilot):
        text = screen_text(app)
        assert "nothing fits as asked" in text and row_of(text, "over")
        assert not any(line.strip("│ ").split()[:1] == ["1"] for line in text.splitlines()[1:])
        assert " !" in text
        text = await go(pilot, "c")
        assert "--method" in text
        await go(pilot, "escape", "L")
        assert "does not fit" in screen_text(app)


# Ledger and files


async def test_the_ledger_adds_up() -> None:
    async with session((120, 36)) as (app, pilot):
        text = await go(pilot, "3")
        table = app.screen.query_one("#groups")
        rows = {
            str(table.get_row_at(row)[0]): [str(c) for c in table.get_row_at(row)] for row in range(table.row_count)
        }
        # Qwen3-8B under FSDP2: fp32 shards, gradients and moments over 8 ranks, no master copy.
        assert rows["embedding"][1:8] == ["622.33 M", "8", "4.00", "4.00", "0.00", "4.00", "4.00"]
        assert rows["embedding"][8] == f"{151_936 * 4096 * 16 / 8 / 2**30:.2f}"
        groups = [row for row in rows.values() if row[1]]
        assert sum(float(row[8]) for row in groups) == pytest.approx(8_190_735_360 * 16 / 8 / 2**30, abs=0.05)
        assert "GiB" in text and "Peak in" in text
        assert "embedding weights: 622,329,856 x 4 B / 8 GPUs = 296.8 MiB" in text
        await go(pilot, *["down"] * (table.row_count - 1))
        assert "[constant, not measured" in screen_text(app) or "[torch" in screen_text(app)


async def test_a_cell_is_edited_and_every_keystroke_is_counted() -> None:
    async with session((80, 24)) as (app, pilot):
        await go(pilot, "3", "down", "down", *["right"] * 3)
        device = app.known.candidate["memory"]["device_bytes"]
        text = await go(pilot, "enter")
        assert "mlp moment1, B/param" in text
        field = app.screen.query_one("#edit-input")
        field.value = ""
        await go(pilot, "1")
        # Three bytes less of 5,435,817,984 parameters over 8 ranks, and of the slack that goes with them.
        less = 3 * 5_435_817_984 / 8 * 1.03
        expected = f"{device / 2**30:.1f} -> {(device - less) / 2**30:.1f} GiB"
        assert expected in screen_text(app)
        text = await go(pilot, "enter")
        assert "1.00*" in text and "1 cell edited" in text
        assert f"{(device - less) / 2**30:.1f} of 79.6" in text
        assert "[edited; the plan says 4.00]" in text
        await go(pilot, "enter")
        app.screen.query_one("#edit-input").value = ""
        text = await go(pilot, "x")
        assert "a number, please" in text
        await go(pilot, "escape")
        assert "1.00*" in screen_text(app)
        text = await go(pilot, "u")
        assert "*" not in text.replace("* ", "") and f"{device / 2**30:.1f} of 79.6" in text
        # Nothing of this is a plan.
        assert app.known.session.edits == {}


async def test_a_pin_of_the_ledger_is_planned() -> None:
    async with session() as (app, pilot):
        await go(pilot, "3", "p")
        text = await go(pilot, *"recompute=all")
        assert "not a value of this knob" in text
        app.screen.query_one("#edit-input").value = "recompute=full"
        await go(pilot, "enter")
        await settled(app, pilot)
        expected = planned("--job", "job.yaml", "--pin", "recompute=full")
        assert app.known.plan is not None and app.known.plan["best"] == expected["best"]
        text = await go(pilot, "t")
        # The textbook's weights are 2 bytes of 8,190,735,360 parameters over 8 devices, here they are 4.
        book, here = (f"{8_190_735_360 * width / 8 / 2**30:.1f}" for width in (2, 4))
        weights = next(line for line in text.splitlines() if "weights" in line and book in line)
        assert here in weights and "stage 3" in text


async def test_the_files_are_those_that_would_be_written(folder: Path) -> None:
    job = JOB + "data:\n  dataset: rows.jsonl\n"
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    async with session((80, 24), job) as (app, pilot):
        text = await go(pilot, "4")
        for name in ("train.py", "accelerate.yaml", "command.sh", "plan.json", "job.yaml"):
            assert name in text
        assert "SFTTrainer" in text
        await go(pilot, "down", "down")
        assert "accelerate launch" in " ".join(screen_text(app).split())
        files, problem = app.known.files()
    assert cli.main(["write", "--job", "job.yaml", "--no-check", "-o", "written"]) == 0
    assert problem == ""
    for name, content in files.items():
        if name != "plan.json":  # lists as many candidates as it was asked for
            assert (folder / "written" / name).read_text() == content, name


async def test_a_plan_for_another_machine_is_not_started(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    async with session(job=JOB + "data:\n  dataset: rows.jsonl\n") as (app, pilot):
        text = await go(pilot, "2", "L")
        assert "this plan is for 8xH100-80GB" in text
        assert isinstance(app.screen, PlanningScreen)
        text = await go(pilot, "4", "W")
        assert "runs/Qwen3-8B-sft-full-1" in text and "command.sh" in text and "W or Enter write" in text
        await go(pilot, "escape")
        assert not (folder / "runs").exists()


async def test_a_refused_launch_is_said_and_over(folder: Path) -> None:
    """The data is there and of no use; what is planned next is narrated as ever, and live runs are shown again."""
    (folder / "rows.jsonl").write_text("no JSON at all")
    job = JOB.replace("8xH100-80GB", "cpu").replace("8B", "0.6B") + "data:\n  dataset: rows.jsonl\n"
    async with session(job=job) as (app, pilot):
        await go(pilot, "L", "L")
        await wait_for(pilot, lambda: "not started" in screen_text(app), 240)
        assert "[5 RUN]" in screen_text(app) and app.known.launching == ""
        await go(pilot, "1", "r")
        await settled(app, pilot)
        assert "the best plan takes" in " ".join(screen_text(app).split())
        assert not (folder / "runs").exists()


async def test_a_launch_on_a_taken_card_is_asked_about(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    job = JOB.replace("8xH100-80GB", "cpu").replace("8B", "0.6B") + "data:\n  dataset: rows.jsonl\n"
    async with session(job=job) as (app, pilot):
        app.known.banner = "GPU 2: 71.0 GiB taken by pid 41022 python since planning; r plans again"
        text = await go(pilot, "L")
        assert app.known.banner in text and "L or Enter write and launch all the same" in text
        await go(pilot, "escape")
        assert not (folder / "runs").exists()


async def test_a_launch_in_haste_waits_for_the_plan_of_the_last_edit(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    job = JOB.replace("8xH100-80GB", "cpu").replace("8B", "0.6B") + "data:\n  dataset: rows.jsonl\n"
    async with session(job=job) as (app, pilot):
        app.pin("recompute=full")
        app.launch()
        assert isinstance(app.screen, PlanningScreen), "the plan on it is of the job before"
        await wait_for(pilot, lambda: "L or Enter write and launch" in screen_text(app))
        assert app.known.plan is not None and app.known.plan["best"]["choice"]["recompute"] == "full"
        await go(pilot, "escape")
        app.pin("recompute=nonsense")
        app.launch()
        await wait_for(pilot, lambda: bool(app.known.problem))
        await go(pilot)
        assert isinstance(app.screen, PlanningScreen)


async def test_a_launch_needs_data() -> None:
    async with session(job=JOB.replace("8xH100-80GB", "cpu").replace("8B", "0.6B")) as (app, pilot):
        await go(pilot, "L")
        assert "data" in screen_text(app) and isinstance(app.screen, PlanningScreen)


# The app


async def test_q_quits() -> None:
    async with session((80, 24)) as (app, pilot):
        assert app.is_running
        await pilot.press("q")
        await wait_for(pilot, lambda: not app.is_running)
    assert app.return_code == 0


async def test_a_bug_is_a_line_and_the_app_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no cards in the deck")

    with monkeypatch.context() as patch:
        patch.setattr("launcher.planning.plan_job", broken)
        Path("job.yaml").write_text(JOB)
        app = TrlfitApp()
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_for(pilot, lambda: "bug in trlfit: ZeroDivisionError: no cards in the deck" in screen_text(app))
            patch.undo()
            await go(pilot, "r")
            await settled(app, pilot)
            assert "the best plan takes" in " ".join((await go(pilot, "1")).split())


async def test_no_color() -> None:
    async def colours(pattern: str) -> set[tuple[int, int, int]]:
        async with session() as (app, pilot):
            found = screen_colours(app)
            text = screen_text(app)
            for digit in pattern:
                await go(pilot, digit)
                found |= screen_colours(app)
            texts.append(text)
            return found

    texts: list[str] = []
    plain = await colours("2")
    assert any(len(set(colour)) > 1 for colour in plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        grey = await colours("123456")
    assert grey and all(len(set(colour)) == 1 for colour in grey)
    assert texts[0] == texts[1]


async def test_a_terminal_may_change_its_size() -> None:
    async with session((120, 36)) as (app, pilot):
        wide = screen_text(app)
        for size in ((80, 24), (60, 20), (20, 5), (1, 1), (5, 40), (200, 50)):
            app.action_replan()  # and while it plans
            await pilot.resize_terminal(*size)
            await pilot.pause()
            text = screen_text(app)
            assert max(map(len, text.splitlines()), default=0) <= size[0]
            if size == (60, 20):
                assert "[2 PLANS]" in text and "small: 80x24 shows all" in text
        await pilot.resize_terminal(120, 36)
        await settled(app, pilot)
        assert screen_text(app) == wide


async def test_the_palette_finds_what_the_keys_do() -> None:
    async with session() as (app, pilot):
        await go(pilot, "ctrl+p")
        text = await go(pilot, *"go: ledger")
        assert "every byte of the chosen plan" in text
        await go(pilot, "enter")
        await wait_for(pilot, lambda: "[3 LEDGER]" in screen_text(app))
        await go(pilot, "ctrl+p", *"export")
        await go(pilot, "enter")
        await wait_for(pilot, lambda: "export the plan as" in screen_text(app))
        await go(pilot, "enter")
        assert json.loads(Path("plan.json").read_text()) == planned()
        await go(pilot, "ctrl+p", *"theme: nord")
        await go(pilot, "enter")
        await wait_for(pilot, lambda: app.theme == "nord")
