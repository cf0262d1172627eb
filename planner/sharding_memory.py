"""What sharding adds on top of the divided states: gathered weights, gradient buckets, reduce copies, rings.

Sources: accelerate/utils/fsdp_utils.py (grouping, upcasts), torch fully_shard (all-gather, reduce-scatter in the
parameter's compute dtype, next group prefetched), deepspeed defaults (bucket sizes in elements), torch DDP
(gradient buckets beside the gradients), torch context parallel (all-gathered keys and values).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.architecture import Architecture
from planner.blocks import Blocks
from planner.choice import ZERO, Choice
from planner.states import Roles, compute_bytes

ZERO_BUCKET_ELEMENTS = 500_000_000
"""reduce_bucket_size and allgather_bucket_size where no DeepSpeed JSON sets them (deepspeed/runtime/zero/config.py)."""
ZERO3_LIVE_ELEMENTS = 1_000_000_000
"""stage3_max_live_parameters (deepspeed/runtime/zero/config.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingBytes:
    """Extra bytes on one rank, by moment."""

    layer_gather: tuple[int, ...]
    """Per layer kind: unsharded weights of the layer in use and the one prefetched."""
    layer_reduce: tuple[int, ...]
    """Per layer kind: unsharded gradients of the layer and the copy that is being reduced."""
    ring: tuple[int, ...]
    """Per layer kind and row of the micro-batch: context parallelism's keys, values and merged output, while attention
    runs."""
    root_forward: int = 0
    """Groups that stay gathered through the whole forward."""
    root_loss: int = 0
    root_backward: int = 0
    rest_buckets: int = 0
    """Buffers that live all the time."""
    step_bytes: int = 0
    load_bytes: int = 0
    save_bytes: int = 0


def sharding_bytes(
    choice: Choice,
    architecture: Architecture,
    blocks: Blocks,
    trained: Roles,
    seq_len: int,
    tail_group: bool,
) -> ShardingBytes:
    """Extra bytes of ``choice.sharding``.

    Args:
        choice: the knobs.
        architecture: shapes.
        blocks: parameters by part and fate.
        trained: roles of the trainable parameters.
        seq_len: tokens of a whole sequence, before context parallelism divides it.
        tail_group: final norm and head form one FSDP2 group that is not resharded after forward.
    """
    none = (0,) * len(architecture.kinds)
    if choice.sharding == "none":
        return ShardingBytes(layer_gather=none, layer_reduce=none, ring=none)
    if choice.sharding == "ddp":
        buckets = int(blocks.total.trainable * trained.gradients)
        return ShardingBytes(layer_gather=none, layer_reduce=none, ring=none, rest_buckets=buckets)
    if choice.sharding in ZERO:
        return _zero(choice, architecture, blocks)
    # Gradient accumulation adds nothing here: written runs synchronise every micro-batch, so gradients stay sharded.
    return _fsdp(choice, architecture, blocks, seq_len, tail_group)


def _ring(choice: Choice, architecture: Architecture, seq_len: int) -> tuple[int, ...]:
    """Keys and values of the whole sequence of one layer, and the fp32 output that partial results merge into."""
    if choice.cp == 1:
        return (0,) * len(architecture.kinds)
    c = compute_bytes(choice)
    out: list[int] = []
    for kind in architecture.kinds:
        kv = 2 * seq_len * kind.kv_heads * kind.head_dim * c
        merged = 4 * -(-seq_len // choice.cp) * kind.heads * kind.head_dim
        out.append(kv + merged)
    return tuple(out)


def _fsdp(choice: Choice, architecture: Architecture, blocks: Blocks, seq_len: int, tail_group: bool) -> ShardingBytes:
    width = compute_bytes(choice)
    layers = [b.trained + b.frozen + b.adapter + b.quantised // 4 for b in blocks.kinds]
    trainable = [b.trainable for b in blocks.kinds]
    whole_model = sum(layers[kind] for kind in architecture.order) * width
    head = architecture.vocab * architecture.hidden * width
    tied = architecture.tied
    stays = choice.sharding == "fsdp_no_reshard"  # every layer is gathered from its forward to its backward
    gather = [whole_model if stays else 2 * width * n for n in layers]
    reduce = [2 * width * n for n in trainable]
    return ShardingBytes(
        layer_gather=tuple(gather),
        layer_reduce=tuple(reduce),
        ring=_ring(choice, architecture, seq_len),
        root_forward=head if tied and tail_group else 0,
        root_loss=head + (whole_model if choice.sharding == "fsdp_no_reshard" else 0),
        # A tied embedding stays whole until its own backward, the last, and so does its gradient.
        root_backward=(2 if blocks.embedding.trained else 1) * head if tied and tail_group else 0,
        load_bytes=max(layers, default=0) * 4,
        save_bytes=max(2 * head, max(layers, default=0) * 4),
    )


def _zero(choice: Choice, architecture: Architecture, blocks: Blocks) -> ShardingBytes:
    none = (0,) * len(architecture.kinds)
    trainable = blocks.total.trainable
    bucket = 2 * min(ZERO_BUCKET_ELEMENTS, trainable)
    ranks = choice.shard_ranks
    fp32_partition = 4 * trainable // ranks
    if choice.sharding in ("zero1", "zero2"):
        return ShardingBytes(
            layer_gather=none,
            layer_reduce=none,
            ring=none,
            rest_buckets=bucket,
            step_bytes=fp32_partition + bucket,
        )
    layers = [b.trained + b.frozen + b.adapter for b in blocks.kinds]
    live = 2 * min(ZERO3_LIVE_ELEMENTS, sum(layers[kind] for kind in architecture.order))
    head = 2 * architecture.vocab * architecture.hidden
    sub_group = 4 * min(1_000_000_000, trainable // ranks)
    return ShardingBytes(
        layer_gather=tuple(max(2 * 2 * n, live) for n in layers),
        layer_reduce=tuple(2 * b.trainable for b in blocks.kinds),
        ring=none,
        root_loss=head,
        rest_buckets=bucket,
        step_bytes=sub_group,
        save_bytes=2 * head,
    )
