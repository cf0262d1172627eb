"""`trlfit plan MODEL --cards ...`: which machine would do it, by time and by cost."""

from __future__ import annotations

import json

import pytest

from launcher.cli import NODE_CARDS
from launcher.inputs.machines import MAX_CARDS
from profiles.cards import load_cards
from tests.launcher.command_line import MODEL, assert_refused, here

WIDTH = 100
BASE = ("plan", MODEL, "--cards", "H100-80GB,a100-80gb,T4", "--count", "1,8")
PRICED = (*BASE, "--price", "h100-80GB=2.49", "--price", "A100-80GB=1.29")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_text_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, PRICED)
    assert (said.code, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= WIDTH
    document = json.loads(here(capsys, [*PRICED, "--json"]).out)
    machines = document["machines"]
    assert {entry["machine"] for entry in machines} == {
        f"{count}x{card}" for card in ("H100-80GB", "A100-80GB", "T4") for count in (1, 8)
    }
    fastest = machines[0]
    row = next(line.split() for line in said.out.splitlines() if line.startswith("1 "))
    assert row[1] == fastest["machine"] == "8xH100-80GB"
    assert row[5] == f"{8 * 2.49:.2f}"
    cheapest = next(entry for entry in machines if entry["rank_by_cost"] == 1)
    assert f"cheapest: {cheapest['machine']}, " in said.out
    missing = said.out[said.out.index("does not fit, closest first") :]
    assert "1xT4" in missing and "GiB too many per GPU with reserve and interval" in missing


def test_without_prices_there_are_no_costs(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, BASE)
    assert "per hour" not in said.out and "cheapest" not in said.out


def test_all_cards_in_the_number_that_the_machine_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-0.6B", "--seq-len", "512", "--cards", "all", "--machine", "2xT4", "--json"]
    document = json.loads(here(capsys, words).out)
    assert {entry["machine"] for entry in document["machines"]} == {f"2x{card.id}" for card in load_cards()}


def test_the_usual_numbers_where_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-0.6B", "--seq-len", "512", "--cards", "T4", "--json"]
    document = json.loads(here(capsys, words).out)
    assert sorted(entry["count"] for entry in document["machines"]) == [1, 2, 4, 8]


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ["plan", "meta-llama/Llama-3.1-70B", "--cards", "T4,RTX4090", "--count", "1"])
    assert said.code == 3
    assert "does not fit, closest first" in said.out and "fits, fastest" not in said.out


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--cards", "Z9"), "--cards Z9: no card 'Z9'"),
        (("--cards", "A100"), "may be"),
        (("--cards", "T4", "--price", "T4=free"), "--price T4=free is no price"),
        (("--cards", "T4", "--price", "T4=-1"), "is no price"),
        (("--cards", "T4", "--price", "T4=nan"), "is no price"),
        (("--cards", "T4", "--price", "L40S=1"), "not among --cards"),
        (("--cards", "T4", "--price", "T4"), "is not KEY=VALUE"),
        (("--cards", "T4", "--count", "0"), "--count: give a whole number"),
        (("--cards", "T4", "--count", "1,many"), "--count: give a whole number"),
        (("--count", "1"), "belong to --cards"),
        (("--price", "T4=1"), "belong to --cards"),
        (("--count", "1", "--compare", "1", "2"), "belong to --cards"),
        (("--price", "T4=1", "--against", "plan.json"), "belong to --cards"),
        (("--cards", "all", "--goal", "longest"), "each of 144 machines"),
        (("--cards", ","), "--cards names no card"),
    ],
)
def test_bad_input(more: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(here(capsys, ["plan", MODEL, *more]), 2, part)


def test_a_node_has_as_many_cards_everywhere() -> None:
    assert NODE_CARDS == MAX_CARDS


def test_a_run_whose_length_is_known_has_an_end_and_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PRICED, "--trl", "max_steps=1000"]
    said = here(capsys, words)
    document = json.loads(here(capsys, [*words, "--json"]).out)
    fastest = document["machines"][0]
    assert fastest["steps"] == 1000
    assert fastest["finish_s"] == pytest.approx(1000 * fastest["step_s"], rel=1e-4)
    assert fastest["run_cost"] == pytest.approx(fastest["finish_s"] / 3600 * 8 * 2.49, rel=1e-4)
    assert "a run of 1,000 steps" in said.out
    assert f"{fastest['run_cost']:.2f}" in said.out and "for the run" in said.out
    assert max(map(len, said.out.splitlines())) <= WIDTH


def test_the_jobs_own_price_is_that_of_every_card(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PRICED, "--price-per-hour", "0.5", "--json"]
    hourly = {entry["machine"]: entry["cost_per_hour"] for entry in json.loads(here(capsys, words).out)["machines"]}
    assert hourly["8xT4"] == 4
    assert hourly["8xH100-80GB"] == pytest.approx(19.92)
