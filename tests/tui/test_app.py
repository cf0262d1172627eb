from __future__ import annotations

import ctypes.util
import json
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable

from launcher import cli
from tests.tui.screens import screen_colours, screen_text, wait_for
from tui import app as app_module
from tui.app import TrlfitApp

SIZES = [(80, 24), (120, 36)]
JOB = "model: Qwen/Qwen3-8B\nmethod: full\nseq_len: 4096\nmachine: 8xH100-80GB\n"

no_driver = pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has a driver")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path


def plan_of_the_command(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `trlfit plan` says about the job of this folder."""
    assert cli.main(["plan", "--job", "job.yaml", "--json", "--top", "12"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def rows_of(app: TrlfitApp) -> int:
    return app.query_one("#plans", DataTable).row_count


def line_with(text: str, *parts: str) -> str:
    """The only line that holds all parts."""
    found = [line for line in text.splitlines() if all(part in line for part in parts)]
    assert len(found) == 1, text
    return found[0]


@pytest.mark.parametrize("size", SIZES)
async def test_the_plan_of_a_job_file(size: tuple[int, int], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(JOB)
    best = plan_of_the_command(capsys)["best"]
    app = TrlfitApp()
    async with app.run_test(size=size) as pilot:
        await wait_for(pilot, lambda: rows_of(app) > 0)
        text = screen_text(app)
    head = " ".join(text.splitlines()[:2])
    assert "Qwen/Qwen3-8B  sft full  4,096 tokens  global batch 8  on 8 x H100-80GB" in " ".join(head.split(" "))
    assert "(job.yaml)" in head
    columns = line_with(text, "GiB", "free", "step").split()
    assert columns[:5] == ["#", "GiB", "free", "step", "GPUs"]
    first = next(line for line in text.splitlines() if line.split()[:1] == ["1"]).split()
    memory, time = best["memory"], best["time"]
    assert first[1:3] == [gib(memory["device_bytes"]), gib(memory["headroom_bytes"])]
    assert first[3:5] == [f"{time['step_s']:.2f}", "s"]
    assert first[5:7] == [str(best["num_gpus"]), best["choice"]["sharding"]]
    # The reason stands at the foot; a narrow screen wraps it.
    assert " ".join(best["why"][0].split()) in " ".join(text.split())
    assert "r Plan again" in text and "q Quit" in text


@pytest.mark.parametrize("size", SIZES)
async def test_an_example_where_there_is_no_job_file(size: tuple[int, int], folder: Path) -> None:
    app = TrlfitApp()
    async with app.run_test(size=size) as pilot:
        await wait_for(pilot, lambda: rows_of(app) > 0)
        text = screen_text(app)
    flat = " ".join(text.split())
    assert "Qwen/Qwen3-8B sft lora 4,096 tokens" in flat
    assert "(no job.yaml here, so an example)" in flat
    assert any(line.split()[:1] in (["1"], ["over"]) for line in text.splitlines())


@no_driver
@pytest.mark.parametrize("size", SIZES)
async def test_no_gpu_is_said_and_no_empty_inventory_is_drawn(size: tuple[int, int], folder: Path) -> None:
    app = TrlfitApp()
    async with app.run_test(size=size) as pilot:
        await wait_for(pilot, lambda: rows_of(app) > 0)
        text = screen_text(app)
    assert "no NVIDIA driver here" in text
    assert "used/total" not in text


@pytest.mark.parametrize("size", SIZES)
async def test_a_broken_job_file_is_one_line_until_it_is_mended(size: tuple[int, int], folder: Path) -> None:
    job = folder / "job.yaml"
    job.write_text("model: Qwen/Qwen3-8B\nseq_len: [\n")
    app = TrlfitApp()
    async with app.run_test(size=size) as pilot:
        await wait_for(pilot, lambda: "job file" in screen_text(app))
        assert rows_of(app) == 0
        broken = screen_text(app)
        assert "Traceback" not in broken
        job.write_text(JOB)
        await pilot.press("r")
        await wait_for(pilot, lambda: rows_of(app) > 0)
        assert "job file" not in screen_text(app)
        job.write_text("model: Qwen/Qwen3-8B\nseqlen: 4096\n")
        await pilot.press("r")
        # The table of the older plan must not stay beside the error.
        await wait_for(pilot, lambda: rows_of(app) == 0)
        text = " ".join(screen_text(app).split())
    assert "job file 'job.yaml' line 3" in " ".join(broken.split())
    assert "seqlen is not a field of a job" in text
    assert "saved activations" not in text


async def test_r_plans_again(folder: Path) -> None:
    job = folder / "job.yaml"
    job.write_text(JOB)
    app = TrlfitApp()
    async with app.run_test(size=(120, 36)) as pilot:
        await wait_for(pilot, lambda: rows_of(app) > 0)
        assert "4,096 tokens" in screen_text(app)
        job.write_text(JOB.replace("4096", "8192"))
        await pilot.press("r")
        await wait_for(pilot, lambda: "8,192 tokens" in screen_text(app))
        assert "4,096 tokens" not in screen_text(app)


async def test_the_foot_follows_the_cursor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(JOB)
    second = plan_of_the_command(capsys)["candidates"][1]
    app = TrlfitApp()
    async with app.run_test(size=(120, 36)) as pilot:
        await wait_for(pilot, lambda: rows_of(app) > 0)
        assert second["why"][0] not in screen_text(app)
        await pilot.press("down")
        await wait_for(pilot, lambda: second["why"][0] in screen_text(app))
        await pilot.press("ctrl+end")
        await wait_for(pilot, lambda: "over the card" in screen_text(app) or "into the reserve" in screen_text(app))


async def test_nothing_fits_and_what_would(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB.replace("8xH100-80GB", "1xRTX4090"))
    app = TrlfitApp()
    async with app.run_test(size=(120, 36)) as pilot:
        await wait_for(pilot, lambda: rows_of(app) > 0)
        text = screen_text(app)
    assert "nothing fits as asked; what would: --" in text
    assert not any(line.split()[:1] == ["1"] for line in text.splitlines())
    assert any(line.split()[:1] == ["over"] for line in text.splitlines())


async def test_q_quits(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB)
    app = TrlfitApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, lambda: rows_of(app) > 0)
        assert app.is_running
        await pilot.press("q")
        await wait_for(pilot, lambda: not app.is_running)
    assert app.return_code == 0


async def test_a_bug_is_a_line_and_the_app_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "job.yaml").write_text(JOB)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("no cards in the deck")

    monkeypatch.setattr(app_module, "plan_job", broken)
    app = TrlfitApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, lambda: "bug in trlfit: ZeroDivisionError: no cards in the deck" in screen_text(app))
        monkeypatch.undo()
        monkeypatch.chdir(folder)
        await pilot.press("r")
        await wait_for(pilot, lambda: rows_of(app) > 0)


async def test_no_color(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "job.yaml").write_text(JOB)

    async def colours() -> tuple[set[tuple[int, int, int]], str]:
        app = TrlfitApp()
        async with app.run_test(size=(120, 36)) as pilot:
            await wait_for(pilot, lambda: rows_of(app) > 0)
            return screen_colours(app), screen_text(app)

    plain, text = await colours()
    assert any(len(set(colour)) > 1 for colour in plain)
    monkeypatch.setenv("NO_COLOR", "1")
    grey, same_text = await colours()
    assert grey and all(len(set(colour)) == 1 for colour in grey)
    assert same_text == text


def test_every_key_says_what_it_does() -> None:
    assert {binding.key for binding in TrlfitApp.BINDINGS} == {"r", "q"}
    assert all(binding.description for binding in TrlfitApp.BINDINGS)
