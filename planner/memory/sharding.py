"""What sharding adds on top of the divided states: gathered weights, gradient buckets, reduce copies, rings.

Sources: accelerate/utils/fsdp_utils.py (grouping, upcasts), torch fully_shard (all-gather, reduce-scatter in the
parameter's compute dtype, next group prefetched), torch FSDP1 (flat parameters), deepspeed/runtime/zero 0.19.8
(buckets, live parameters, the step), torch DDP (gradient buckets beside the gradients), torch context parallel
(all-gathered keys and values), deepspeed/runtime/sequence_parallel/ulysses_sp.py (heads for sequence).
tests/launcher/test_sharded_runs.py counts every sharding in two processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.architecture import Architecture
from planner.choice import FSDP2, ZERO, Choice
from planner.memory.blocks import Block, Blocks
from planner.memory.states import DTYPE_BYTES, Roles, compute_bytes
from planner.memory.zero3_gathers import zero3_gathers

ZERO_BUCKET_ELEMENTS = 500_000_000
"""reduce_bucket_size and allgather_bucket_size where no DeepSpeed JSON sets them (deepspeed/runtime/zero/config.py)."""
ZERO3_LIVE_ELEMENTS = 1_000_000_000
"""stage3_max_live_parameters (deepspeed/runtime/zero/config.py)."""
ZERO3_REUSE_ELEMENTS = 1_000_000_000
"""stage3_max_reuse_distance (deepspeed/runtime/zero/config.py)."""
ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""sub_group_size: what one rank updates at a time (deepspeed/runtime/zero/config.py)."""


class Beside(NamedTuple):
    """What FSDP2 holds beside one layer in use."""

    forward_gather: int
    """The buffer that the layer was gathered in, and earlier layers where they stay."""
    forward_copy: int
    """The buffer of the group before it, which is let go when the layer's weights are there, and before it runs."""
    backward_gather: int
    """What is gathered ahead, or the layers below where they stayed."""
    reduced: int
    """Gradients of other groups that are not sharded yet, or kept beside it."""


NOTHING_BESIDE = Beside(0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingBytes:
    """Extra bytes on one rank, by moment."""

    layer_gather: tuple[int, ...]
    """Per layer kind: unsharded weights while the layer runs."""
    layer_reduce: tuple[int, ...]
    """Per layer kind: gradients that are being reduced while the layer runs backward; its own are not among them."""
    beside: tuple[Beside, ...] = ()
    """Per layer of the model, from the first to the last: what FSDP2 adds to both; empty for all other shardings."""
    ring: tuple[int, ...]
    """Per layer kind and row of the micro-batch: what context or sequence parallelism exchanges for attention."""
    root_forward: int = 0
    """Groups that stay gathered through the whole forward, or the buffer of stage 3's prefetch."""
    root_loss: int = 0
    """Gathered while the loss runs forward."""
    loss_backward: int | None = None
    """Gathered while the loss runs backward, None when it is as much as in its forward."""
    loss_copy: int = 0
    """The last layer's buffer, which is let go when the head's weights are there, and before the loss runs."""
    loss_ahead: int = 0
    """Gathered on top of it when backward is at the head: before the loss's own, or where full logits end."""
    tail_gather: int = 0
    tail_reduce: int = 0
    """Gathered, and being reduced, when backward has passed the head and nothing else."""
    root_backward: int = 0
    """Groups that stay gathered through the whole backward."""
    last_gather: int | None = None
    """Gathered when backward has passed the layers, None when it is ``root_backward``."""
    rest_buckets: int = 0
    """Buffers that live all the time."""
    backward_buckets: int = 0
    """Buffers from the first gradient to the last."""
    last_gradients: int = 0
    """Divided gradients that are made when backward has run."""
    last_reduce: int = 0
    """What is being reduced when backward has run."""
    step_bytes: int = 0
    """fp32 gradients of what is updated at a time."""
    step_copy: int = 0
    """The copy they are made of, gone when the optimizer works."""
    step_gather: int = 0
    """Gathered again when the optimizer is done."""
    load_bytes: int = 0
    save_bytes: int = 0
    inputs_stay: bool = False
    """What recomputed layers read, and its gradients, stay on the card until backward ends."""


def sharding_bytes(
    choice: Choice,
    architecture: Architecture,
    blocks: Blocks,
    trained: Roles,
    seq_len: int,
    tail_group: bool = True,
) -> ShardingBytes:
    """Extra bytes of ``choice.sharding``.

    Args:
        choice: the knobs.
        architecture: shapes.
        blocks: parameters by part and fate.
        trained: roles of the trainable parameters.
        seq_len: tokens of a whole sequence, before context parallelism divides it.
        tail_group: accelerate >= 1.14, which groups embedding and head apart from the root.
    """
    none = (0,) * len(architecture.kinds)
    if choice.sharding == "none":
        return ShardingBytes(layer_gather=none, layer_reduce=none, ring=none)
    if choice.sharding == "ddp":
        buckets = int(blocks.total.trainable * trained.gradients)
        return ShardingBytes(layer_gather=none, layer_reduce=none, ring=none, rest_buckets=buckets)
    if choice.sharding in ZERO:
        return _zero(choice, architecture, blocks, seq_len)
    if choice.sharding == "fsdp1":
        return _fsdp1(choice, architecture, blocks, seq_len)
    # Gradient accumulation adds nothing here: written runs synchronise every micro-batch, so gradients stay sharded.
    return _fsdp(choice, architecture, blocks, trained, seq_len, tail_group)


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


def reads_resting_head(choice: Choice, *, tied: bool, tail_group: bool) -> bool:
    """Whether the loss gathers a head's weight itself, as it rests: under FSDP2 an untied one beside adapters.

    PEFT's wrapper hides the final norm from accelerate (``_find_final_norm``), so the head is a group of its own, and a
    loss that reads its weight never calls it (TRL's ``full_tensor``).
    """
    frozen = choice.sharding in FSDP2 and choice.method != "full"
    return frozen and choice.loss_path != "full_logits" and not tied and tail_group


def _fsdp(
    choice: Choice, architecture: Architecture, blocks: Blocks, trained: Roles, seq_len: int, tail_group: bool
) -> ShardingBytes:
    """FSDP2 as accelerate groups it: embedding, every layer, and final norm with head.

    A tied embedding is in the last of these groups. Before accelerate 1.14 the root held all that is in no layer, and
    was gathered again when backward began. Nothing here depends on a card's streams: tensors are made and let go in the
    order of the host's calls (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).

    - A gather has a buffer of its own, which is copied to the weights. In forward it stays until the next group's
      weights are there, or until the model returns (``all_gather_state``). In backward it goes when it is copied.
    - A group's backward begins with the gather of the one that ran before it (``_backward_prefetch``): of a layer the
      one below, of the first layer an untied embedding, of the head the last layer. With full logits the head's begins
      where their gradient arrives; any other loss is made inside the model, so there it begins before the loss's.
    - Gradients are copied to a buffer to be reduced, which stays until the next group's turn
      (``reduce_scatter_states``). The last layer's backward so has the head's beside it. A group's last gradient is
      there until its shards are (``foreach_reduce``).
    - A tied embedding has one gradient: the head's share waits for the embedding's. That of full logits is a transposed
      view, to which autograd does not add in place.
    - Replicas all-reduce what a rank has got. Where that is no gradient yet, being of another dtype, it stays until
      backward ends, a group's beside the other's (``_all_reduce_state``).
    """
    width, stays, tied = compute_bytes(choice), choice.sharding == "fsdp_no_reshard", architecture.tied
    layers = [width * (b.trained + b.frozen + b.adapter + b.quantised // 4) for b in blocks.kinds]
    every, last = sum(layers[kind] for kind in architecture.order), layers[architecture.order[-1]]
    table, trains = architecture.vocab * architecture.hidden, bool(blocks.embedding.trained)
    # Bytes of the head's and the embedding's own group, none where the root or the tail has both.
    ends = _Ends(
        head=0 if tied or not tail_group else width * table,
        embedding=0 if tied or not tail_group else width * (blocks.embedding.trained + blocks.embedding.frozen),
        root=0 if tail_group and not tied else width * table * (1 if tied else 2),
    )
    beside, above, kept = _beside(choice, architecture, blocks, trained, ends)
    # Whole from the embedding on, and beside that while the loss runs.
    root = ends.root + (ends.embedding if stays else 0)
    alone = reads_resting_head(choice, tied=tied, tail_group=tail_group)
    own_head = DTYPE_BYTES[choice.weights] * table if alone else ends.head
    in_loss, ahead = root + own_head + (every if stays else 0), 0 if stays else last
    # Of a group of one matrix: its gradient, the buffer, what a rank gets of it, and that as a gradient.
    shards = (width + (trained.gradients if trained.gradients != width else 0)) / (width * choice.shard_ranks)
    first = ends.embedding or ends.root
    last_gather, last_reduce = first, above + kept
    if trains:
        # A tied head's share, the embedding's and a sum; those of a matrix each.
        copies = (3 if choice.loss_path == "full_logits" else 2) if tied else 1
        last_reduce += copies * first
        # The root's last parameter is a small one.
        reduced = int(((2 if tail_group else 1) + shards) * first) + kept
        if reduced > last_gather + last_reduce:
            last_gather, last_reduce = 0, reduced
    elif ends.embedding and not stays and choice.recompute != "none":
        # Recompute makes the embedding's output need a gradient, so its weights are gathered for nothing.
        last_gather = 2 * ends.embedding
    again = ends.root if not tail_group and not stays else 0
    return ShardingBytes(
        layer_gather=tuple(layers),
        layer_reduce=(0,) * len(layers),
        beside=beside,
        ring=_ring(choice, architecture, seq_len),
        root_forward=root,
        root_loss=in_loss + (ends.head if ends.head and not alone else last),
        loss_copy=last if ends.head and not alone else max(0, again - last),
        loss_backward=in_loss + (0 if tail_group else ahead),
        loss_ahead=ahead if tail_group else 0,
        tail_gather=in_loss - own_head + ahead,
        tail_reduce=int((2 + shards) * ends.head) if trains else 0,
        root_backward=root,
        last_gather=last_gather,
        last_reduce=last_reduce,
        load_bytes=max(layers, default=0) // width * 4,
        save_bytes=max(2 * width * table, max(layers, default=0) // width * 4),
    )


class _Ends(NamedTuple):
    """Weights outside the layers, as they are gathered."""

    head: int
    embedding: int
    root: int


def _beside(
    choice: Choice, architecture: Architecture, blocks: Blocks, trained: Roles, ends: _Ends
) -> tuple[tuple[Beside, ...], int, int]:
    """What FSDP2 holds beside each layer, the first layer's gradients, and what replicas keep but the embedding's."""
    width, stays = compute_bytes(choice), choice.sharding == "fsdp_no_reshard"
    order = [blocks.kinds[kind] for kind in architecture.order]
    whole = [width * (b.trained + b.frozen + b.adapter + b.quantised // 4) for b in order]
    # What replicas keep of every byte of a gradient.
    share = 1 / choice.shard_ranks if choice.sharding == "hsdp" and width != trained.gradients else 0.0
    trains = bool(blocks.embedding.trained)
    # The head's gradient is reduced while the last layer runs, or waits for the embedding's.
    above = ends.head if trains else 0
    waits = width * architecture.vocab * architecture.hidden if ends.root and trains else 0
    below, kept = sum(whole), share * above
    found: list[Beside] = []
    for index in reversed(range(len(order))):
        below -= whole[index]
        found.append(
            Beside(
                forward_gather=whole[index] + (below if stays else 0),
                forward_copy=whole[index - 1] if index else ends.embedding or ends.root,
                backward_gather=below if stays else whole[index - 1] if index else ends.embedding,
                reduced=above + waits + int(kept),
            )
        )
        above = width * order[index].trainable
        kept += share * above
    return tuple(reversed(found)), above, int(kept)


def _fsdp1(choice: Choice, architecture: Architecture, blocks: Blocks, seq_len: int) -> ShardingBytes:
    """One flat parameter a decoder layer, and the root's for all the rest (torch/distributed/fsdp/_runtime_utils.py).

    - The root is not freed after forward (``_post_forward_reshard``): whole until backward ends.
    - Layers are gathered one at a time. A reentrant checkpoint, the default of those stacks, runs its forward without
      gradients, so nothing says that backward will need the layer, and it is not prefetched
      (``_register_pre_backward_hooks``, ``_get_handle_to_prefetch``). Without recompute the next one is.
    - A frozen layer is freed by a hook on what it read (``_register_post_backward_reshard_only_hook``), and the hook
      is removed when backward ends: it keeps every recomputed input, and with that the gradient of it.
    - A layer's flat gradient is made and reduced when its activations are gone, so it is not counted on top of them.
      With fewer tokens than a layer has rows that moment is the higher one, by less than two layers.
    """
    width, recomputes = compute_bytes(choice), choice.recompute != "none"
    layers = [b.trained + b.frozen + b.adapter + b.quantised // 4 for b in blocks.kinds]
    ends = blocks.final_norm + blocks.head + (blocks.embedding if architecture.tied else Block())
    root = sum(b.trained + b.frozen for b in (blocks.embedding, blocks.final_norm, blocks.head, blocks.other)) * width
    return ShardingBytes(
        layer_gather=tuple((1 if recomputes else 2) * width * n for n in layers),
        layer_reduce=(0,) * len(layers),
        ring=_ring(choice, architecture, seq_len),
        root_forward=root,
        root_loss=root,
        # The root's gradient is reduced when it is complete: with the embedding's, the last. The head's waits for it.
        root_backward=root + ends.trained * width,
        load_bytes=max(layers, default=0) * 4,
        save_bytes=max(2 * root, max(layers, default=0) * 4),
        inputs_stay=choice.method != "full" and choice.recompute == "full",
    )


def _zero(choice: Choice, architecture: Architecture, blocks: Blocks, seq_len: int) -> ShardingBytes:
    """DeepSpeed's stages; everything it holds beside the states is in the compute dtype until the step.

    Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py)
    - The bucket comes with the first gradient of backward (``setup_buckets``) and goes when the last is reduced
      (``_release_ipg_buffers``): neither forward nor loss hold it. Gradients are copied into it and their own memory
      is given back, a matrix at a time.
    - A full bucket is flattened into a copy to be reduced (``allreduce_bucket``); stage 1 reduces nothing before
      backward has run (``process_gradients``), and its gradients make room for bucket and copy.
    - The step copies a rank's gradients flat, makes fp32 of that, and gathers weights in place (``step``,
      ``all_gather_into_tensor_dp_groups``).

    Stage 3 (deepspeed/runtime/zero/stage3.py, partitioned_param_coordinator.py)
    - Bucket and divided gradients are allocated once, with the optimizer (``_setup_for_real_optimizer``).
    - Reduce-scatter concatenates the bucket by rank first (``reduce_scatter_coalesced``).
    - The prefetcher skips what is gathered and runs ahead, every module by a prefetch bucket more, until
      ``stage3_max_live_parameters`` are whole (``_fetch_sub_module_impl``), and what is used again within a billion
      parameters is not let go (``__params_to_release``). So that many are whole in forward, loss and backward: head,
      norms and layers, and of a small model that trains the untied embedding.
    - Where all of these may be whole, forward holds the buffer of the prefetch in use beside them (``zero3_gathers``),
      and backward gathers nothing. Where they may not, what is let go makes room for a matrix or few at a time.
    - The embedding is whole while its gradient is reduced, and so is a head that the loss read. Small parameters are
      too, and are gathered again after the step; adapters are taken for small.
    - One sub-group at a time has fp32 gradients (``_prepare_fp32_grad_for_sub_group``), all weights divided again.
    """
    none = (0,) * len(architecture.kinds)
    trainable = blocks.total.trainable
    width = compute_bytes(choice)
    # The step widens what is not fp32 already.
    widened = 4 if width < 4 else 0
    bucket = width * min(ZERO_BUCKET_ELEMENTS, trainable)
    # A bucket that takes every gradient is reduced once, at the end.
    fills = trainable > ZERO_BUCKET_ELEMENTS
    partition = trainable // choice.shard_ranks
    exchange = _exchange(choice, architecture, seq_len)
    if choice.sharding in ("zero1", "zero2"):
        second = choice.sharding == "zero2"
        # Ranks that share a sequence sum in fp32, beside the copy (``allreduce_bucket``).
        copy = bucket if choice.sp == 1 else 3 * bucket
        return ShardingBytes(
            layer_gather=none,
            layer_reduce=(copy,) * len(none) if second and fills else none,
            ring=exchange,
            backward_buckets=bucket,
            last_gradients=width * partition if fills and not second else 0,
            last_reduce=copy if second else 0,
            step_bytes=widened * partition,
            step_copy=width * partition,
        )
    ends = blocks.final_norm + blocks.head + (blocks.embedding if architecture.tied else Block())
    whole = [ends, *(blocks.kinds[kind] for kind in architecture.order)]
    used = sum(b.trained + b.frozen + b.adapter for b in whole)
    # Every layer comes twice before the embedding's own backward.
    apart = 0 if architecture.tied or 2 * used >= ZERO3_REUSE_ELEMENTS else blocks.embedding.trained
    live = width * min(ZERO3_LIVE_ELEMENTS, used + apart)
    gathers = zero3_gathers(architecture, packed=choice.method == "qlora")
    # A loss that reads the head's weight leaves its module to the end of the trace, so it is there once more by then.
    read = blocks.head.trained if choice.loss_path != "full_logits" else 0
    persistent = width * (gathers.persistent + architecture.final_norm_parameters + blocks.total.adapter)
    head = width * architecture.vocab * architecture.hidden
    sub_group = min(ZERO3_SUB_GROUP_ELEMENTS, partition)
    return ShardingBytes(
        layer_gather=(live,) * len(none),
        layer_reduce=(bucket,) * len(none) if fills else none,
        ring=exchange,
        root_forward=width * gathers.prefetched if used <= ZERO3_LIVE_ELEMENTS else 0,
        root_loss=live,
        last_gather=persistent + width * (blocks.embedding.trained + read),
        rest_buckets=bucket,
        last_reduce=bucket,
        step_bytes=widened * sub_group,
        step_copy=width * sub_group,
        step_gather=persistent,
        save_bytes=2 * head,
    )


def _exchange(choice: Choice, architecture: Architecture, seq_len: int) -> tuple[int, ...]:
    """Queries, keys and values a second time, with few heads of the whole sequence for all heads of a share of it.

    The caller still refers to what it handed over while attention runs (ulysses_sp.py: ``forward``,
    ``_combine_local_sequences``). Keys and values of fewer heads than ranks are repeated before they are sent.
    """
    if choice.sp == 1:
        return (0,) * len(architecture.kinds)
    tokens = -(-seq_len // choice.sp)
    return tuple(
        compute_bytes(choice) * tokens * (kind.heads + 2 * max(kind.kv_heads, choice.sp)) * kind.head_dim
        for kind in architecture.kinds
    )
