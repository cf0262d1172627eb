"""What a newcomer looks for on the goal screen: a model by a part of its name, the data's lengths, the way back."""

from __future__ import annotations

from pathlib import Path

from tests.tui.screens import screen_text
from tests.tui.test_app import JOB, folder, go, session, settled
from tui import choices
from tui.lengths import histogram, percentile, words
from tui.messages import DataRead

__all__ = ["folder"]


def report(lengths: list[int]):  # type: ignore[no-untyped-def]
    from launcher.writing.data import DataReport

    return DataReport(
        source="d.jsonl", format="text", conversational=False, columns=("text",), num_rows=900,
        sampled_rows=len(lengths), sample_text="", num_sequences=len(lengths), lengths=tuple(lengths),
        tokens_p50=0, tokens_p95=0, tokens_p99=0, tokens_max=lengths[-1], over_seq_len=0, has_chat_template=False,
        vocab=512,
    )  # fmt: skip


async def test_a_model_is_found_by_a_part_of_its_name() -> None:
    async with session((80, 24)) as (app, pilot):
        text = await go(pilot, "1", "enter", *"llama 3.1 8b")
        assert "meta-llama/Llama-3.1-8B-Instruct" in text and "arrows pick" in text
        # What was in the field is replaced by what is typed; Tab completes and leaves the line open.
        await go(pilot, "down", "tab")
        assert app.screen.edit_line.is_open and app.screen.query_one("#edit-input").value == "meta-llama/Llama-3.1-8B"
        await go(pilot, "enter")
        # Nothing of the older model is said of the new one.
        assert "8.19 B parameters" not in screen_text(app)
        await settled(app, pilot)
        assert "8.03 B parameters" in screen_text(app)


def test_choices_of_every_kind(folder: Path) -> None:
    cached = folder / "hub" / "models--org--our-model"
    cached.mkdir(parents=True)
    (folder / "data").mkdir()
    for name in ("a.jsonl", "b.txt", "\x1b[2J.jsonl"):
        (folder / "data" / name).touch()
    assert choices.models("QWEN3 8b")[0] == "Qwen/Qwen3-8B"
    assert choices._cached_models(folder / "hub") == ["org/our-model"] and choices._cached_models(folder / "no") == []
    assert choices.data_files("") == ["data/", "hub/"] and choices.data_files("data/") == ["data/a.jsonl"]
    assert choices.data_files("org/name") == choices.data_files("a\0b") == []
    assert "8xH100-80GB" in choices.machines("8xh100") and choices.machines("cp")[0] == "cpu"
    assert choices.pins("recompute") == ["recompute="] and "recompute=full" in choices.pins("recompute=")
    assert "precision=bf16" in choices.pins("precision=") and choices.pins("cp=") == []


def test_lengths_in_words_and_bars() -> None:
    lengths = list(range(1, 101))
    # By hand: the 50th and 95th of 1 to 100; ten are longer than 90.
    assert (percentile(lengths, 50), percentile(lengths, 95)) == (50, 95)
    assert words(lengths, 90) == "p50 50  p95 95  max 100 tokens; 10 of 100 (10%) are cut at 90"
    assert words([7], 7) == "p50 7  p95 7  max 7 tokens; none of 1 is cut at 7"
    *bars, axis, numbers = histogram(lengths, 90, width=40, height=3).plain.splitlines()
    assert len(bars) == 3 and {len(line) for line in (*bars, axis, numbers)} == {40}
    # 90 of 101 tokens, over 40 cells: the edge is cell 35.
    assert axis.index("\u2534") == 35 and axis.endswith("xxxx") and "cut at 90" in numbers
    assert "x" not in histogram(lengths, 100, width=40, height=3, unicode=False).plain
    # A single long row is seen.
    assert histogram([5] * 1000 + [900], 512, width=40, height=1).plain.splitlines()[0][-1] != " "


async def test_lengths_of_the_data_are_drawn_and_follow_the_job() -> None:
    async with session((120, 36), JOB + "data: {dataset: d.jsonl}\n") as (app, pilot):
        await go(pilot, "1")
        app.post_message(DataRead(report([100] * 90 + [5000] * 10)))
        text = await go(pilot)
        assert "10 of 100 (10%) are cut at 4,096" in text and "90% fit whole; the longest has 5,000" in text
        assert "cut at 4,096" in text.split("Data: tokens")[1]
        app.change("seq_len", 8192)
        await settled(app, pilot)
        assert "none of 100 is cut at 8,192" in screen_text(app)
        await pilot.resize_terminal(80, 24)
        assert "none of 100 is cut" in await go(pilot) and "Data: tokens" not in screen_text(app)
        # Another model has another tokenizer.
        app.change("model", "Qwen/Qwen3-4B")
        await settled(app, pilot)
        assert "is cut" not in screen_text(app)


async def test_an_offered_change_is_taken_and_taken_back() -> None:
    async with session(job=JOB.replace("8xH100-80GB", "1xRTX4090")) as (app, pilot):
        flags = app.known.changes[0]["flags"]
        assert flags in await go(pilot, "c")
        await go(pilot, "enter")
        await settled(app, pilot)
        assert app.known.plan is not None and app.known.plan["best"] is not None
        assert app.known.session.command() == f"trlfit plan --job job.yaml {flags}"
        await go(pilot, "u")
        await settled(app, pilot)
        assert app.known.session.edits == {}


async def test_the_job_of_a_run_is_undone_and_its_record_is_not_overwritten(folder: Path) -> None:
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    (run / "command.sh").touch()
    (run / "job.yaml").write_text("model: google/gemma-3-1b-pt\nmachine: 1xT4\n")
    async with session() as (app, pilot):
        app.change("seq_len", 2048)
        app.plan_again(run)
        await settled(app, pilot)
        assert app.known.session.job()[0].model == "google/gemma-3-1b-pt"
        await go(pilot, "w")
        field = app.screen.query_one("#edit-input")
        assert field.value == "job.yaml"
        field.value = str(run / "job.yaml")
        assert "Enter once more replaces it" in " ".join((await go(pilot, "enter")).split())
        await go(pilot, "escape", "u")
        await settled(app, pilot)
        job = app.known.session.job()[0]
        assert (job.model, job.seq_len) == ("Qwen/Qwen3-8B", 2048)
