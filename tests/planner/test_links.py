"""Communication by hand: bytes over the reached share of a link, and a latency for every collective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.choice import Choice
from planner.hardware import Hardware
from planner.time.links import (
    COLLECTIVE_S,
    HOST_LINK_SHARE,
    LINK_SHARE,
    NODE_COLLECTIVE_S,
    collective_s,
    gathers_s,
    link_bytes_per_s,
    reduction_s,
    sequence_s,
)

H100 = Hardware(
    device="cuda",
    name="H100-80GB",
    gpus_per_node=8,
    capacity_bytes=80 * 2**30,
    matmul_flops=989.4e12,
    fp32_flops=66.9e12,
    bandwidth=3.35e12,
    link=450e9,
    host_link=64e9,
)
FSDP = Choice(method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8)
N = 8_190_735_360


@pytest.mark.parametrize(("measured", "rated"), [(235, 300), (363.3, 450), (365.6, 450), (673.2, 900), (682.2, 900)])
def test_rings_reach_four_fifths_of_a_link(measured: float, rated: float) -> None:
    """nccl-tests on A100, H200 (4 and 8 cards) and B200 (4 and 8), rings without reductions in the switch."""
    assert measured / rated == pytest.approx(LINK_SHARE, rel=0.07)


def test_copies_to_the_host() -> None:
    """nvbandwidth on eight H200s over PCIe 5 x16, up and down."""
    assert pytest.approx(HOST_LINK_SHARE, rel=0.01) == 55.43 / 63
    assert pytest.approx(HOST_LINK_SHARE, rel=0.01) == 55.06 / 63


@pytest.mark.parametrize(
    ("sharding", "passes"), [("fsdp", 3), ("fsdp_no_reshard", 2), ("fsdp1", 3), ("zero3", 4), ("zero2", 1)]
)
def test_gathers_by_sharding(sharding: str, passes: int) -> None:
    """Two gathers and a reduction of bf16 under FSDP2, three under ZeRO-3 with recompute, 7/8 of them from others."""
    choice = replace(FSDP, sharding=sharding)  # type: ignore[arg-type]
    one = 2 * N * 7 / 8 / (0.8 * 450e9)
    latency = passes * (36 + 2) * 25e-6
    assert gathers_s(H100, choice, parameters=N, trainable=N, layers=36) == pytest.approx(passes * one + latency)


def test_without_recompute_zero_3_gathers_once_less() -> None:
    choice = replace(FSDP, sharding="zero3", recompute="none")
    found = gathers_s(H100, choice, parameters=N, trainable=N, layers=36)
    assert found == pytest.approx(3 * 2 * N * 7 / 8 / (0.8 * 450e9) + 3 * 38 * 25e-6)
    assert gathers_s(H100, replace(FSDP, dp_shard=1), parameters=N, trainable=N, layers=36) == 0


def test_a_frozen_base_is_gathered_and_not_reduced() -> None:
    found = gathers_s(H100, FSDP, parameters=N, trainable=0, layers=36)
    assert found == pytest.approx(2 * 2 * N * 7 / 8 / (0.8 * 450e9) + 3 * 38 * 25e-6)


def test_reductions_once_per_step() -> None:
    link = 0.8 * 450e9
    ddp = replace(FSDP, sharding="ddp", dp_shard=1, dp_replicate=8)
    assert reduction_s(H100, ddp, trainable=N, layers=36) == pytest.approx(2 * 7 / 8 * 4 * N / link)
    pure = replace(ddp, weights="bf16", mixed_precision="no")
    assert reduction_s(H100, pure, trainable=N, layers=36) == pytest.approx(2 * 7 / 8 * 2 * N / link)
    zero2 = replace(FSDP, sharding="zero2")
    assert reduction_s(H100, zero2, trainable=N, layers=36) == pytest.approx(2 * 7 / 8 * N / link)
    assert reduction_s(H100, FSDP, trainable=N, layers=36) == 0


def test_zero_1_reduces_once_an_accumulation() -> None:
    """Gradients and then new weights, 7/8 of 2 bytes each; between them nothing moves."""
    zero1 = replace(FSDP, sharding="zero1")
    found = reduction_s(H100, zero1, trainable=N, layers=36)
    assert found == pytest.approx(2 * 2 * 7 / 8 * N / (0.8 * 450e9) + 38 * 25e-6)
    assert gathers_s(H100, zero1, parameters=N, trainable=N, layers=36) == 0


def test_replicas_all_reduce_their_shards_every_micro_batch() -> None:
    """Two replicas exchange half of a quarter twice, in 2 bytes: 2 x 2 x 1/2 x N/4. One replica is FSDP."""
    link = 0.8 * 450e9
    hsdp = replace(FSDP, sharding="hsdp", dp_shard=4, dp_replicate=2)
    sharded = 3 * 2 * N * 3 / 4 / link + 3 * 38 * 25e-6
    found = gathers_s(H100, hsdp, parameters=N, trainable=N, layers=36)
    assert found - sharded == pytest.approx(N / 2 / link + 38 * 25e-6)
    alone = replace(hsdp, dp_replicate=1)
    assert gathers_s(H100, alone, parameters=N, trainable=N, layers=36) == pytest.approx(sharded)
    assert reduction_s(H100, hsdp, trainable=N, layers=36) == 0
    # Four replicas on two nodes: 2 x 2 x 3/4 over the network, of a quarter.
    wide = replace(hsdp, dp_replicate=4)
    over = gathers_s(replace(H100, nodes=2), wide, parameters=N, trainable=N, layers=36)
    assert over - sharded == pytest.approx(3 * N / 4 / (0.8 * 25e9) + 38 * 60e-6)


def test_over_nodes_the_network_decides() -> None:
    two = replace(H100, nodes=2)
    assert link_bytes_per_s(two, 8) == pytest.approx(0.8 * 450e9)
    assert link_bytes_per_s(two, 16) == pytest.approx(0.8 * 25e9)
    assert (collective_s(two, 8), collective_s(two, 16)) == (COLLECTIVE_S, NODE_COLLECTIVE_S)
    assert collective_s(replace(H100, device="cpu"), 2) == 0


def test_context_parallelism_hands_keys_and_values_round() -> None:
    """Qwen3-8B, 131,072 tokens on 8 cards: 1,024 keys and as many values a layer, four times, from the seven others."""
    choice = replace(FSDP, cp=8, dp_shard=1)
    local = 131_072 // 8
    found = local * sequence_s(H100, choice, heads=36 * 4096, kv_heads=36 * 1024)
    assert found == pytest.approx(4 * 2 * 2 * 36 * 1024 * 7 * local / (0.8 * 450e9))
    once_less = local * sequence_s(H100, replace(choice, recompute="none"), heads=36 * 4096, kv_heads=36 * 1024)
    assert once_less == pytest.approx(0.75 * found)


def test_sequence_parallelism_turns_tokens_into_heads() -> None:
    """Queries, keys, values and outputs, in forward, recompute and backward, three quarters of them to other cards."""
    choice = replace(FSDP, sharding="zero3", sp=4, dp_shard=1)
    found = sequence_s(H100, choice, heads=36 * 4096, kv_heads=36 * 1024)
    assert found == pytest.approx(3 * 2 * (4096 + 1024 + 1024 + 4096) * 36 * 3 / 4 / (0.8 * 450e9))
    assert sequence_s(H100, FSDP, heads=36 * 4096, kv_heads=36 * 1024) == 0
