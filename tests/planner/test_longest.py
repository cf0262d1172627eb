"""The longest sequence that fits, and the stairs that lead there."""

from __future__ import annotations

from typing import Any

import pytest

from planner.longest import MAX_TOKENS, STEP_TOKENS, longest, longest_with
from planner.machine import Machine
from planner.problem import make_problem, with_job
from planner.search import search
from tests.planner.replay import inputs_of

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
    assert [stair.lever for stair in stairs] == ["no lever", "recompute", "offload", "split over cards"]
    reached = [stair.tokens for stair in stairs]
    assert reached == sorted(reached)
    assert tokens == reached[-1] == reached[-2]
    # Recompute keeps one tensor of 2,560 per layer where everything is 40 times that.
    assert reached[1] > 4 * reached[0]
    # 36 bands of 5,120 bytes a token become four.
    assert 1.3 < reached[2] / reached[1] < 2.2
    assert all(n % STEP_TOKENS == 0 for n in reached)
    choices = [stair.candidate.choice for stair in stairs if stair.candidate]
    assert choices[0].recompute == "none"
    assert choices[2].offload == {"activations"}


def test_what_is_longest_fits_and_a_little_more_does_not() -> None:
    inputs = inputs_of(JOB, stack=STACK)
    tokens, candidate = longest_with(inputs, dict(JOB["pins"]))
    assert candidate is not None
    assert candidate.fits

    def fits(length: int) -> bool:
        problem = make_problem(with_job(inputs, seq_len=length, goal="fastest"))
        return search(problem.judge, problem.options, "fastest").best is not None

    assert fits(tokens)
    # The bisection ends within a sixty-fourth.
    assert not fits(tokens + max(STEP_TOKENS, tokens // 32))


def test_splitting_over_cards_reaches_a_million() -> None:
    """Qwen3-4B over four cards (TRL's guide: 1,048,576 with cp 4 and 63.6 GiB, on cards of 80)."""
    job = {**JOB, "machine": "4xH100-80GB", "pins": {"weights": "bf16", "mixed_precision": "no"}}
    tokens, stairs = longest(inputs_of(job, stack=STACK))
    assert tokens >= 1_048_576
    assert tokens > 3 * stairs[2].tokens
    assert stairs[3].candidate is not None
    assert stairs[3].candidate.choice.cp == 4


def test_a_single_sequence_over_pinned_shards() -> None:
    """One sequence per step and FSDP2 over all cards: legal as soon as the cards may share it."""
    job = {**JOB, "machine": "4xH100-80GB", "pins": {"sharding": "fsdp", "offload": ["activations"]}}
    tokens, stairs = longest(inputs_of(job, stack=STACK))
    assert [stair.tokens for stair in stairs[:3]] == [0, 0, 0]
    assert tokens > 500_000


def test_nothing_fits_at_all() -> None:
    job = {**JOB, "model": "meta-llama/Llama-3.1-70B", "machine": "1xRTX4090"}
    tokens, stairs = longest(inputs_of(job, stack=STACK))
    assert tokens == 0
    assert stairs[0].to_json() == {"lever": "no lever", "tokens": 0, "choice": None}
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
