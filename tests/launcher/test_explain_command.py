"""`trlfit plan --explain` as people and scripts read it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from planner.plan import Plan
from tests.launcher.command_line import H100, MODEL, here

WIDTH = 100


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def blocks(text: str) -> dict[str, list[str]]:
    """First line of each block -> its other lines."""
    return {block.split("\n", 1)[0]: block.split("\n")[1:] for block in text.strip().split("\n\n")}


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ["plan", MODEL, *H100, "--explain"])
    assert (said.code, said.err) == (0, "")
    found = blocks(said.out)
    binds = " ".join(found["what binds"])
    assert re.search(r"memory +the peak is in \w+: [\d.]+ of 79.6 GiB, [\d.]+ free beyond the reserve;", binds)
    assert re.search(r"time +a step of [\d.]+ s waits for arithmetic \d+%", binds)
    assert any(line.startswith("  recompute full: frees ") for line in found["what one change of a knob would do"])
    assert any("TRL 1.12.0 computes the loss as chunked_fp32" in line for line in said.out.splitlines())
    misses = found["what would make the closest misses fit"]
    assert sum("    -> " in line for line in misses) >= 3
    new = said.out[said.out.index("what binds") : said.out.index("left out by")]
    assert max(map(len, new.splitlines())) <= WIDTH
    # A number stays with its unit.
    assert not re.search(r"^ *(?:GiB|MiB|s)\b", new, re.MULTILINE)


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", MODEL, "--machine", "1xRTX4090", "--pin", "recompute=none", "--explain"]
    said = here(capsys, words)
    assert said.code == 3
    ladder = said.out[said.out.index("what each lever leaves missing") :]
    rows = {line.split("  ")[0]: line for line in ladder.splitlines()}
    assert "(drop --pin recompute=none)" in rows["recompute"]
    assert rows["qlora"].endswith("--method qlora")
    assert "--machine " in rows["another card"]
    assert max(map(len, ladder.split("\n\n")[0].splitlines())) <= WIDTH
    assert "what binds" not in said.out


def test_the_json_is_a_plan_with_one_more_field(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", MODEL, *H100, "--json"]
    plain = json.loads(here(capsys, words).out)
    explained: dict[str, Any] = json.loads(here(capsys, [*words, "--explain"]).out)
    assert "explanation" not in plain
    explanation = explained.pop("explanation")
    assert explained == plain
    assert set(explanation) == {"binds", "levers", "releases", "near_misses", "ladder"}
    assert Plan.model_validate({**explained, "explanation": explanation}).explanation is not None
    assert explanation["binds"]["device_bytes"] == plain["best"]["memory"]["device_bytes"]
    assert sum(explanation["binds"]["resources"].values()) == pytest.approx(1, abs=0.001)


def test_a_cpu_and_an_unknown_card_have_something_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-0.6B", "--machine", "cpu", "--seq-len", "256", "--global-batch", "2", "--explain"]
    said = here(capsys, words)
    assert said.code in (0, 3)
    assert "bug in trlfit" not in said.err
    assert "what binds" in said.out or "what each lever leaves missing" in said.out
