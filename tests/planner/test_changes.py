"""What would fit, or help: each lever offered with the plan it makes, and never made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.advice.changes import Change, changes_that_fit, changes_that_help
from planner.machine import Card, Host, Machine
from planner.problem import PlanInput, make_problem
from planner.rules import all_refusals
from planner.search.search import search
from profiles.cards import find_card, load_cards
from profiles.releases import newest_known
from tests.planner.replay import inputs_of, named_machine, problem_of

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
    assert [change.lever for change in found] == ["states on the host", "lora", "qlora", "more GPUs", "another card"]
    assert [change.alters for change in found] == ["nothing", "method", "method", "nothing", "nothing"]
    flags = [change.flags for change in found]
    # 16 bytes of 8 B parameters are 120 GiB: more than 96 GB, and an H200 has 141.
    on_host, *rest = flags
    assert on_host == "--pin sharding=zero2 --pin offload=optimizer --stack deepspeed=0.19.8"
    assert rest == ["--method lora", "--method qlora", "--machine 2xRTX4090", "--machine 1xH200"]
    assert "GiB of host memory per node" in found[3].sentence
    assert "host memory" not in found[4].sentence


def test_another_card_is_the_smallest_that_fits() -> None:
    inputs = inputs_of(TIGHT, stack=BITSANDBYTES)
    change = fitting(inputs)["another card"]
    size = change.problem.hardware.capacity_bytes
    assert size is not None
    between = [card for card in load_cards() if find_card("RTX4090").nvml_bytes < card.nvml_bytes < size]
    assert len(between) > 5
    for card in between:
        machine = named_machine(f"1x{card.id}")
        smaller = make_problem(replace(inputs, machine=machine, profile=card))
        assert not search(smaller.judge, smaller.options, "fastest").fitting, card.id


def test_a_pin_that_stands_in_the_way_is_named() -> None:
    """8 B parameters of LoRA on 24 GB need recompute."""
    job = {**TIGHT, "method": "lora", "global_batch": 1, "pins": {"recompute": "none", "attention": "sdpa"}}
    change = fitting(inputs_of(job, stack=BITSANDBYTES))["no pins"]
    assert change.flags == "(drop --pin recompute=none)"
    assert change.sentence.startswith("without --pin recompute=none: fits with ")
    assert change.candidate.choice.recompute != "none"


def test_more_than_a_node_of_cards_are_more_nodes() -> None:
    job = {**TIGHT, "model": "meta-llama/Llama-3.1-70B", "machine": "8xH100-80GB", "pins": {"offload": []}}
    change = fitting(inputs_of(job, stack=BITSANDBYTES))["more GPUs"]
    nodes = change.problem.hardware.nodes
    assert change.flags == f"--machine 8xH100-80GB --nodes {nodes}"
    # 16 bytes of each of 70,553,706,496 parameters: 141 GB a card on one node, 70.6 GB on two, before anything else.
    assert nodes in (2, 4)
    fewer = make_problem(inputs_of(job, stack=BITSANDBYTES, nodes=nodes // 2))
    assert not search(fewer.judge, fewer.options, "fastest").fitting


def test_what_no_single_lever_makes_fit() -> None:
    """72 B parameters on 24 GB: 36 GB even in four bits, 1.1 TB in full; QLoRA over several such cards is 9 GB each."""
    job = {**TIGHT, "model": "Qwen/Qwen2.5-72B", "pins": {"offload": []}}
    (change,) = changes_that_fit(inputs_of(job, stack=BITSANDBYTES))
    assert change.lever == "all together"
    assert change.flags in [f"--allow numerics --method qlora --machine {n}xRTX4090" for n in (4, 8)]
    assert change.candidate.fits and change.candidate.choice.method == "qlora"
    assert changes_that_fit(inputs_of({**job, "machine": "1xT4", "seq_len": 1_048_576}, stack=BITSANDBYTES)) == []


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
    assert [c.lever for c in found] == ["states on the host", "lora", "qlora", "more GPUs", "another card"]


def helping(job: dict[str, Any], stack: dict[str, str]) -> dict[str, Change]:
    problem = problem_of(job, stack=stack)
    best = search(problem.judge, problem.options, "fastest").best
    assert best is not None
    return {change.lever: change for change in changes_that_help(problem.inputs, problem, best)}


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
    old = {**newest_known(), "trl": "1.12.0"}
    change = helping({**SMALL, "pins": {"loss_path": "chunked_fp32"}}, old)["newer TRL"]
    assert change.flags == f"--stack trl={NEWEST}"
    assert change.sentence.startswith(f"TRL {NEWEST} computes the loss as fused, TRL 1.12.0 as chunked_fp32: ")
    assert "less time per step" in change.sentence
    assert change.candidate.choice.loss_path == "fused"
    # A plan that is free takes whole logits there, which are faster, and the upgrade still saves their memory.
    free = helping(SMALL, old)["newer TRL"]
    assert ", TRL 1.12.0 as full_logits: " in free.sentence and "GiB less per GPU at the peak" in free.sentence


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
    found = changes_that_help(problem.inputs, problem, best)
    assert [change.lever for change in found] == ["newer TRL"]
    assert found[0].sentence.endswith("GiB less per GPU at the peak")


def busy_machine(*used_gib: int) -> Machine:
    total = find_card("RTX3090").nvml_bytes
    cards = [
        Card(
            index=index,
            name="NVIDIA GeForce RTX 3090",
            card_id="RTX3090",
            total_bytes=total,
            used_bytes=used * 2**30,
            compute_capability="8.6",
        )
        for index, used in enumerate(used_gib)
    ]
    return Machine(origin="nvml", spec="local", cards=cards)


BUSY: dict[str, Any] = {"model": "Qwen/Qwen2.5-1.5B", "method": "lora", "seq_len": 2048, "global_batch": 8}


def test_busy_cards_are_worth_waiting_for() -> None:
    inputs = inputs_of(BUSY, stack=BITSANDBYTES, machine=busy_machine(22, 0))
    problem = make_problem(inputs)
    best = search(problem.judge, problem.options, "fastest").best
    assert best is not None and best.choice.num_gpus == 1
    (change,) = [c for c in changes_that_help(problem.inputs, problem, best) if c.lever == "idle cards"]
    assert (change.flags, change.alters) == ("(once idle)", "nothing")
    assert change.sentence.startswith("with card 0 to itself: fits with ")
    assert change.candidate.choice.num_gpus == 2
    assert change.candidate.step_s < 0.9 * best.step_s
    # Idle cards have nothing to wait for, and a desktop is no other process.
    for used in ((0, 0), (0,)):
        calm = make_problem(inputs_of(BUSY, stack=BITSANDBYTES, machine=busy_machine(*used)))
        found = search(calm.judge, calm.options, "fastest").best
        assert found is not None
        assert "idle cards" not in {c.lever for c in changes_that_help(calm.inputs, calm, found)}


def test_where_nothing_fits_because_of_others_that_is_said_first() -> None:
    inputs = inputs_of(BUSY, stack=BITSANDBYTES, machine=busy_machine(23, 23))
    found = changes_that_fit(inputs)
    assert found[0].lever == "idle cards"
    assert found[0].sentence.startswith("with cards 0, 1 to itself: fits with ")


def test_a_cpu_is_offered_the_smallest_card_that_does_it() -> None:
    host = Host(total_bytes=64 * 2**30, available_bytes=48 * 2**30, cores=8)
    machine = Machine(origin="cpu", spec="cpu", host=host)
    inputs = inputs_of({**SMALL, "machine": "cpu", "seq_len": 512}, stack={"trl": "1.16.0"}, machine=machine)
    problem = make_problem(inputs)
    best = search(problem.judge, problem.options, "fastest").best
    assert best is not None
    (change,) = [c for c in changes_that_help(problem.inputs, problem, best) if c.lever == "another card"]
    (card,) = change.problem.inputs.machine.usable_cards
    assert change.flags == f"--machine 1x{card.card_id}"
    # 16 bytes of 0.6 B parameters are 8.9 GiB, and no smaller card of the table would do.
    assert 8.9 < card.total_bytes / 2**30 < 17
    for other in (c for c in load_cards() if c.nvml_bytes < card.total_bytes):
        smaller = make_problem(replace(inputs, machine=named_machine(f"1x{other.id}"), profile=other))
        assert not search(smaller.judge, smaller.options, "fastest").fitting, other.id


@pytest.mark.parametrize(("available", "fits"), [(256, True), (128, False)])
def test_one_card_keeps_states_on_a_host_that_holds_them(available: int, fits: bool) -> None:
    """8.19 B parameters: master, two moments and gradients in fp32 are 16 bytes each there, 122 GiB before buffers."""
    inputs = inputs_of({**TIGHT, "seq_len": 2048}, stack={**newest_known(), "deepspeed": "0.19.8"})
    host = Host(total_bytes=512 * 2**30, available_bytes=available * 2**30, cores=32)
    known = replace(inputs, machine=inputs.machine.model_copy(update={"host": host}))
    problem = make_problem(known)
    best = search(problem.judge, problem.options, "fastest").best
    assert (best is not None) == fits
    if best is not None:
        assert best.choice.sharding in ("zero2", "zero3") and "optimizer" in best.choice.offload
        # Adapters need no gradients of the base, a third of the products, and leave no states to move.
        levers = {change.lever: change.candidate.step_s for change in changes_that_help(known, problem, best)}
        assert levers["lora"] < 0.75 * best.step_s
    # Of an unknown host nothing is said to fit: what it would take is offered.
    unknown = make_problem(inputs)
    assert search(unknown.judge, unknown.options, "fastest").best is None
    (offer,) = [change for change in changes_that_fit(inputs) if change.lever == "states on the host"]
    assert offer.flags.startswith("--pin sharding=zero") and "GiB of host memory per node" in offer.sentence
