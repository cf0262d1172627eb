"""Reasons with numbers: what binds, what each lever is for, and by what a miss fails."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from planner.advice.reasons import peak_sentence, why
from planner.choice import Choice
from planner.machine import Host
from planner.memory.host import HostMemory
from planner.memory.model import MemoryEstimate
from planner.memory.phases import Phase
from planner.problem import Problem, make_problem
from planner.search.shortage import largest_part, shortage
from tests.planner.replay import named_machine, problem_of

GIB = 2**30
CHOICE = Choice(method="full", loss_path="fused", recompute="full")
SHARDED = replace(CHOICE, sharding="fsdp", dp_shard=8)


def problem(**job: Any) -> Problem:
    values = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 8, **job}
    return problem_of(values, stack={"trl": "1.16.0"})


H100 = replace(problem().hardware, taken_bytes=())
"""Whose driver takes nothing."""


def memory(*, reserve: float = 0.05, **changes: Any) -> MemoryEstimate:
    found = problem(reserve=reserve).judge.memory.estimate(SHARDED)
    peak = Phase("backward", {"saved_activations": 7 * GIB, "gather": 2 * GIB})
    values = {"peak_phase": "backward", "phases": (peak,), "capacity_bytes": 80 * GIB, **changes}
    return replace(found, **values)


def test_the_largest_part_by_its_name() -> None:
    assert largest_part(memory()) == ("saved activations", 7 * GIB)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"device_bytes": 83 * GIB, "headroom_bytes": -7 * GIB},
            "3.0 GiB over the card in backward; largest there: saved activations 7.0 GiB",
        ),
        (
            {"device_bytes": 78 * GIB, "headroom_bytes": -2 * GIB},
            "2.0 GiB into the reserve in backward; largest there: saved activations 7.0 GiB",
        ),
        (
            {"device_bytes": 75 * GIB, "headroom_bytes": GIB},
            "fits by 1.0 GiB, but the upper end of the interval does not in backward; largest there: saved activations",
        ),
        (
            {"host_fits": False, "host": HostMemory((), 100 * GIB)},
            "needs 100.0 GiB of host memory per node, more than is available",
        ),
    ],
)
def test_by_what_a_choice_fails(changes: dict[str, Any], sentence: str) -> None:
    assert shortage(memory(**changes), H100, 8).startswith(sentence)


def test_what_binds() -> None:
    found = memory(device_bytes=70 * GIB)
    assert peak_sentence(found) == "peak 70.0 of 80.0 GiB in backward; largest there: saved activations 7.0 GiB"
    nowhere = memory(device_bytes=70 * GIB, capacity_bytes=None)
    assert peak_sentence(nowhere).startswith("peak 70.0 GiB in backward")
    little = memory(device_bytes=12 * 2**20, phases=(Phase("backward", {"weights": 7 * 2**20}),))
    assert peak_sentence(little) == "peak 12.0 MiB of 80.0 GiB in backward; largest there: weights 7.0 MiB"


def reasons(choice: Choice, **job: Any) -> list[str]:
    judge = problem(**job).judge
    return why(judge, judge.judge(choice, "nothing"))


def test_each_lever_says_what_happens_without_it() -> None:
    levers = replace(SHARDED, cp=8, dp_shard=1, offload=frozenset({"activations"}))
    found = reasons(levers, seq_len=1_048_576, global_batch=1)
    starts = [
        "peak ",
        "without recompute full: ",
        "without activation offload: ",
        "without context parallelism over 8: ",
        "without sharding fsdp: ",
        "most time goes to attention: 9",
    ]
    assert [reason.startswith(start) for reason, start in zip(found, starts, strict=True)] == [True] * 6
    assert re.fullmatch(r"without activation offload: [\d.]+ GiB over the card in backward; .*", found[2])


def test_levers_that_save_time_say_how_much() -> None:
    """fp32 weights under DDP's autocast keep an fp32 residual stream, which FSDP2 does not."""
    choice = replace(SHARDED, recompute="none")
    plain = replace(choice, sharding="ddp", dp_shard=1, dp_replicate=8)
    judge = problem(model="Qwen/Qwen3-0.6B").judge
    fast, slow = (judge.judge(c, "nothing").step_s for c in (choice, plain))
    assert slow > fast
    assert f"without sharding fsdp: fits, but {slow / fast - 1:.0%} slower" in reasons(choice, model="Qwen/Qwen3-0.6B")


def test_a_split_is_compared_by_the_sequence() -> None:
    """Eight cards that no longer share one sequence read eight, in a step four times as long: twice the pace."""
    split = replace(SHARDED, sharding="zero3", sp=8, dp_shard=1)
    judge = problem().judge
    apart = judge.judge(replace(split, sp=1, dp_shard=8), "nothing")
    assert apart.step_s > judge.judge(split, "nothing").step_s
    assert not any("sequence parallelism" in s for s in reasons(split))


def test_far_slower_has_no_percentage() -> None:
    judge = problem(model="Qwen/Qwen3-0.6B").judge
    candidate = judge.judge(replace(SHARDED, recompute="none"), "nothing")
    assert candidate.time is not None
    quick = candidate._replace(time=candidate.time._replace(step_s=1e-6))
    assert "without sharding fsdp: fits, but far slower" in why(judge, quick)


def test_offloaded_states_are_named_together() -> None:
    tight = {"machine": "2xA100-40GB", "global_batch": 2}
    both = replace(SHARDED, dp_shard=2, offload=frozenset({"optimizer", "params", "activations"}))
    found = reasons(both, **tight)
    assert any(re.match(r"without offload of optimizer and params: [\d.]+ GiB over the card", s) for s in found)
    one = replace(both, sharding="zero2", offload=frozenset({"optimizer"}))
    assert any(re.match(r"without offload of optimizer: [\d.]+ GiB over the card", s) for s in reasons(one, **tight))


def test_levers_that_do_nothing_are_left_out() -> None:
    """A small model on one card: recompute costs time and is not needed, so nothing is said for it."""
    single = replace(CHOICE, recompute="full")
    found = reasons(single, model="Qwen/Qwen3-0.6B", machine="1xH100-80GB", seq_len=512, global_batch=1)
    assert len(found) == 2
    assert (found[0].split()[0], found[1].split()[0]) == ("peak", "most")


def test_without_rates_there_is_no_word_of_time() -> None:
    inputs = problem().inputs
    blind = make_problem(replace(inputs, profile=None)).judge
    found = why(blind, blind.judge(SHARDED, "nothing"))
    assert not any("time" in s or "slower" in s for s in found)


def test_host_memory_that_is_short_is_the_reason() -> None:
    machine = named_machine("8xH100-80GB")
    machine.host = Host(total_bytes=GIB, available_bytes=GIB, cores=8)
    values = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 8}
    judge = problem_of(values, machine=machine).judge
    found = judge.memory.estimate(replace(SHARDED, offload=frozenset({"activations"})))
    # 8 ranks load 8,190,735,360 parameters in fp32, and are processes of 400 MiB each.
    lacks = shortage(found, judge.hardware, 8)
    assert lacks == "needs 247.2 GiB of host memory per node, of which 1.0 are available"


def test_another_loss_path_than_the_releases_own_says_why() -> None:
    """TRL 1.12's chunks copy lm_head to fp32 for every 256 tokens; whole logits do without."""
    job = {"model": "Qwen/Qwen3-0.6B", "machine": "1xH100-80GB", "seq_len": 4096, "global_batch": 1}
    judge = problem_of(job, stack={"trl": "1.12.0"}).judge
    found = why(judge, judge.judge(replace(CHOICE, loss_path="full_logits"), "nothing"))
    (line,) = [line for line in found if "loss path" in line]
    assert re.fullmatch(
        r"without loss path full_logits \(with TRL's default chunked_fp32\): fits, but \d+% slower", line
    )


def test_cards_that_a_batch_leaves_alone_are_explained() -> None:
    job = {"model": "Qwen/Qwen3-0.6B", "machine": "8xH100-80GB", "seq_len": 1024}
    for batch, used in ((12, 6), (9, 3)):
        judge = problem_of({**job, "global_batch": batch}, stack={"trl": "1.16.0"}).judge
        choice = replace(CHOICE, sharding="ddp", dp_replicate=used, grad_accum=batch // used)
        assert why(judge, judge.judge(choice, "nothing"))[1] == (
            f"uses {used} of 8 GPUs: a global batch of {batch} does not divide over 8; 8 or 16 would"
        )
    whole = problem_of({**job, "global_batch": 16}, stack={"trl": "1.16.0"}).judge
    half = replace(CHOICE, sharding="ddp", dp_replicate=4, grad_accum=4)
    assert not any("does not divide" in line for line in why(whole, whole.judge(half, "nothing")))


def test_small_sizes_are_said_in_mib_and_a_cpu_has_no_card() -> None:
    little = memory(device_bytes=76 * GIB + 40 * 2**20, headroom_bytes=-40 * 2**20)
    assert shortage(little, H100, 8).startswith("40.0 MiB into the reserve")
    found = memory(device_bytes=83 * GIB, headroom_bytes=-7 * GIB)
    cpu = replace(H100, device="cpu")
    assert shortage(found, cpu, 8).startswith("3.0 GiB over what is free of the host in backward")
    busy = replace(H100, taken_bytes=(0, 5 * GIB))
    assert shortage(found, busy, 2).startswith("8.0 GiB over what is free of the card in backward")
    assert shortage(found, busy, 1).startswith("3.0 GiB over the card in backward")
    # Less than 3 % is the driver's own.
    assert shortage(found, replace(H100, taken_bytes=(GIB,)), 1).startswith("4.0 GiB over the card in backward")
