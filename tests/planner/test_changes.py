"""What would fit, or help: each lever offered with the plan it makes, and never made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.changes import Change, changes_that_fit, changes_that_help
from planner.machine import Card, Machine
from planner.problem import PlanInput, make_problem
from planner.rules import all_refusals
from planner.search import search
from profiles.releases import newest_known
from tests.planner.replay import inputs_of, problem_of

NEWEST = newest_known()["trl"]
TIGHT: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "machine": "1xRTX4090", "seq_len": 4096, "global_batch": 4}
"""8 B parameters in 16 bytes on 24 GB."""
BITSANDBYTES = {**newest_known(), "bitsandbytes": "0.50.0"}


def fitting(inputs: PlanInput) -> dict[str, Change]:
    return {change.lever: change for change in changes_that_fit(inputs)}


def test_levers_in_the_order_of_how_little_they_alter() -> None:
    inputs = inputs_of(TIGHT, stack=BITSANDBYTES)
    problem = make_problem(inputs)
    assert not search(problem.judge, problem.options, "fastest").fitting
    found = changes_that_fit(inputs)
    assert [change.lever for change in found] == ["lora", "qlora", "more GPUs"]
    assert [change.alters for change in found] == ["method", "method", "nothing"]
    assert [change.flags for change in found] == ["--method lora", "--method qlora", "--machine 2xRTX4090"]


@pytest.mark.parametrize("job", [TIGHT, {**TIGHT, "method": "lora"}, {**TIGHT, "seq_len": 262_144, "method": "qlora"}])
def test_every_change_makes_a_legal_plan_that_fits(job: dict[str, Any]) -> None:
    for change in changes_that_fit(inputs_of(job, stack=BITSANDBYTES)):
        assert change.candidate.fits
        assert not all_refusals(change.problem.judge.rules, change.candidate.choice)
        assert change.problem.judge.memory_of(change.candidate).fits
        assert "fits with" in change.sentence and "per step" in change.sentence
        assert change.flags.startswith("--")


def test_fewer_tokens_are_the_longest_half_that_fits() -> None:
    job = {**TIGHT, "method": "qlora", "seq_len": 262_144, "global_batch": 1}
    inputs = inputs_of(job, stack=BITSANDBYTES)
    change = fitting(inputs)["fewer tokens"]
    length = change.problem.inputs.job.seq_len
    assert change.flags == f"--seq-len {length}"
    assert 262_144 % length == 0
    twice = make_problem(replace(inputs, job=inputs.job.model_copy(update={"seq_len": 2 * length})))
    assert not search(twice.judge, twice.options, "fastest").fitting


def test_no_length_helps_where_the_weights_do_not_fit() -> None:
    assert "fewer tokens" not in fitting(inputs_of(TIGHT, stack=BITSANDBYTES))


def test_numerics_where_they_are_enough() -> None:
    """Qwen2.5-1.5B on 24 GB: 16 bytes of 1.5 B parameters do not fit, 8 do."""
    job = {**TIGHT, "model": "Qwen/Qwen2.5-1.5B", "seq_len": 1024, "global_batch": 1}
    found = fitting(inputs_of(job, stack=BITSANDBYTES))
    assert found["numerics"].candidate.alters == "numerics"
    assert found["numerics"].flags == "--allow numerics"
    allowed = {**job, "allow": ["numerics"], "model": "meta-llama/Llama-3.1-8B"}
    assert "numerics" not in fitting(inputs_of(allowed, stack=BITSANDBYTES))


def test_lighter_methods_only() -> None:
    lora = fitting(inputs_of({**TIGHT, "method": "lora", "seq_len": 65_536, "global_batch": 1}, stack=BITSANDBYTES))
    assert "lora" not in lora
    qlora = {**TIGHT, "method": "qlora", "seq_len": 262_144, "global_batch": 1}
    assert not {"lora", "qlora"} & set(fitting(inputs_of(qlora, stack=BITSANDBYTES)))


def test_a_newer_trl_where_the_logits_are_too_large() -> None:
    """Gemma's 262,144 words: 32,768 tokens of full logits are 96 GiB, of the fused loss a tile."""
    job = {
        "model": "google/gemma-3-1b-pt",
        "machine": "1xH100-80GB",
        "seq_len": 32_768,
        "global_batch": 1,
        "pins": {"attention": "sdpa"},
    }
    change = fitting(inputs_of(job, stack={**newest_known(), "trl": "1.3.0"}))["newer TRL"]
    assert (change.flags, change.alters) == (f"--stack trl={NEWEST}", "nothing")
    assert change.problem.inputs.stack.versions["trl"] == NEWEST
    assert change.candidate.choice.loss_path == "fused"
    assert "newer TRL" not in fitting(inputs_of({**job, "seq_len": 1_048_576}, stack=dict(newest_known())))


def test_more_cards_of_a_kind_that_is_not_in_the_table() -> None:
    card = Card(index=0, name="NVIDIA Somethingelse", total_bytes=24 * 2**30, compute_capability="8.9")
    machine = Machine(origin="nvml", spec="local", cards=[card])
    inputs = replace(inputs_of(TIGHT, stack=BITSANDBYTES, machine=machine), profile=None)
    change = fitting(inputs)["more GPUs"]
    assert change.flags == "--machine 2xCARD"
    assert "per step" not in change.sentence
    assert len(change.problem.inputs.machine.cards) == 2
    assert change.problem.hardware.num_gpus == 2


def test_a_cpu_is_not_multiplied() -> None:
    machine = Machine(origin="cpu", spec="cpu")
    found = fitting(inputs_of({**TIGHT, "machine": "cpu"}, stack={"trl": "1.16.0"}, machine=machine))
    assert "more GPUs" not in found


def test_the_goal_longest_asks_for_the_fastest_change() -> None:
    found = changes_that_fit(inputs_of({**TIGHT, "goal": "longest"}, stack=BITSANDBYTES))
    assert [c.lever for c in found] == ["lora", "qlora", "more GPUs"]


def helping(job: dict[str, Any], stack: dict[str, str]) -> dict[str, Change]:
    problem = problem_of(job, stack=stack)
    best = search(problem.judge, problem.options, "fastest").best
    assert best is not None
    return {change.lever: change for change in changes_that_help(problem, best)}


SMALL: dict[str, Any] = {"model": "Qwen/Qwen3-0.6B", "machine": "1xH100-80GB", "seq_len": 4096, "global_batch": 4}


def test_lighter_numerics_that_save_a_tenth_of_the_step() -> None:
    found = helping(SMALL, dict(newest_known()))
    assert set(found) == {"numerics"}
    change = found["numerics"]
    assert change.candidate.choice.weights == "bf16"
    assert "less time per step, but other rounding than fp32 states" in change.sentence
    # The layout stays as it was chosen.
    assert change.candidate.choice.num_gpus == 1


@pytest.mark.parametrize(
    "changes",
    [{"allow": ["numerics"]}, {"method": "lora"}, {"pins": {"weights": "bf16", "mixed_precision": "no"}}],
)
def test_numerics_are_not_offered_where_they_say_nothing_new(changes: dict[str, Any]) -> None:
    assert "numerics" not in helping({**SMALL, **changes}, dict(newest_known()))


def test_what_the_upgrade_from_1_12_buys_is_said() -> None:
    """TRL 1.12 copies lm_head to fp32 for every 256 tokens; 1.13 alone saves a fifth of this step, as published."""
    found = helping(SMALL, {**newest_known(), "trl": "1.12.0"})
    change = found["newer TRL"]
    assert change.flags == f"--stack trl={NEWEST}"
    assert change.sentence.startswith(f"TRL {NEWEST} computes the loss as fused, TRL 1.12.0 as chunked_fp32: ")
    assert "less time per step" in change.sentence
    assert change.candidate.choice.loss_path == "fused"


def test_an_upgrade_that_buys_nothing_is_not_mentioned() -> None:
    assert "newer TRL" not in helping(SMALL, dict(newest_known()))
    # A reward model has one score a row, whatever the release.
    reward = {**SMALL, "trainer": "reward"}
    assert "newer TRL" not in helping(reward, {**newest_known(), "trl": "1.12.0"})


def test_without_times_only_bytes_can_help() -> None:
    inputs = replace(inputs_of(SMALL, stack={**newest_known(), "trl": "1.3.0"}), profile=None)
    problem = make_problem(inputs)
    best = search(problem.judge, problem.options, "fastest").best
    assert best is not None
    found = changes_that_help(problem, best)
    assert [change.lever for change in found] == ["newer TRL"]
    assert "GiB less per GPU at the peak and 0% less time" in found[0].sentence
