"""Sizes multiply, shards divide, and a choice survives JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.choice import LOSS_PATHS, OFFLOAD_TARGETS, RECOMPUTES, SHARDINGS, Choice

CHOICE = Choice(method="full", loss_path="fused", recompute="full")


def test_sizes_multiply() -> None:
    choice = replace(CHOICE, sharding="fsdp", cp=2, sp=1, tp=1, dp_shard=4, dp_replicate=3, micro_batch=5, grad_accum=7)
    assert (choice.num_gpus, choice.data_parallel, choice.global_batch) == (24, 12, 420)


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [
        ("none", 1),
        ("ddp", 1),
        # Context-parallel ranks hold the same weights, so FSDP2 shards over them too; replicas do not divide.
        ("fsdp", 8),
        ("fsdp_no_reshard", 8),
        ("hsdp", 8),
        ("fsdp1", 8),
        # DeepSpeed partitions over the whole world.
        ("zero1", 48),
        ("zero2", 48),
        ("zero3", 48),
    ],
)
def test_who_divides_the_states(sharding: Any, ranks: int) -> None:
    sizes: dict[str, Any] = {"cp": 2, "sp": 2, "dp_shard": 4, "dp_replicate": 3}
    assert replace(CHOICE, sharding=sharding, **sizes).shard_ranks == ranks


choices = st.builds(
    Choice,
    method=st.sampled_from(["full", "lora", "qlora"]),
    loss_path=st.sampled_from(LOSS_PATHS),
    recompute=st.sampled_from(RECOMPUTES),
    offload=st.frozensets(st.sampled_from(OFFLOAD_TARGETS)),
    sharding=st.sampled_from(SHARDINGS),
    cp=st.integers(1, 8),
    micro_batch=st.integers(1, 64),
    packing=st.booleans(),
)


@settings(deadline=None)
@given(choices)
def test_json_and_back(choice: Choice) -> None:
    data = choice.to_json()
    assert Choice.from_json(json.loads(json.dumps(data))) == choice
    assert json.dumps(data) == json.dumps(replace(choice).to_json())


def test_json_of_another_kind_is_refused() -> None:
    data = CHOICE.to_json()
    with pytest.raises(TypeError):
        Choice.from_json({**data, "colour": "red"})
    for knob, value in {"micro_batch": True, "cp": 1.0, "grad_accum": "4", "packing": 0}.items():
        with pytest.raises(TypeError, match=knob):
            Choice.from_json({**data, knob: value})
    del data["recompute"]
    with pytest.raises(TypeError):
        Choice.from_json(data)
