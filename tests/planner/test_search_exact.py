"""The search against every combination of every knob, enumerated here and held against rules and models alone.

`tests/planner/test_search.py` holds the search against the frames of its own space; this asks whether the space leaves
out anything that would be better: loss paths, offloads, shardings, splits, numbers of GPUs, batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any, cast

import pytest

from planner.choice import OFFLOAD_TARGETS, RECOMPUTES, SHARDINGS, Choice, LossPath, OffloadTarget
from planner.machine import Host
from planner.problem import Problem
from planner.rules import first_refusal
from planner.search.search import SAME_SPEED, Candidate, rank, search
from planner.search.space import numerics_options
from profiles.cards import find_card
from profiles.releases import newest_known, trl_release
from tests.planner.replay import named_machine, problem_of
from tests.planner.test_search import MODELS, STACKS, problem

MACHINES = ("1xRTX4090", "2xRTX3090", "2xL40S", "4xA100-40GB", "3xRTX4090", "1xT4", "4xH100-80GB", "1xH200")
OFFLOADS = [
    frozenset(cast("tuple[OffloadTarget, ...]", targets))
    for size in range(4)
    for targets in combinations(OFFLOAD_TARGETS, size)
]
SEEDS = range(100)


def sizes(gpus: int) -> Iterator[tuple[int, int, int, int]]:
    """cp, sp, dp_shard, dp_replicate whose product is the number of GPUs."""
    for four in product(range(1, gpus + 1), repeat=4):
        if four[0] * four[1] * four[2] * four[3] == gpus:
            yield four


def combinations_of(p: Problem) -> Iterator[tuple[Choice, Any]]:
    """Everything legal that divides something.

    On one GPU only ZeRO that keeps states on a host that is known: an optimizer's of whole weights, or weights and all.
    Weights leave the card with the optimizer or not at all.
    """
    options, pins = p.options, p.options.pins
    release = trl_release(p.inputs.stack.versions["trl"])
    paths = [
        x for x in release.loss_paths_for(p.inputs.job.trainer) if x != "liger" or p.inputs.stack.has("liger-kernel")
    ]
    numerics = numerics_options(options, p.hardware)
    for gpus in range(1, p.hardware.num_gpus + 1):
        alone = ("none", "zero2", "zero3") if p.inputs.machine.host else ("none",)
        shardings = alone if gpus == 1 else tuple(s for s in SHARDINGS if s != "none")
        for cp, sp, shard, replicate in sizes(gpus):
            per_rank, rest = divmod(options.global_batch, shard * replicate)
            if rest:
                continue
            for sharding, offload, recompute, path, attention, held in product(
                shardings, OFFLOADS, RECOMPUTES, paths, options.attentions, numerics
            ):
                frame = Choice(
                    method=options.method,
                    loss_path=cast("LossPath", path),
                    recompute=recompute,  # type: ignore[arg-type]
                    offload=offload,
                    sharding=sharding,  # type: ignore[arg-type]
                    cp=cp,
                    sp=sp,
                    dp_shard=shard,
                    dp_replicate=replicate,
                    optimizer=held.optimizer,
                    weights=held.weights,
                    mixed_precision=held.mixed_precision,
                    attention=attention,
                    packing=options.packing,
                )
                if any(getattr(frame, knob) != value for knob, value in pins.items()):
                    continue
                if gpus == 1 and sharding == "zero2" and ("optimizer" not in offload or options.method != "full"):
                    continue
                if gpus == 1 and sharding == "zero3" and "params" not in offload:
                    continue
                for micro in (m for m in range(1, per_rank + 1) if per_rank % m == 0):
                    choice = replace(frame, micro_batch=micro, grad_accum=per_rank // micro)
                    if first_refusal(p.judge.rules, choice) is None:
                        yield choice, held.alters


@cache
def random_problem(seed: int) -> Problem:
    r = random.Random(seed)
    spec = r.choice(MACHINES)
    job: dict[str, Any] = {
        "model": r.choice(MODELS),
        "method": r.choice(("full", "lora", "qlora")),
        "trainer": r.choice(("sft", "sft", "dpo", "kto")),
        "seq_len": r.choice((512, 2048, 8192, 32_768, 131_072)),
        "global_batch": r.choice((1, 2, 3, 4, 6)),
        "allow": r.choice(([], ["numerics"])),
        "pins": {},
    }
    if r.random() < 0.7:
        job["pins"]["recompute"] = r.choice(("none", "full", "full", "selective"))
    if r.random() < 0.3:
        job["pins"]["attention"] = "sdpa"
    machine, stack = named_machine(spec), r.choice(STACKS)
    if seed % 2:
        host = Host(total_bytes=256 * 2**30, available_bytes=200 * 2**30, cores=16)
        machine = machine.model_copy(update={"host": host})
    return problem(machine, find_card(spec[2:]), job, stack)


@cache
def everything(seed: int) -> tuple[Candidate, ...]:
    """What fits of all that is legal."""
    p = random_problem(seed)
    judged = (p.judge.judge(choice, alters) for choice, alters in combinations_of(p))
    return tuple(candidate for candidate in judged if candidate.fits)


@pytest.mark.parametrize("block", range(10))
def test_nothing_better_is_left_out(block: int) -> None:
    for seed in SEEDS[block::10]:
        p, fitting = random_problem(seed), list(everything(seed))
        best = search(p.judge, p.options, "fastest").best
        assert (best is None) == (not fitting), seed
        if best is None:
            continue
        first = rank(fitting, "fastest")[0]
        assert best.alters == first.alters, seed
        # Steps within one band are one speed, and the simpler run of them wins.
        assert best.step_s <= first.step_s * (1 + SAME_SPEED) * 1.0001, seed
        fewest = search(p.judge, p.options, "fewest_gpus").best
        assert fewest is not None
        assert fewest.choice.num_gpus == rank(fitting, "fewest_gpus")[0].choice.num_gpus, seed


def test_the_jobs_are_worth_asking() -> None:
    """All knobs are moved by some that fit, and some of the best use fewer cards than there are."""
    fitting = [c.choice for seed in SEEDS for c in everything(seed)]
    assert {c.loss_path for c in fitting} >= {"fused", "chunked_fp32", "full_logits"}
    assert {c.recompute for c in fitting} == set(RECOMPUTES)
    assert {target for c in fitting for target in c.offload} == set(OFFLOAD_TARGETS)
    assert {c.sharding for c in fitting} >= {"none", "ddp", "fsdp", "zero1", "zero2", "zero3"}
    assert {c.num_gpus for c in fitting} >= {1, 2, 3, 4}
    assert max(c.cp for c in fitting) > 1
    bests = [(p, search(p.judge, p.options, "fastest").best) for p in map(random_problem, SEEDS)]
    assert sum(best is not None for _, best in bests) >= 25
    assert any(best and best.choice.num_gpus < p.hardware.num_gpus for p, best in bests)


def test_as_many_cards_as_share_the_batch() -> None:
    """Twelve sequences over eight cards: six read two each, four would read three."""
    job = {"model": "Qwen/Qwen3-0.6B", "machine": "8xH100-80GB", "seq_len": 2048, "global_batch": 12}
    p = problem_of(job, stack=dict(newest_known()))
    best = search(p.judge, p.options, "fastest").best
    assert best is not None
    assert best.choice.num_gpus == 6
    four = problem_of({**job, "pins": {"gpus": 4}}, stack=dict(newest_known()))
    slower = search(four.judge, four.options, "fastest").best
    assert slower is not None
    assert slower.step_s > 1.2 * best.step_s


def test_whole_logits_where_the_chunks_of_a_release_are_slow() -> None:
    """TRL 1.12's chunks copy lm_head to fp32; where 4,096 x 151,936 logits fit, they are faster and as exact."""
    job = {"model": "Qwen/Qwen3-0.6B", "machine": "1xH100-80GB", "seq_len": 4096, "global_batch": 1}
    p = problem_of(job, stack={**newest_known(), "trl": "1.12.0"})
    best = search(p.judge, p.options, "fastest").best
    assert best is not None
    assert best.choice.loss_path == "full_logits"
    chunks = p.judge.judge(replace(best.choice, loss_path="chunked_fp32"), "nothing")
    assert chunks.step_s > 1.05 * best.step_s
    # Where they take most of the card, the chunks are what fits.
    long = problem_of({**job, "seq_len": 65_536}, stack={**newest_known(), "trl": "1.12.0"})
    fits = search(long.judge, long.options, "fastest").best
    assert fits is not None
    assert fits.choice.loss_path == "chunked_fp32"
