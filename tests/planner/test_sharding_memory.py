"""Gathers, buckets, buffers and rings by hand arithmetic on Qwen3 shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.memory.blocks import parameter_blocks
from planner.memory.sharding import ShardingBytes, sharding_bytes
from planner.memory.states import trainable_roles
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
    assert not found.beside
    return sum((*found.layer_gather, *found.layer_reduce, *found.ring, found.root_forward, found.root_loss)) + (
        found.root_backward + found.rest_buckets + found.backward_buckets + found.step_bytes + found.last_reduce
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


def test_fsdp2_gathers_one_layer_ahead() -> None:
    """Qwen3-8B, 36 equal layers, head and embedding apart: buffers of gathers and reductions, by hand."""
    found, layer, head = shard(), 2 * LAYER, 2 * HEAD
    assert (found.layer_gather, found.layer_reduce, found.rest_buckets) == ((layer,), (0,), 0)
    first, middle, last = found.beside[0], found.beside[17], found.beside[35]
    # Forward: the buffer that a layer came in stays; the one of what ran before is there until its weights are.
    assert {beside.forward_gather for beside in found.beside} == {layer}
    assert (first.forward_copy, middle.forward_copy) == (head, layer)
    # Backward: the layer below is gathered ahead, below the first the embedding; the layer above is being reduced,
    # above the last the head.
    assert [b.backward_gather for b in (first, middle, last)] == [head, layer, layer]
    assert [b.reduced for b in (first, middle, last)] == [layer, layer, head]
    # The head comes twice, its buffer and its weights, before that with the last layer's buffer; in backward with the
    # last layer ahead. Nothing of it is whole while layers run.
    assert (found.root_loss, found.loss_copy) == (2 * head, layer)
    assert (found.loss_backward, found.loss_ahead) == (head, layer)
    assert (found.root_forward, found.root_backward) == (0, 0)
    # Behind the head: its gradient, the buffer, an eighth of it and the same in fp32, beside the layer ahead.
    assert (found.tail_gather, found.tail_reduce) == (layer, head * (2 + 3 / 8))
    # At last the embedding with its gradient, and the first layer's, is more than what is there while it is reduced.
    assert found.last_gather + found.last_reduce == max(head + head + layer, int(head * (2 + 3 / 8)))
    assert found.save_bytes == max(4 * HEAD, 4 * LAYER)


def test_fsdp2_of_two_ranks_holds_most_when_the_embedding_is_reduced() -> None:
    """Gradient, buffer, half of it and the same in fp32: 3.5 embeddings, without its weights."""
    found = shard(dp_shard=2)
    assert (found.last_gather, found.last_reduce) == (0, 7 * HEAD)


def test_fsdp2_without_mixed_precision_gathers_what_it_holds() -> None:
    found = shard(weights="fp32", mixed_precision="no")
    assert found.layer_gather == (4 * LAYER,)
    # What a rank gets is its gradient, which no replica keeps twice.
    assert found.tail_reduce == int(4 * HEAD * (2 + 1 / 8))
    assert shard(weights="fp32", mixed_precision="no", sharding="hsdp", dp_replicate=2).beside == found.beside


def test_frozen_layers_have_nothing_to_reduce() -> None:
    adapters = 43_646_976 // 36
    found = shard(method="lora", weights="bf16")
    assert [beside.reduced for beside in found.beside] == [2 * adapters] * 35 + [0]
    assert found.layer_gather == (2 * (LAYER + adapters),)
    assert found.tail_reduce == 0
    packed = shard(method="qlora", weights="bf16")
    # Four bits are gathered as a quarter of two bytes.
    assert packed.layer_gather == (2 * (192_937_984 // 4 + 8_448 + adapters),)


@pytest.mark.parametrize(("weights", "width"), [("fp32", 4), ("bf16", 2)])
def test_a_loss_that_reads_a_frozen_heads_weight_gathers_it_as_it_rests(weights: Any, width: int) -> None:
    """PEFT hides the final norm, so the head is a group of its own, and nothing calls it."""
    layer = 2 * (LAYER + 43_646_976 // 36)
    read = shard(method="lora", weights=weights)
    # One copy, and the last layer's buffer, which no later gather replaces.
    assert (read.loss_backward, read.root_loss, read.loss_copy) == (width * HEAD, width * HEAD + layer, 0)
    called = shard(method="lora", weights=weights, loss_path="full_logits")
    assert (called.loss_backward, called.root_loss, called.loss_copy) == (2 * HEAD, 4 * HEAD, layer)


def test_a_tied_embedding_stays_whole_until_its_own_backward() -> None:
    """Qwen3-4B: weight and, through backward, the head's share of its gradient, two bytes each."""
    head = 2 * 151_936 * 2560
    tied = shard(model="Qwen/Qwen3-4B")
    (layer,) = tied.layer_gather
    assert (tied.root_forward, tied.root_backward) == (head, head)
    # The last layer's buffer is still there while the loss runs; the head came with the embedding.
    assert (tied.root_loss, tied.loss_backward, tied.loss_ahead) == (head + layer, head, layer)
    first, last = tied.beside[0], tied.beside[-1]
    # Nothing ran before the first layer, and nothing is being reduced before the last.
    assert (first.backward_gather, first.reduced) == (0, head + layer)
    assert (last.backward_gather, last.reduced) == (layer, head)
    # At last: weight, two gradients, and the first layer's.
    assert (tied.last_gather, tied.last_reduce) == (head, 2 * head + layer)
    # The gradient that full logits make is a view: the sum is a third.
    assert shard(model="Qwen/Qwen3-4B", loss_path="full_logits").last_reduce == 3 * head + layer
    frozen = shard(model="Qwen/Qwen3-4B", method="lora", weights="bf16")
    assert (frozen.root_backward, frozen.beside[-1].reduced, frozen.tail_reduce) == (head, 0, 0)


def test_no_reshard_keeps_every_layer() -> None:
    found, layer, head = shard(sharding="fsdp_no_reshard"), 2 * LAYER, 2 * HEAD
    # Beside the layer in use those below it, and in forward its buffer.
    assert [b.forward_gather for b in found.beside] == [layer * (index + 1) for index in range(36)]
    assert [b.backward_gather for b in found.beside] == [layer * index for index in range(36)]
    # The embedding stays as well, and nothing is gathered ahead.
    assert (found.root_forward, found.root_backward) == (head, head)
    assert (found.loss_backward, found.root_loss, found.loss_ahead) == (2 * head + 36 * layer, 3 * head + 36 * layer, 0)


def test_replicas_keep_what_they_reduced() -> None:
    """An eighth of every gradient in bf16, from its reduction to the end of backward."""
    alone, replicas = shard(), shard(sharding="hsdp", dp_replicate=4)
    layer, head = 2 * LAYER // 8, 2 * HEAD // 8
    more = [two.reduced - one.reduced for one, two in zip(alone.beside, replicas.beside, strict=True)]
    assert more == [head + layer * (35 - index) for index in range(36)]
    assert replicas.layer_gather == alone.layer_gather
    tied = shard(model="Qwen/Qwen3-4B", sharding="hsdp", dp_replicate=4)
    assert tied.beside[-1].reduced == shard(model="Qwen/Qwen3-4B").beside[-1].reduced


def test_older_accelerate_leaves_all_but_the_layers_to_the_root() -> None:
    """Before 1.14: embedding and head whole through forward, gathered again, and whole through backward."""
    found, layer, head = shard(tail=False), 2 * LAYER, 2 * HEAD
    assert (found.root_forward, found.root_backward) == (2 * head, 2 * head)
    # In the loss with the last layer's buffer; then the root's buffer comes, and after that the last layer's.
    assert (found.root_loss, found.root_loss + found.loss_copy) == (2 * head + layer, 4 * head)
    assert (found.loss_backward, found.loss_ahead) == (2 * head + layer, 0)
    # The head's gradient waits for the embedding's. Nothing is gathered below the first layer.
    assert [found.beside[index].reduced for index in (0, 35)] == [head + layer, head]
    assert [found.beside[index].backward_gather for index in (0, 35)] == [0, layer]


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_zero_holds_its_bucket_in_backward_alone(sharding: Any) -> None:
    """500 million bf16 elements; in the step an eighth of the gradients in fp32, made of a flat bf16 copy."""
    found = shard(sharding=sharding)
    assert (found.rest_buckets, found.backward_buckets, found.root_loss) == (0, 1_000_000_000, 0)
    assert (found.step_bytes, found.step_copy) == (4 * 1_023_841_920, 2 * 1_023_841_920)
    assert found.layer_gather == (0,)
    # Adapters fit into one bucket, which is allocated no larger: nothing is reduced before backward has run.
    small = shard(sharding=sharding, method="lora")
    assert (small.backward_buckets, small.layer_reduce) == (2 * 43_646_976, (0,))


def test_zero2_reduces_a_copy_of_each_full_bucket() -> None:
    found = shard(sharding="zero2")
    assert (found.layer_reduce, found.last_reduce, found.last_gradients) == ((1_000_000_000,), 1_000_000_000, 0)
    # Ranks that share sequences sum in fp32, beside the copy.
    assert shard(sharding="zero2", sp=4).last_reduce == 3_000_000_000
    assert shard(sharding="zero2", method="lora").last_reduce == 2 * 43_646_976


def test_zero1_reduces_when_all_gradients_are_there() -> None:
    """Bucket and copy take the place of gradients; what the rank keeps of them comes on top."""
    found = shard(sharding="zero1")
    assert (found.layer_reduce, found.last_reduce, found.last_gradients) == ((0,), 0, 2 * 1_023_841_920)


def test_zero3_keeps_a_billion_parameters_alive() -> None:
    found = shard(sharding="zero3")
    assert found.layer_gather == (2_000_000_000,)
    assert (found.root_loss, found.root_forward, found.save_bytes) == (2_000_000_000, 0, 4 * HEAD)
    # The bucket is there for good, and is copied whenever it is full.
    assert (found.rest_buckets, found.layer_reduce) == (1_000_000_000, (1_000_000_000,))
    # One sub-group of up to a billion elements in fp32.
    assert (found.step_bytes, found.step_copy) == (4 * 1_000_000_000, 2 * 1_000_000_000)
    wide = shard(sharding="zero3", dp_shard=64)
    assert wide.step_bytes == 4 * 127_980_240
    # Norms of layers and the last one are whole at the end of backward and of the step; in backward the embedding too,
    # and the head whose weight the loss read.
    small_ones = 2 * (36 * 8_448 + 4096)
    assert (found.last_gather, found.step_gather, found.root_backward) == (small_ones + 4 * HEAD, small_ones, 0)
    assert shard(sharding="zero3", loss_path="full_logits").last_gather == small_ones + 2 * HEAD
    adapted = shard(sharding="zero3", method="lora")
    assert (adapted.last_gather, adapted.step_gather) == (small_ones + 2 * 43_646_976,) * 2
    # A small model stays whole, its head with it, which is the embedding. Forward holds a prefetch beside it.
    small = shard(sharding="zero3", model="Qwen/Qwen3-0.6B")
    assert small.layer_gather == (2 * 596_049_920,)
    assert (small.root_forward, small.root_backward) == (2 * 50_331_648, 0)


def test_ulysses_holds_queries_keys_and_values_twice() -> None:
    """Qwen3-8B: 32 query heads and 8 of keys and values, 128 wide, bf16; a quarter of 131,072 tokens."""
    found = shard(sharding="zero3", sp=4, dp_shard=2, seq_len=131_072)
    assert found.ring == (2 * 32_768 * (32 + 2 * 8) * 128,)
    # Sixteen ranks share eight heads: each is sent twice.
    many = shard(sharding="zero3", sp=16, dp_shard=1, seq_len=131_072)
    assert many.ring == (2 * 8_192 * (32 + 2 * 16) * 128,)


def test_the_ring_holds_keys_and_values_of_the_whole_sequence() -> None:
    """8 key-value heads x 128, two of them, bf16, 131,072 tokens; the output of an eighth of them in fp32."""
    found = shard(cp=8, dp_shard=1, seq_len=131_072)
    assert found.ring == (2 * 131_072 * 1024 * 2 + 4 * 16_384 * 4096,)
    # Context-parallel ranks shard the weights; what is gathered does not depend on how many.
    assert found.layer_gather == shard().layer_gather
    odd = shard(cp=3, dp_shard=1, seq_len=100)
    assert odd.ring == (2 * 100 * 1024 * 2 + 4 * 34 * 4096,)


def test_every_kind_of_layer_has_its_own_size() -> None:
    found, architecture = shard(model="Qwen/Qwen3.5-4B"), bundled("Qwen/Qwen3.5-4B")
    sizes = [2 * kind.num_parameters for kind in architecture.kinds]
    assert found.layer_gather == tuple(sizes)
    assert len(set(sizes)) == 2
    # Ahead is the layer below, whatever its kind.
    below = [sizes[kind] for kind in architecture.order[:-1]]
    assert [beside.backward_gather for beside in found.beside[1:]] == below
