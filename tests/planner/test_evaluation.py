"""Evaluation: one forward pass that keeps nothing, beside the states that a step leaves."""

from __future__ import annotations

from typing import Any

import pytest

from planner.choice import Choice
from planner.memory.activations import ActivationsAt, LayerAt, ModeAt
from planner.memory.depth import depth_of
from planner.memory.loss import LossBytes
from planner.memory.model import MemoryEstimate
from planner.memory.phases import LayerWalker, Moment, States
from planner.memory.sharding import ShardingBytes
from planner.problem import make_problem
from planner.search.search import search
from tests.planner.replay import inputs_of

STATES = States(
    rest={"weights": 0.0, "master": 0.0, "moment1": 0.0, "moment2": 0.0},
    rest_bytes=0.0,
    all_gradients=900.0,
    layer_gradients=(100.0,),
    embedding_gradients=300.0,
    tail_gradients=30.0,
    cast_bytes=(7.0,),
    step_bytes=0.0,
)
LAYER = LayerAt(ModeAt(500, 600, 700, 100), ModeAt(40, 60, 700, 100), ModeAt(50, 60, 700, 100))


def moment(loss: int, recompute: str = "none", hidden: int = 20) -> Moment:
    shard = ShardingBytes(
        layer_gather=(11,), layer_reduce=(13,), ring=(3,), root_forward=5, root_loss=17, rest_buckets=19
    )
    walker = LayerWalker(depth_of((0,) * 6, recompute, False), STATES, shard, tied=True, accumulates=False)
    at = ActivationsAt((LAYER,), model_saved=100, final_norm=hidden)
    return walker.evaluation(at, 2, LossBytes(loss, 99999, "", ""), shard)


def test_a_layer_keeps_its_input_and_no_gradient_exists() -> None:
    # The last of six layers: 100 outside the layers, its input of 40, 60 at work; gathered are 11 and 5, and two rows
    # of 3 for the ring; autocast keeps six copies of 7.
    expected = Moment(
        gradients=0, saved_activations=140, recompute=60, loss=0, gather=11 + 5 + 2 * 3, buckets=19, casts=42
    )
    assert moment(loss=0) == expected
    # However training recomputes.
    assert moment(loss=0, recompute="full") == expected


def test_the_loss_runs_forward_alone() -> None:
    assert moment(loss=1000, hidden=200) == Moment(
        gradients=0, saved_activations=300, recompute=0, loss=1000, gather=17, buckets=19, casts=42
    )


def estimate(choice: Choice, **job: Any) -> MemoryEstimate:
    asked = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, **job}
    return make_problem(inputs_of(asked)).judge.memory.estimate(choice)


HELD_OUT = {"dataset": "a/b", "eval_split": "test"}
FSDP = Choice(method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8)


def test_rows_that_training_holds_do_not_decide() -> None:
    plain, evaluated = estimate(FSDP), estimate(FSDP, data=HELD_OUT)
    assert evaluated.allocated_bytes == plain.allocated_bytes
    assert [phase.name for phase in evaluated.phases][-2:] == ["evaluate", "save"]
    assert "evaluate" not in [phase.name for phase in plain.phases]


def test_more_rows_may_decide_and_are_in_the_verdict() -> None:
    batch = {"per_device_eval_batch_size": 512}
    large = estimate(FSDP, data=HELD_OUT, trl=batch)
    assert large.peak_phase == "evaluate"
    # Hidden states alone: 512 rows of 4,096 tokens, 4,096 wide, in fp32.
    assert large.allocated_bytes > 512 * 4096 * 4096 * 4
    assert not large.fits
    assert estimate(FSDP, data=HELD_OUT, trl={"per_device_eval_batch_size": 16}).allocated_bytes > 0
    # A batch size without evaluation data is a setting that nothing reads.
    assert estimate(FSDP, trl=batch).allocated_bytes == estimate(FSDP).allocated_bytes


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("machine", ["1xH100-80GB", "4xH100-80GB"])
def test_what_is_written_by_default_never_decides(method: str, machine: str) -> None:
    job = {"model": "Qwen/Qwen3-0.6B", "method": method, "machine": machine, "data": HELD_OUT, "seq_len": 2048}
    problem = make_problem(inputs_of(job))
    found = search(problem.judge, problem.options, "fastest").fitting[:50]
    assert found
    for candidate in found:
        memory = problem.judge.memory_of(candidate)
        evaluate = next(phase for phase in memory.phases if phase.name == "evaluate")
        assert evaluate.bytes <= memory.peak.bytes
