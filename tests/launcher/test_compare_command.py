"""`trlfit plan --compare A B`."""

from __future__ import annotations

import json

import pytest

from tests.launcher.command_line import H100, MODEL, assert_refused, here

WIDTH = 80
BASE = ("plan", MODEL, *H100)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_text_fits_80_columns_and_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BASE, "--compare", "recompute=full,offload=optimizer,params", "recompute=none"]
    said = here(capsys, words)
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    document = json.loads(here(capsys, [*words, "--json"]).out)
    assert document["schema"] == "trlfit.comparison/1"
    row = next(line.split() for line in lines if line.startswith("on the card"))
    assert row[3:5] == [f"{size / 2**30:.1f}" for size in document["memory"]["device_bytes"]]
    assert "A: recompute=full offload=optimizer,params (fits)" in lines
    assert any(line.split() == ["offload", "optimizer,params", "-"] for line in lines)
    assert " ".join(document["sentence"].split()) in " ".join(said.out.split())
    assert {f"{phase['name']}" for phase in document["memory"]["phases"]} <= {line.split(" ")[0] for line in lines}


def test_ranks_and_pins_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, [*BASE, "--compare", "1", "sharding=ddp", "--json"])
    assert said.code == 0
    document = json.loads(said.out)
    assert [side["asked"] for side in document["sides"]] == ["candidate 1", "sharding=ddp"]
    assert [side["candidate"]["fits"] for side in document["sides"]] == [True, False]


def test_neither_fits(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ["plan", MODEL, "--machine", "1xT4", "--compare", "recompute=full", "recompute=none"])
    assert said.code == 3
    assert "neither fits" in said.out and "GiB too many with reserve and interval" in said.out


@pytest.mark.parametrize(
    ("pair", "part"),
    [
        (("quick", "1"), "'quick' is neither"),
        (("recompute=full,recompute=none", "1"), "recompute twice"),
        (("recompute=half", "1"), "pin recompute=half is not a value"),
        (("9999", "1"), "there is no candidate 9999"),
        (("0", "1"), "there is no candidate 0"),
        (("knob=1", "1"), "knob is not a knob"),
    ],
)
def test_bad_input(pair: tuple[str, str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(here(capsys, [*BASE, "--compare", *pair]), 2, part)


def test_one_question_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(here(capsys, [*BASE, "--compare", "1", "2", "--explain"]), 2, "not allowed with")
