"""Pinned sizes that make no run, and the rule that stands in the way of every choice."""

from __future__ import annotations

from typing import Any

import pytest

from planner.contradictions import common_refusals, size_contradiction
from planner.hardware import Hardware
from planner.ledger.one_choice import choose_one
from planner.pins import PinError
from planner.planning import make_plan
from planner.problem import make_problem
from planner.rules import all_refusals
from planner.search.space import frames
from tests.planner.replay import inputs_of

JOB = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB"}
EIGHT = Hardware(
    device="cuda",
    name="card",
    gpus_per_node=8,
    capacity_bytes=80 << 30,
    matmul_flops=None,
    fp32_flops=None,
    bandwidth=None,
    link=None,
    host_link=None,
)


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"gpus": 6},
        {"cp": 2},
        {"cp": 2, "dp_shard": 4},
        {"cp": 3, "gpus": 6},
        {"dp_shard": 2, "dp_replicate": 2, "gpus": 8},
        {"cp": 1, "sp": 1, "tp": 1, "dp_shard": 3, "dp_replicate": 2},
        {"cp": 1, "sp": 1, "tp": 1, "dp_shard": 16, "dp_replicate": 1},
    ],
    ids=str,
)
def test_sizes_that_some_number_of_gpus_agrees_with(pins: dict[str, int]) -> None:
    """The last: whether the machine has that many is the rule book's to say, so that the ledger can explain it."""
    assert size_contradiction(pins, EIGHT) is None


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        ({"cp": 3}, "cp=3 divides none of the numbers of GPUs tried (1, 2, 4, 8); pin gpus=3 or a multiple of it"),
        ({"cp": 3, "gpus": 8}, "cp=3 makes 3, which does not go with gpus=8; drop one of these pins"),
        ({"cp": 2, "dp_shard": 8}, "cp=2 x dp_shard=8 makes 16 GPUs, and the machine has 8; pin smaller sizes"),
        (
            {"cp": 1, "sp": 1, "tp": 1, "dp_shard": 2, "dp_replicate": 2, "gpus": 8},
            "cp=1 x sp=1 x tp=1 x dp_shard=2 x dp_replicate=2 makes 4, which does not go with gpus=8;"
            " drop one of these pins",
        ),
    ],
    ids=str,
)
def test_sizes_that_make_no_run(pins: dict[str, int], sentence: str) -> None:
    assert size_contradiction(pins, EIGHT) == sentence
    inputs = inputs_of({**JOB, "pins": dict(pins)})
    for planner in (make_plan, choose_one):
        with pytest.raises(PinError) as caught:
            planner(inputs)
        assert str(caught.value) == sentence


def refused(pins: dict[str, Any]) -> Any:
    return make_problem(inputs_of({**JOB, "pins": pins, "seq_len": 16_384}))


def test_common_refusals_are_those_of_every_choice() -> None:
    problem = refused({"cp": 2, "sharding": "ddp"})
    choices = [choice for choice, _ in frames(problem.options, problem.hardware)]
    assert len(choices) > 1
    common = common_refusals(problem.judge.rules, choices)
    assert [refusal.reason for refusal in common][-1] == "cp 2 runs only under fsdp, fsdp_no_reshard or hsdp, not ddp"
    for choice in choices:
        assert {refusal.rule for refusal in common} <= {r.rule for r in all_refusals(problem.judge.rules, choice)}
    legal = [choice for choice, _ in frames(refused({}).options, problem.hardware)]
    assert common_refusals(problem.judge.rules, [*choices, *legal]) == []
    assert common_refusals(problem.judge.rules, []) == []


def test_of_refused_choices_the_least_refused_is_shown() -> None:
    """Brute force over every frame: no other breaks fewer rules."""
    one = choose_one(inputs_of({**JOB, "pins": {"loss_path": "chunked_fp32", "cp": 2}, "seq_len": 16_384}))
    rules = one.problem.judge.rules
    counts = [len(all_refusals(rules, frame)) for frame, _ in frames(one.problem.options, one.problem.hardware)]
    assert min(counts) > 0
    assert len(one.refusals) == min(counts)
    assert one.refusals == all_refusals(rules, one.candidate.choice)
    assert (one.candidate.choice.loss_path, one.candidate.choice.cp) == ("chunked_fp32", 2)
