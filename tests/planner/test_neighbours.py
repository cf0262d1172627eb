"""One change of a knob: all of them, none that is two, each as a whole simulation judges it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.advice.explanation import change_words
from planner.advice.neighbours import LEVERS, neighbours, pins_of
from planner.choice import Choice
from planner.problem import Problem
from planner.rules import first_refusal
from planner.search.search import search
from planner.search.space import frames
from tests.planner.replay import problem_of
from tests.planner.test_search import STACKS, all_batches

JOBS: tuple[dict[str, Any], ...] = (
    {"model": "Qwen/Qwen3-8B", "machine": "4xA100-80GB", "seq_len": 4096, "global_batch": 8},
    {"model": "Qwen/Qwen3-4B", "machine": "4xH100-80GB", "seq_len": 65_536, "global_batch": 4},
    {"model": "meta-llama/Llama-3.1-8B", "machine": "2xRTX3090", "method": "lora", "seq_len": 2048},
    {"model": "Qwen/Qwen3-0.6B", "machine": "1xRTX4090", "seq_len": 2048, "global_batch": 6},
)


def of(job: dict[str, Any], number: int = 0) -> tuple[Problem, Any]:
    problem = problem_of(job, stack=STACKS[-1])
    return problem, search(problem.judge, problem.options, "fastest").fitting[number]


def single_knobs(before: Choice, after: Choice) -> bool:
    """Exactly one of the knobs that depend on nothing else differs."""
    independent = ("loss_path", "recompute", "offload", "attention", "micro_batch")
    rest = replace(after, **{knob: getattr(before, knob) for knob in independent}, grad_accum=before.grad_accum)
    return rest == before and sum(getattr(before, knob) != getattr(after, knob) for knob in independent) == 1


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("number", [0, 25])
def test_every_legal_change_of_one_knob_is_there(job: dict[str, Any], number: int) -> None:
    """Brute force over the whole space, of which those that differ in one knob are kept."""
    problem, best = of(job, number)
    expected = {
        choice
        for frame, _ in frames(problem.options, problem.hardware)
        for choice in all_batches(problem.options, frame)
        if single_knobs(best.choice, choice) and first_refusal(problem.judge.rules, choice) is None
    }
    found = {n.candidate.choice for n in neighbours(problem, best)}
    assert expected <= found
    assert len(expected) >= 3
    assert best.choice not in found


@pytest.mark.parametrize("job", JOBS)
def test_each_is_legal_keeps_the_batch_and_moves_its_own_lever(job: dict[str, Any]) -> None:
    problem, best = of(job)
    batch = best.choice.global_batch
    levers: set[str] = set()
    for found in neighbours(problem, best):
        choice = found.candidate.choice
        assert choice.global_batch == batch
        assert choice.num_gpus <= problem.hardware.num_gpus
        moved = {knob for knob, value in pins_of(choice).items() if pins_of(best.choice)[knob] != value}
        allowed = {*LEVERS[found.lever], *({"offload"} if found.lever == "recompute" else ())}
        assert moved and moved <= allowed, (found.lever, moved)
        if found.lever != "numerics":
            assert first_refusal(problem.judge.rules, choice) is None
            assert found.candidate.alters == best.alters
        memory = problem.judge.memory_of(found.candidate)
        assert memory.fits == found.candidate.fits
        levers.add(found.lever)
    assert {"recompute", "numerics"} & levers


def test_pins_of_the_job_are_no_fence() -> None:
    job = {**JOBS[0], "pins": {"recompute": "full", "micro_batch": 1}}
    problem, best = of(job)
    found = [n.candidate.choice for n in neighbours(problem, best)]
    assert {c.recompute for c in found} >= {"none", "full", "every_2"}
    assert {c.micro_batch for c in found} >= {1, 2}


def test_checkpoints_come_back_when_recompute_goes() -> None:
    job = {**JOBS[1], "pins": {"recompute": "full", "offload": ["activations"], "gpus": 4}}
    problem, best = of(job)
    kept = [n.candidate.choice for n in neighbours(problem, best) if n.lever == "recompute"]
    assert kept
    assert all(c.recompute != "full" and "activations" not in c.offload for c in kept)


BASE = Choice(method="full", loss_path="fused", recompute="none", sharding="fsdp", dp_shard=8, grad_accum=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recompute": "full"}, "recompute full"),
        ({"recompute": "full", "offload": frozenset({"activations"})}, "recompute full, offload of activations"),
        ({"loss_path": "liger"}, "loss path liger"),
        ({"cp": 2, "dp_shard": 4, "grad_accum": 4}, "cp 2, micro-batch 1 x 4"),
        ({"dp_shard": 4, "grad_accum": 4}, "4 GPUs, micro-batch 1 x 4"),
        ({"sharding": "none", "dp_shard": 1, "grad_accum": 16}, "1 GPU, micro-batch 1 x 16"),
        ({"sharding": "hsdp", "dp_shard": 4, "dp_replicate": 2}, "sharding hsdp"),
        ({"weights": "bf16", "mixed_precision": "no"}, "bf16 weights throughout"),
        ({"optimizer": "adamw_bnb_8bit"}, "optimizer adamw_bnb_8bit"),
        ({"micro_batch": 2, "grad_accum": 1}, "micro-batch 2 x 1"),
    ],
)
def test_changes_in_words(changes: dict[str, Any], words: str) -> None:
    assert change_words(BASE, replace(BASE, **changes)) == words


ACTIVATIONS, OPTIMIZER, PARAMS = "activations", "optimizer", "params"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((OPTIMIZER,), (OPTIMIZER, ACTIVATIONS), "also offload of activations"),
        ((OPTIMIZER, ACTIVATIONS), (OPTIMIZER,), "no offload of activations"),
        ((OPTIMIZER,), (ACTIVATIONS,), "offload of activations instead of optimizer"),
        ((), (OPTIMIZER, PARAMS), "offload of optimizer and params"),
        ((OPTIMIZER, PARAMS), (), "no offload"),
    ],
)
def test_offload_in_words(before: tuple[Any, ...], after: tuple[Any, ...], words: str) -> None:
    first, second = (replace(BASE, recompute="full", offload=frozenset(of)) for of in (before, after))
    assert change_words(first, second) == words


def test_back_to_no_offload() -> None:
    offloaded = replace(BASE, recompute="full", offload=frozenset({"activations"}))
    assert change_words(offloaded, BASE) == "recompute none, no offload"
    assert (
        change_words(
            replace(BASE, sharding="hsdp", dp_shard=4, dp_replicate=2),
            replace(BASE, sharding="hsdp", dp_shard=2, dp_replicate=4),
        )
        == "dp_shard 2"
    )
