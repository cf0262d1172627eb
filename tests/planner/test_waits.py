"""What a step waits for: shares that foretell what a faster card would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.hardware import Hardware
from planner.problem import Problem
from planner.time.step import TimeModel
from planner.time.waits import RESOURCES, waits
from tests.planner.replay import problem_of

JOB: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 8}
SHARDED = Choice(method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8)
ALONE = replace(SHARDED, sharding="none", dp_shard=1, grad_accum=8)


def problem(**changes: Any) -> Problem:
    return problem_of({**JOB, **changes}, stack={"trl": "1.16.0"})


def step_s(p: Problem, choice: Choice, hardware: Hardware) -> float:
    found = TimeModel(job=p.judge.time.job, hardware=hardware, blocks_of=p.judge.time.blocks_of).estimate(choice)
    assert found is not None
    return found.step_s


@pytest.mark.parametrize("choice", [SHARDED, replace(SHARDED, cp=8, dp_shard=1, grad_accum=8), ALONE])
@pytest.mark.parametrize("card", ["H100-80GB", "RTX4090"])
def test_shares_of_a_whole(choice: Choice, card: str) -> None:
    found = waits(problem(machine=f"8x{card}").judge.time, choice)
    assert found is not None
    assert tuple(found) == RESOURCES
    assert sum(found.values()) == pytest.approx(1)
    assert all(share >= 0 for share in found.values())


def test_a_card_of_twice_the_arithmetic_takes_half_of_that_share_less() -> None:
    p = problem()
    hardware = p.hardware
    assert hardware.matmul_flops is not None and hardware.bandwidth is not None
    assert hardware.fp32_flops is not None
    found, now = waits(p.judge.time, ALONE), step_s(p, ALONE, hardware)
    assert found is not None
    faster = replace(hardware, matmul_flops=2 * hardware.matmul_flops, fp32_flops=2 * hardware.fp32_flops)
    assert step_s(p, ALONE, faster) / now == pytest.approx(1 - found["compute"] / 2, rel=0.01)
    wider = replace(hardware, bandwidth=2 * hardware.bandwidth)
    assert step_s(p, ALONE, wider) / now == pytest.approx(1 - found["memory"] / 2, rel=0.01)
    assert found["link"] == found["host_link"] == found["launches"] == 0


def test_cards_on_pcie_wait_for_the_link() -> None:
    """8 B parameters gathered twice and reduced once a step over 32 GB/s: more than a second that nothing hides."""
    p = problem(machine="8xRTX4090", seq_len=512)
    time = p.judge.time.estimate(SHARDED)
    assert time is not None
    found = waits(p.judge.time, SHARDED)
    assert found is not None
    assert found["link"] > 0.3
    assert found["link"] == pytest.approx(time.parts["communication"] / time.step_s, abs=0.01)


def test_checkpoints_on_their_way_to_the_host() -> None:
    """Both copies are on the compute stream: 8 x 4,096 tokens of 36 checkpoints of 4,096 fp32 values, both ways."""
    p = problem()
    found = waits(p.judge.time, replace(ALONE, offload=frozenset({"activations"})))
    assert found is not None and p.hardware.host_link is not None
    seconds = 8 * 4096 * 36 * 4096 * 4 * 2 / (0.88 * p.hardware.host_link)
    whole = step_s(p, replace(ALONE, offload=frozenset({"activations"})), p.hardware)
    assert found["host_link"] == pytest.approx(seconds / whole, rel=0.05)


def test_a_small_model_waits_for_its_launches() -> None:
    found = waits(problem(model="Qwen/Qwen3-0.6B", seq_len=64).judge.time, replace(ALONE, recompute="none"))
    assert found is not None
    assert max(found, key=lambda name: found[name]) == "launches"


def test_nothing_is_known_of_a_card_without_rates() -> None:
    p = problem()
    hardware = replace(p.hardware, matmul_flops=None)
    model = TimeModel(job=p.judge.time.job, hardware=hardware, blocks_of=p.judge.time.blocks_of)
    assert waits(model, ALONE) is None
