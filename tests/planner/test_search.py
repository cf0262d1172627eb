"""The search against brute force over every frame and micro-batch, on 210 random jobs of small spaces."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.choice import Choice
from planner.machine import Card, Host, Machine
from planner.problem import Problem, make_problem
from planner.rules import all_refusals, first_refusal
from planner.search.search import NEAR_MISSES, Candidate, SearchResult, any_fits, distinct, rank, search
from planner.search.space import frames
from profiles.cards import CardProfile, find_card
from tests.planner.replay import inputs_of, named_machine

GIB = 2**30
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen2.5-1.5B",
    "google/gemma-3-1b-pt",
    "google/gemma-2-2b",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-30B-A3B",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3.5-4B",
)
MACHINES = ("1xRTX4090", "2xRTX3090", "4xA100-40GB", "8xH100-80GB", "1xH200", "2xL40S", "1xT4")
STACKS: tuple[dict[str, str], ...] = (
    {"trl": "1.16.0"},
    {"trl": "1.12.0"},
    {"trl": "1.0.0", "deepspeed": "0.19.8"},
    {"trl": "1.16.0", "deepspeed": "0.19.8", "bitsandbytes": "0.50.0", "flash-attn": "2.8.3", "liger-kernel": "0.8.0"},
)
GOALS = ("fastest", "fewest_gpus", "headroom")


def problem(
    machine: Machine,
    profile: CardProfile | None,
    job: dict[str, Any],
    stack: dict[str, str] | None = None,
) -> Problem:
    inputs = inputs_of(
        {"machine": machine.spec, **job},
        stack=stack if stack is not None else STACKS[-1],
        nodes=machine.nodes,
        machine=machine,
    )
    return make_problem(replace(inputs, profile=profile))


@cache
def random_problem(seed: int) -> Problem:
    """A job with enough pins that brute force stays small."""
    r = random.Random(seed)
    spec, nodes = r.choice(MACHINES), r.choice((1, 1, 1, 2))
    trainer = r.choice(("sft", "sft", "sft", "dpo", "kto", "reward", "grpo"))
    gpus = int(spec.partition("x")[0]) * nodes
    pins: dict[str, Any] = {}
    for knob, chance, values in (
        ("recompute", 0.5, ("none", "full", "full", "selective", "every_2", "every_3")),
        ("offload", 0.25, ((), ("activations",), ("activations", "optimizer", "params"))),
        ("sharding", 0.2, ("none",) if gpus == 1 else ("ddp", "fsdp", "hsdp", "zero2", "zero3")),
        ("micro_batch", 0.1, (1, 2, 3)),
        ("grad_accum", 0.1, (1, 2, 4)),
        ("optimizer", 0.1, ("adamw_torch", "adamw_bnb_8bit", "sgd")),
        ("weights", 0.1, ("bf16", "fp32")),
        ("cp", 0.1, (1, 2)),
        ("attention", 0.1, ("sdpa", "flash_attention_2")),
    ):
        if r.random() < chance:
            pins[knob] = r.choice(values)
    job = {
        "model": r.choice(MODELS),
        "trainer": trainer,
        "method": r.choice(("full", "full", "lora", "qlora")),
        "seq_len": r.choice((512, 2048, 8192, 32_768, 131_072)),
        "global_batch": r.choice((1, 2, 3, 6, 8, 24)) * r.choice((1, gpus, gpus)),
        "data": {"packing": trainer == "sft" and r.random() < 0.3},
        "allow": r.choice(([], [], ["numerics"])),
        "reserve": r.choice((0.0, 0.05, 0.2)),
        "pins": pins,
    }
    return problem(
        named_machine(spec, nodes), find_card(spec.partition("x")[2]), job, r.choice((*STACKS, STACKS[-1], STACKS[-1]))
    )


def all_batches(options: Any, choice: Choice) -> list[Choice]:
    """The choice at every micro-batch that keeps the global batch, by trying every number up to it."""
    pins, out = options.pins, list[Choice]()
    if "micro_batch" in pins and "grad_accum" in pins:
        return [replace(choice, micro_batch=pins["micro_batch"], grad_accum=pins["grad_accum"])]
    for micro in range(1, min(options.global_batch, 256) + 1):
        accumulate = options.global_batch / (micro * choice.data_parallel)
        if accumulate != int(accumulate) or accumulate < 1:
            continue
        if pins.get("micro_batch", micro) != micro or pins.get("grad_accum", accumulate) != accumulate:
            continue
        out.append(replace(choice, micro_batch=micro, grad_accum=int(accumulate)))
    return out


def brute_force(p: Problem) -> tuple[list[Candidate], list[Candidate]]:
    """(fitting, missing): rules and memory asked of everything, nothing left out, nothing shared."""
    fitting: list[Candidate] = []
    missing: list[Candidate] = []
    for frame, alters in frames(p.options, p.hardware):
        for choice in all_batches(p.options, frame):
            if first_refusal(p.judge.rules, choice) is None:
                candidate = p.judge.judge(choice, alters)
                (fitting if candidate.fits else missing).append(candidate)
    return fitting, missing


def key(candidate: Candidate) -> tuple[str, str]:
    return (str(candidate.choice.to_json()), candidate.alters)


def found(p: Problem, goal: str = "fastest") -> SearchResult:
    return search(p.judge, p.options, goal)


@cache
def random_result(seed: int, goal: str = "fastest") -> SearchResult:
    return found(random_problem(seed), goal)


SEEDS = range(210)


@pytest.mark.parametrize("block", range(12))
def test_same_candidates_and_best_as_brute_force(block: int) -> None:
    for seed in SEEDS[block::12]:
        p = random_problem(seed)
        fitting, missing = brute_force(p)
        result = random_result(seed)
        assert sorted(map(key, result.fitting)) == sorted(map(key, fitting)), seed
        # A frame's first micro-batch that does not fit stands for the larger ones: none of them is closer.
        if missing:
            closest = max(missing, key=lambda c: (-("nothing", "numerics", "method").index(c.alters), c.headroom_bytes))
            assert result.near_misses[0].headroom_bytes == closest.headroom_bytes, seed
        else:
            assert not result.near_misses, seed
        for goal in GOALS:
            best = random_result(seed, goal).best
            expected = rank(fitting, goal)
            assert (best is None) == (not expected), seed
            if best is not None:
                first = expected[0]
                assert (best.choice, best.verdict, best.time) == (first.choice, first.verdict, first.time), (seed, goal)


def test_the_random_jobs_are_worth_asking() -> None:
    """Some fit, some do not, some are refused outright; several cards, methods and trainers among those that fit."""
    results = {seed: random_result(seed) for seed in SEEDS}
    with_best = [s for s, r in results.items() if r.best]
    assert 60 <= len(with_best) <= 150
    assert sum(bool(r.near_misses) for r in results.values()) >= 40
    assert sum(not r.fitting and not r.near_misses for r in results.values()) >= 20
    shardings = {r.best.choice.sharding for r in results.values() if r.best}
    assert {"none", "ddp", "fsdp", "zero2"} <= shardings
    assert max(r.judged for r in results.values()) >= 500


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_what_is_found_is_legal_and_keeps_the_global_batch(seed: int) -> None:
    p, result = random_problem(seed), random_result(seed)
    for candidate in (*result.fitting, *result.near_misses):
        choice = candidate.choice
        assert choice.global_batch == p.inputs.job.global_batch
        assert not all_refusals(p.judge.rules, choice)
        assert choice.num_gpus <= p.hardware.num_gpus
    assert all(c.fits for c in result.fitting)
    assert not any(c.fits for c in result.near_misses)
    # Fit or not, what the search keeps is what a full simulation says.
    for candidate in (*result.fitting[:3], *result.near_misses[:3]):
        memory = p.judge.memory_of(candidate)
        assert memory.fits == candidate.fits
        assert abs(memory.device_bytes - candidate.verdict.device_bytes) <= 64


@pytest.mark.parametrize("seed", SEEDS[::8])
def test_near_misses_are_sorted(seed: int) -> None:
    result = random_result(seed)
    shown = [(("nothing", "numerics", "method").index(c.alters), -c.headroom_bytes) for c in result.near_misses]
    assert shown == sorted(shown)
    assert len(shown) <= NEAR_MISSES


def h100(job: dict[str, Any], gpus: int = 8) -> Problem:
    return problem(named_machine(f"{gpus}xH100-80GB"), find_card("H100-80GB"), job)


def test_groups_that_alter_nothing_come_first() -> None:
    p = h100({"model": "Qwen/Qwen3-0.6B", "global_batch": 8, "allow": ["numerics"]}, gpus=1)
    result = found(p)
    groups = [c.alters for c in result.fitting]
    assert groups == sorted(groups, key=("nothing", "numerics").index)
    assert {"nothing", "numerics"} == set(groups)
    # Pure bf16 moves fewer bytes, and still does not outrank what was asked for.
    assert min(result.fitting, key=lambda c: c.step_s).alters == "numerics"
    assert result.best is not None
    assert result.best.alters == "nothing"


def test_goals_mean_what_they_say() -> None:
    p = h100({"model": "meta-llama/Llama-3.1-8B", "method": "lora", "seq_len": 4096, "global_batch": 16})
    by_goal = {goal: found(p, goal).best for goal in GOALS}
    candidates = found(p).fitting
    fastest, fewest, roomiest = (by_goal[goal] for goal in GOALS)
    assert fastest is not None and fewest is not None and roomiest is not None
    quickest = min(c.step_s for c in candidates)
    assert fastest.step_s <= quickest * 1.05
    assert fewest.choice.num_gpus == min(c.choice.num_gpus for c in candidates) == 1
    assert roomiest.headroom_bytes == max(c.headroom_bytes for c in candidates)


def moving_parts(c: Candidate) -> tuple[bool, int, int]:
    return (c.choice.sharding.startswith("zero"), len(c.choice.offload), c.choice.cp * c.choice.sp)


@pytest.mark.parametrize("seed", SEEDS[::8])
def test_equal_speeds_go_to_the_simpler_run(seed: int) -> None:
    """Inside a band of 5 % above the fastest the fewer moving parts win, whatever the last digits of a time say."""
    result = random_result(seed)
    if result.best is None:
        return
    equals = [c for c in result.fitting if c.alters == result.best.alters]
    fastest = min(c.step_s for c in equals)
    band = [c for c in equals if c.step_s < fastest * 1.0499]
    assert moving_parts(result.best) == min(map(moving_parts, band))


def test_the_single_pass_that_keeps_no_gradients_is_found() -> None:
    """Four rows in two micro-batches hold all gradients through the step; in one they rise as activations fall.

    Memory therefore need not grow with the micro-batch at its last step, and ending a frame early would miss it.
    """
    for seed in SEEDS:
        p, result = random_problem(seed), random_result(seed)
        fits = {(c.frame, c.micro_batch) for c in result.fitting}
        for miss in result.near_misses:
            larger = [micro for frame, micro in fits if frame == miss.frame and micro > miss.micro_batch]
            if larger:
                assert miss.grad_accum > 1
                assert p.options.global_batch == max(larger) * miss.choice.data_parallel
                return
    pytest.fail("no random job shows it any more: widen the jobs")


def test_a_pinned_accumulation_finds_its_micro_batch() -> None:
    p = h100({"model": "Qwen/Qwen3-0.6B", "global_batch": 12, "pins": {"grad_accum": 3, "gpus": 2}})
    choices = {(c.micro_batch, c.grad_accum) for c in found(p).fitting}
    assert choices == {(2, 3)}


def test_kto_over_an_odd_batch() -> None:
    """KTO takes two rows or more, and three rows are two or more."""
    p = problem(
        named_machine("1xH100-80GB"),
        find_card("H100-80GB"),
        {"model": "Qwen/Qwen3-0.6B", "trainer": "kto", "global_batch": 3, "seq_len": 512},
    )
    assert {(c.micro_batch, c.grad_accum) for c in found(p).fitting} == {(3, 1)}


def test_a_batch_that_does_not_divide_says_so() -> None:
    p = h100({"model": "Qwen/Qwen3-0.6B", "global_batch": 3, "pins": {"gpus": 2}})
    result = found(p)
    assert not result.fitting
    count, refusal, choice = result.rejected["batch-product"]
    assert count > 0
    assert refusal.reason.endswith("is 2, not global_batch 3; closest: 2 or 4")
    assert choice.data_parallel == 2


def test_every_rejected_rule_has_an_example_that_it_refuses() -> None:
    p = h100({"model": "google/gemma-3-1b-pt", "seq_len": 16_384, "global_batch": 8})
    result = found(p)
    assert result.rejected
    for rule, (count, refusal, choice) in result.rejected.items():
        assert count >= 1
        assert rule == refusal.rule
        refusals = all_refusals(p.judge.rules, choice)
        assert refusal in refusals


def test_distinct_candidates_differ_in_more_than_the_batch() -> None:
    p = h100({"model": "Qwen/Qwen3-0.6B", "global_batch": 16})
    ranked = found(p).fitting
    shown = distinct(ranked, 5)
    assert len(shown) == 5
    assert shown[0] is ranked[0]
    frames_shown = {replace(c.choice, micro_batch=1, grad_accum=1) for c in shown}
    assert len(frames_shown) == 5
    every = distinct(ranked, 10_000)
    assert len(every) == len({replace(c.choice, micro_batch=1, grad_accum=1) for c in ranked})


def rtx3090(index: int, used: int = 0, **changes: Any) -> Card:
    total = find_card("RTX3090").nvml_bytes
    values: dict[str, Any] = {
        "index": index,
        "name": "NVIDIA GeForce RTX 3090",
        "card_id": "RTX3090",
        "total_bytes": total,
        "used_bytes": used,
        "free_bytes": total - used,
        "compute_capability": "8.6",
        **changes,
    }
    return Card(**values)


def test_a_busy_card_is_left_alone_when_one_card_is_enough() -> None:
    machine = Machine(origin="nvml", spec="local", cards=[rtx3090(0, used=22 * GIB), rtx3090(1)])
    p = problem(machine, find_card("RTX3090"), {"model": "Qwen/Qwen3-0.6B", "seq_len": 1024, "global_batch": 4})
    result = found(p)
    assert result.best is not None
    assert result.best.choice.num_gpus == 1
    assert p.hardware.cards_for(1) == [1]
    # Both together are as full as the fuller one: 22 GiB less than two idle cards.
    idle = problem(
        Machine(origin="nvml", spec="local", cards=[rtx3090(0), rtx3090(1)]),
        find_card("RTX3090"),
        {"model": "Qwen/Qwen3-0.6B", "seq_len": 1024, "global_batch": 4},
    )
    together = replace(result.best.choice, sharding="ddp", dp_replicate=2, grad_accum=1, micro_batch=2)
    busy, free = (x.judge.judge(together, "nothing") for x in (p, idle))
    assert (busy.fits, free.fits) == (False, True)
    assert free.headroom_bytes - busy.headroom_bytes == 22 * GIB


def test_a_mig_slice_works_alone() -> None:
    slices = [
        Card(
            index=index,
            name="NVIDIA H100 80GB HBM3 MIG 3g.40gb",
            card_id="H100-80GB",
            total_bytes=40 * GIB,
            used_bytes=used,
            free_bytes=40 * GIB - used,
            compute_capability="9.0",
            mig_mode="slice",
            compute_share=3 / 7,
            memory_share=0.5,
        )
        for index, used in enumerate((30 * GIB, 0))
    ]
    machine = Machine(origin="nvml", spec="local", cards=slices)
    p = problem(machine, find_card("H100-80GB"), {"model": "Qwen/Qwen3-0.6B", "seq_len": 2048, "global_batch": 4})
    result = found(p)
    assert result.best is not None
    assert {c.choice.num_gpus for c in result.fitting} == {1}
    assert p.hardware.cards_for(1) == [1]
    whole = h100({"model": "Qwen/Qwen3-0.6B", "seq_len": 2048, "global_batch": 4}, gpus=1)
    same = next(c for c in found(whole).fitting if c.choice == result.best.choice)
    assert result.best.step_s / same.step_s == pytest.approx(7 / 3, rel=0.15)


def test_a_mixed_machine_is_as_good_as_its_weakest_card() -> None:
    strong = Card(
        index=1,
        name="NVIDIA A100-SXM4-40GB",
        card_id="A100-40GB",
        total_bytes=40 * GIB,
        compute_capability="8.0",
    )
    machine = Machine(origin="nvml", spec="local", cards=[rtx3090(0), strong])
    job = {"model": "Qwen/Qwen2.5-1.5B", "method": "lora", "seq_len": 2048, "global_batch": 8}
    mixed = problem(machine, find_card("RTX3090"), job)
    twins = problem(Machine(origin="nvml", spec="local", cards=[rtx3090(0), rtx3090(1)]), find_card("RTX3090"), job)
    assert mixed.hardware.capacity_bytes == find_card("RTX3090").nvml_bytes
    first, second = found(mixed).best, found(twins).best
    assert first is not None and second is not None
    assert first.choice == second.choice
    assert first.step_s == second.step_s


def test_an_unknown_card_gets_a_plan_without_times() -> None:
    card = Card(index=0, name="NVIDIA Somethingelse", total_bytes=48 * GIB, compute_capability="8.9")
    machine = Machine(origin="nvml", spec="local", cards=[card])
    p = problem(machine, None, {"model": "Qwen/Qwen3-0.6B", "seq_len": 2048, "global_batch": 8})
    result = found(p)
    assert result.best is not None
    assert result.best.time is None
    assert result.best.step_s == float("inf")
    # With no time to go by, the simplest run comes first.
    assert (result.best.choice.recompute, result.best.choice.offload) == ("full", frozenset())
    assert result.best.verdict.headroom_bytes is not None


def test_a_cpu_trains_in_fp32_with_one_process() -> None:
    machine = Machine(origin="cpu", spec="cpu", host=Host(total_bytes=32 * GIB, available_bytes=24 * GIB, cores=8))
    p = problem(machine, None, {"model": "Qwen/Qwen3-0.6B", "seq_len": 512, "global_batch": 4}, {"trl": "1.16.0"})
    result = found(p)
    assert result.best is not None
    choice = result.best.choice
    assert (choice.sharding, choice.weights, choice.mixed_precision) == ("none", "fp32", "no")
    assert result.best.time is not None
    big = problem(machine, None, {"model": "meta-llama/Llama-3.1-8B", "global_batch": 1}, {"trl": "1.16.0"})
    # 8 B parameters at 16 bytes are 120 GiB.
    assert not found(big).fitting
    assert found(big).near_misses


def test_a_machine_of_unknown_size_fits_everything() -> None:
    machine = Machine(origin="cpu", spec="cpu")
    p = problem(machine, None, {"model": "Qwen/Qwen3-0.6B", "seq_len": 512, "global_batch": 2}, {"trl": "1.16.0"})
    result = found(p)
    assert result.best is not None
    assert result.best.headroom_bytes == 0
    assert not result.near_misses


def test_offload_is_checked_against_the_hosts_memory() -> None:
    """36 layers x 262,144 tokens x 4,096 x 2 bytes are 72 GiB of checkpoints."""
    job = {
        "model": "Qwen/Qwen3-8B",
        "method": "lora",
        "seq_len": 262_144,
        "global_batch": 1,
        "pins": {"offload": ["activations"], "gpus": 1},
    }
    fits = {}
    for gib in (70, 74):
        machine = named_machine("1xH200")
        machine.host = Host(total_bytes=128 * GIB, available_bytes=gib * GIB, cores=8)
        p = problem(machine, find_card("H200"), job)
        result = found(p)
        fits[gib] = bool(result.fitting)
        if not fits[gib]:
            assert any(not c.verdict.host_fits for c in result.near_misses)
    assert fits == {70: False, 74: True}


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_whether_anything_fits_is_what_the_search_says(seed: int) -> None:
    p = random_problem(seed)
    assert any_fits(p.judge, p.options) == bool(random_result(seed).fitting)
