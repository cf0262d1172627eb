"""Gathers, buckets, buffers and rings by hand arithmetic on Qwen3 shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.blocks import parameter_blocks
from planner.choice import Choice
from planner.sharding_memory import ShardingBytes, sharding_bytes
from planner.states import trainable_roles
from tests.planner.replay import bundled

CHOICE = Choice(method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8)
LAYER = 192_937_984 + 8_448
"""Qwen3-8B: linears and norms of one of 36 layers."""
HEAD = 151_936 * 4096
ALL = 8_190_735_360


def shard(
    choice: Choice = CHOICE, model: str = "Qwen/Qwen3-8B", *, seq_len: int = 4096, tail: bool = True, **changes: Any
) -> ShardingBytes:
    choice = replace(choice, **changes)
    architecture = bundled(model)
    blocks = parameter_blocks(architecture, choice.method, 16, "all-linear")
    return sharding_bytes(choice, architecture, blocks, trainable_roles(choice), seq_len, tail)


def extra(found: ShardingBytes) -> int:
    return sum((*found.layer_gather, *found.layer_reduce, *found.ring, found.root_forward, found.root_loss)) + (
        found.root_backward + found.rest_buckets + found.step_bytes
    )


def test_one_card_adds_nothing() -> None:
    assert extra(shard(sharding="none", dp_shard=1)) == 0


@pytest.mark.parametrize(("weights", "width"), [("fp32", 4), ("bf16", 2)])
def test_ddp_keeps_a_bucket_copy_of_the_gradients(weights: Any, width: int) -> None:
    found = shard(sharding="ddp", dp_shard=1, dp_replicate=8, weights=weights)
    assert found.rest_buckets == ALL * width
    assert extra(found) == found.rest_buckets


def test_ddp_buckets_of_adapters_alone() -> None:
    found = shard(sharding="ddp", dp_shard=1, dp_replicate=8, method="lora", weights="fp32")
    assert found.rest_buckets == 43_646_976 * 4


def test_fsdp2_gathers_the_layer_in_use_and_the_next() -> None:
    found = shard()
    assert found.layer_gather == (2 * 2 * LAYER,)
    # The unsharded gradients of the layer, and the copy that is being reduced.
    assert found.layer_reduce == (2 * 2 * LAYER,)
    # The loss gathers the head whole; an untied one goes again.
    assert (found.root_loss, found.root_forward, found.root_backward) == (2 * HEAD, 0, 0)
    assert found.rest_buckets == 0
    assert found.save_bytes == max(4 * HEAD, 4 * LAYER)


def test_fsdp2_without_mixed_precision_gathers_what_it_holds() -> None:
    assert shard(weights="fp32", mixed_precision="no").layer_gather == (2 * 4 * LAYER,)


def test_frozen_layers_have_nothing_to_reduce() -> None:
    adapters = 43_646_976 // 36
    found = shard(method="lora", weights="bf16")
    assert found.layer_reduce == (4 * adapters,)
    assert found.layer_gather == (4 * (LAYER + adapters),)
    packed = shard(method="qlora", weights="bf16")
    # Four bits are gathered as a quarter of two bytes.
    assert packed.layer_gather == (4 * (192_937_984 // 4 + 8_448 + adapters),)


def test_a_tied_embedding_stays_whole_until_its_own_backward() -> None:
    head = 151_936 * 2560
    tied = shard(model="Qwen/Qwen3-4B")
    # Weight and gradient, two bytes each.
    assert (tied.root_forward, tied.root_backward) == (2 * head, 4 * head)
    frozen = shard(model="Qwen/Qwen3-4B", method="lora", weights="bf16")
    assert frozen.root_backward == 2 * head
    older = shard(model="Qwen/Qwen3-4B", tail=False)
    assert (older.root_forward, older.root_backward) == (0, 0)


def test_no_reshard_keeps_every_layer() -> None:
    found = shard(sharding="fsdp_no_reshard")
    assert found.layer_gather == (36 * 2 * LAYER,)
    assert found.root_loss == 2 * HEAD + 36 * 2 * LAYER


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_zero_buckets_and_partition(sharding: Any) -> None:
    """A bucket of 500 million bf16 elements at rest; in the step the fp32 partition and a bucket again."""
    found = shard(sharding=sharding)
    assert found.rest_buckets == 1_000_000_000
    assert found.step_bytes == 4 * (ALL // 8) + 1_000_000_000
    assert found.layer_gather == (0,)
    small = shard(sharding=sharding, method="lora")
    assert small.rest_buckets == 2 * 43_646_976


def test_zero3_keeps_a_billion_parameters_alive() -> None:
    found = shard(sharding="zero3")
    assert found.layer_gather == (2_000_000_000,)
    assert found.layer_reduce == (2 * LAYER,)
    assert (found.root_loss, found.save_bytes) == (2 * HEAD, 4 * HEAD)
    # One sub-group of up to a billion elements in fp32.
    assert found.step_bytes == 4 * 1_000_000_000
    wide = shard(sharding="zero3", dp_shard=64)
    assert wide.step_bytes == 4 * (ALL // 64)
    # A layer of Llama-3.1-405B's size would be above the live parameters; two of them are gathered.
    small = shard(sharding="zero3", model="Qwen/Qwen3-0.6B")
    layers = bundled("Qwen/Qwen3-0.6B").num_parameters - 151_936 * 1024 - 1024
    assert small.layer_gather == (2 * layers,)


def test_the_ring_holds_keys_and_values_of_the_whole_sequence() -> None:
    """8 key-value heads x 128, two of them, bf16, 131,072 tokens; the output of an eighth of them in fp32."""
    found = shard(cp=8, dp_shard=1, seq_len=131_072)
    assert found.ring == (2 * 131_072 * 1024 * 2 + 4 * 16_384 * 4096,)
    # Context-parallel ranks shard the weights; what is gathered does not depend on how many.
    assert found.layer_gather == shard().layer_gather
    odd = shard(cp=3, dp_shard=1, seq_len=100)
    assert odd.ring == (2 * 100 * 1024 * 2 + 4 * 34 * 4096,)


def test_every_kind_of_layer_has_its_own_size() -> None:
    found = shard(model="Qwen/Qwen3.5-4B")
    kinds = bundled("Qwen/Qwen3.5-4B").kinds
    assert found.layer_gather == tuple(4 * kind.num_parameters for kind in kinds)
    assert len(set(found.layer_gather)) == len(kinds) == 2
