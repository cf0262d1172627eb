"""The longest sequence that fits, and the stairs that lead there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.machine import Machine
from planner.problem import make_problem, with_job
from planner.search.longest import MAX_TOKENS, STAIRS, STEP_TOKENS, longest, longest_with
from planner.search.search import search
from profiles.releases import newest_known
from tests.planner.replay import bundled_coefficients, inputs_of

STACK = {"trl": "1.16.0"}
JOB: dict[str, Any] = {
    "model": "Qwen/Qwen3-4B",
    "machine": "1xH100-80GB",
    "global_batch": 1,
    "goal": "longest",
    "pins": {"weights": "bf16", "mixed_precision": "no", "gpus": 1},
}


def test_the_long_context_staircase_of_qwen3_4b() -> None:
    """TRL's guide on one 80 GB card: recompute, then offload, each reach further; one card is all there is."""
    tokens, stairs = longest(inputs_of(JOB, stack=STACK))
    assert [stair.lever for stair in stairs] == ["no lever", "recompute", "offload"]
    reached = [stair.tokens for stair in stairs]
    assert reached == sorted(reached)
    assert tokens == reached[-1]
    # Recompute keeps one tensor of 2,560 per layer where everything is 40 times that.
    assert reached[1] > 4 * reached[0]
    # 36 bands of 5,120 bytes a token become four.
    assert 1.3 < reached[2] / reached[1] < 2.2
    assert all(n % STEP_TOKENS == 0 for n in reached)
    choices = [stair.candidate.choice for stair in stairs if stair.candidate]
    assert choices[0].recompute == "none"
    assert choices[2].offload == {"activations"}
    assert all("in backward" in stair.stops or "in loss" in stair.stops for stair in stairs)


GUIDE = {"recompute": 32_768, "loss path": 163_840, "offload": 262_144}
"""TRL's guide to long contexts (pull request 7003), Qwen3-4B on one H100 of 80 GB, with TRL 1.13's two loss paths."""


def guide_stairs(**changes: Any) -> dict[str, int]:
    job = {**JOB, "machine": "4xH100-80GB", "pins": {"weights": "bf16", "mixed_precision": "no", **changes}}
    inputs = replace(inputs_of(job, stack={**newest_known(), "trl": "1.13.0"}), source=bundled_coefficients)
    _, stairs = longest(inputs)
    assert [stair.lever for stair in stairs] == ["no lever", *STAIRS]
    return {stair.lever: stair.tokens for stair in stairs}


def test_the_staircase_of_trls_guide() -> None:
    """The guide ran one step: AdamW makes its states after the activations are gone. SGD without momentum has none.

    With AdamW's states, 8 bytes of each of 4.02 B parameters in bf16, every stair is below what ran, as a run of more
    than one step is.
    """
    first_step, whole_run = guide_stairs(optimizer="sgd"), guide_stairs()
    for lever, tokens in GUIDE.items():
        # The last of them is on a coarse grid: "one card stops just above 256k".
        assert 0.95 < first_step[lever] / tokens < 1.12, lever
        assert 0.75 < whole_run[lever] / tokens < 1, lever
    # A million tokens ran over four cards, at 63.6 GB of 80; no limit was looked for.
    assert 1_048_576 <= whole_run["split over cards"] < 1.35 * 1_048_576


def test_the_page_shows_these_stairs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    table = page[page.index("| lever | recorded by TRL |") :].split("\n\n")[0].splitlines()[2:]
    shown = [[int(cell.replace(",", "")) for cell in row.split("|")[3:5]] for row in table]
    first_step, whole_run = guide_stairs(optimizer="sgd"), guide_stairs()
    for lever, (one, all_of_it) in zip(STAIRS, shown, strict=True):
        assert (one, all_of_it) == pytest.approx((first_step[lever], whole_run[lever]), rel=0.03), lever


def fits(length: int, **pins: Any) -> bool:
    inputs = inputs_of(JOB, stack=STACK)
    problem = make_problem(with_job(inputs, seq_len=length, goal="fastest", pins={**JOB["pins"], **pins}))
    return search(problem.judge, problem.options, "fastest").best is not None


@pytest.mark.parametrize("pins", [{}, {"recompute": "none"}, {"recompute": "full", "offload": []}])
def test_what_is_longest_fits_and_a_step_more_does_not(pins: dict[str, Any]) -> None:
    inputs = inputs_of(JOB, stack=STACK)
    tokens, candidate = longest_with(inputs, {**JOB["pins"], **pins})
    assert candidate is not None
    assert candidate.fits
    assert fits(tokens, **pins)
    assert not fits(tokens + STEP_TOKENS, **pins)
    # It is the last of all, not the first after which one does not fit.
    assert not any(fits(tokens + more * STEP_TOKENS, **pins) for more in (2, 3, 5, 8, 13, 21))
    assert longest_with(inputs, {**JOB["pins"], **pins}, at_least=2 * STEP_TOKENS) == (tokens, candidate)


def test_splitting_over_cards_reaches_a_million() -> None:
    """Qwen3-4B over four cards (TRL's guide: 1,048,576 with cp 4 and 63.6 GiB, on cards of 80)."""
    job = {**JOB, "machine": "4xH100-80GB", "pins": {"weights": "bf16", "mixed_precision": "no"}}
    tokens, stairs = longest(inputs_of(job, stack=STACK))
    assert tokens >= 1_048_576
    assert tokens > 3 * stairs[-2].tokens
    assert stairs[-1].candidate is not None
    assert stairs[-1].candidate.choice.cp == 4


def test_a_single_sequence_over_pinned_shards() -> None:
    """One sequence per step and FSDP2 over all cards: legal as soon as the cards may share it."""
    job = {**JOB, "machine": "4xH100-80GB", "pins": {"sharding": "fsdp", "offload": ["activations"]}}
    tokens, stairs = longest(inputs_of(job, stack=STACK))
    assert [stair.tokens for stair in stairs[:2]] == [0, 0]
    assert [stair.lever for stair in stairs] == ["no lever", "recompute", "split over cards"]
    assert tokens > 500_000


def test_nothing_fits_at_all() -> None:
    job = {**JOB, "model": "meta-llama/Llama-3.1-70B", "machine": "1xRTX4090"}
    tokens, stairs = longest(inputs_of(job, stack=STACK))
    assert tokens == 0
    first = stairs[0].to_json()
    assert (first["lever"], first["tokens"], first["device_bytes"], first["choice"]) == ("no lever", 0, None, None)
    assert "GiB over the card" in first["stops"]
    assert longest_with(inputs_of(job, stack=STACK), {}) == (0, None)


def test_a_machine_of_unknown_memory_ends_somewhere() -> None:
    machine = Machine(origin="cpu", spec="cpu")
    job = {"model": "Qwen/Qwen3-0.6B", "machine": "cpu", "global_batch": 1, "goal": "longest"}
    tokens, _ = longest_with(inputs_of(job, stack=STACK, machine=machine), {})
    assert tokens == MAX_TOKENS == 16_777_216


@pytest.mark.parametrize("pinned", ["none", "full"])
def test_pins_stay_on_every_stair(pinned: str) -> None:
    job = {**JOB, "pins": {**JOB["pins"], "recompute": pinned}}
    _, stairs = longest(inputs_of(job, stack=STACK))
    for stair in stairs:
        assert stair.candidate is not None
        assert stair.candidate.choice.recompute == pinned
        data = stair.to_json()
        assert data["choice"] == stair.candidate.choice.to_json()
