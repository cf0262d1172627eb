"""Splitting one sequence over GPUs: context parallelism (cp) and sequence parallelism (sp)."""

from __future__ import annotations

from planner.choice import FSDP2, ZERO, Choice
from planner.rules.book import refuses, warns
from planner.rules.context import RuleContext


@refuses(
    "cp-or-sp",
    why="they split the same dimension through different libraries",
    versions="accelerate >= 1.12",
    source="accelerate/parallelism_config.py:329-334 @1.15.0",
    concerns="cp",
)
def cp_or_sp(context: RuleContext, choice: Choice) -> str | None:
    """Context and sequence parallelism at once."""
    if choice.sp > 1:
        return f"cp {choice.cp} and sp {choice.sp} exclude each other: set one of them to 1"
    return None


# ---- Context parallelism ---------------------------------------------------------------------


@refuses(
    "cp-releases",
    why="it came with accelerate 1.11; 1.12.0 never sets up its context and dies in the first step",
    versions="accelerate >= 1.11, not 1.12.0; torch >= 2.6",
    source="accelerate/accelerator.py:1638-1641 @1.12.0; accelerate issues 3856, 3867",
    concerns="cp",
    applies=lambda context: "context_parallel" in context.lacks,
)
def cp_releases(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism on releases that do not have it."""
    return f"cp {choice.cp} needs {context.lacks['context_parallel']}"


@refuses(
    "cp-needs-fsdp2",
    why="accelerate shards the model over the same mesh and raises without an FSDP2 plugin",
    versions="accelerate >= 1.11",
    source="accelerate/state.py:997-1009 @1.15.0",
    concerns="cp",
)
def cp_needs_fsdp2(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism outside FSDP2."""
    if choice.sharding not in FSDP2:
        return f"cp {choice.cp} runs only under fsdp, fsdp_no_reshard or hsdp, not {choice.sharding}"
    return None


@refuses(
    "cp-not-pure-replicas",
    why="accelerate refuses dp_replicate > 1 with dp_shard 1 once cp or tp is in the mesh",
    versions="accelerate >= 1.11",
    source="accelerate/parallelism_config.py:336-341 @1.15.0",
    concerns="cp",
)
def cp_not_pure_replicas(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism with replicas and no shards."""
    if choice.dp_replicate > 1 and choice.dp_shard == 1:
        return f"cp {choice.cp} with dp_replicate {choice.dp_replicate} needs dp_shard above 1"
    return None


@refuses(
    "cp-needs-sdpa",
    why="torch's ring attention replaces scaled_dot_product_attention and nothing else",
    versions="all",
    source="transformers/trainer.py:2419-2424 @5.24.0",
    concerns="cp",
)
def cp_needs_sdpa(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism with another attention than sdpa."""
    if choice.attention != "sdpa":
        return f"cp {choice.cp} supports only attention sdpa, not {choice.attention}"
    return None


@refuses(
    "cp-full-attention",
    why="the per-layer mask is dropped, so a window or a recurrent state would silently train "
    "wrong; accelerate refuses it since 1.15",
    versions="all",
    source="accelerate/big_modeling.py:809-826 @1.15.0; accelerate PR 4177",
    concerns="cp",
    applies=lambda context: bool(context.model.not_full_attention),
)
def cp_full_attention(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism for a model with other layers than full attention."""
    layers = ", ".join(context.model.not_full_attention)
    return (
        f"cp {choice.cp} trains only full attention, and {context.model.model_type} has "
        f"{layers}; use sp, more recompute or offload"
    )


@refuses(
    "cp-no-packing",
    why="documents of one row are kept apart by a mask, which context parallelism drops",
    versions="refused by TRL >= 1.11, silently wrong before",
    source="trl/trainer/sft_trainer.py:1154-1161 @1.16.0; TRL PR 6843",
    concerns="cp",
)
def cp_no_packing(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism with packed or padding-free rows."""
    if choice.packing:
        return f"cp {choice.cp} lets packed documents attend to each other: set packing to false"
    if context.asks.eval_packing:
        return f"cp {choice.cp} refuses eval_packing: set it to false"
    if context.asks.padding_free:
        return f"cp {choice.cp} refuses padding_free: set it to false"
    return None


@refuses(
    "cp-sft-only",
    why="only input_ids, labels, position_ids and the mask are split: DPO and KTO then compare a "
    "whole completion mask with a shard, and reward and the online trainers read whole sequences",
    versions="TRL up to 1.16",
    source="transformers/trainer.py:2426-2491 @5.24.0, trl/trainer/dpo_trainer.py:1285-1299, "
    "grpo_config.py:1068-1076 @1.16.0",
    concerns="cp",
    applies=lambda context: context.trainer != "sft",
)
def cp_sft_only(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism outside SFT."""
    return f"cp {choice.cp} works for sft only, not {context.trainer}"


@refuses(
    "cp-two-chunks",
    why="the load balancer gives each rank a chunk from the head and one from the tail; otherwise "
    "the run dies in a collective without a message",
    versions="all",
    source="torch/distributed/tensor/experimental/_attention.py",
    concerns="cp",
)
def cp_two_chunks(context: RuleContext, choice: Choice) -> str | None:
    """Sequences that do not divide into two chunks per rank."""
    chunks = 2 * choice.cp
    given = context.asks.pad_to_multiple_of
    if given and given % chunks:
        return f"pad_to_multiple_of {given} must be a multiple of {chunks} (2 x cp)"
    if context.seq_len < chunks:
        return f"cp {choice.cp} splits a sequence in {chunks}, and seq_len is {context.seq_len}"
    return None


@warns(
    "cp-causal-only",
    why="masks are dropped in favour of is_causal, and the trainer raises on the first batch whose mask is not causal, "
    "as rows with images may have",
    versions="all",
    source="transformers/trainer.py:2457-2471 @5.24.0",
    concerns="cp",
    applies=lambda context: context.model.vision,
)
def cp_causal_only(context: RuleContext, choice: Choice) -> str | None:
    """Context parallelism for a model with a vision tower."""
    return (
        f"cp {choice.cp} runs causal masks alone: train text rows, or check how {context.model.model_type} masks images"
    )


# ---- Sequence parallelism --------------------------------------------------------------------


@refuses(
    "sp-releases",
    why="Ulysses came with accelerate 1.12; TRL passes it position_ids since 1.11",
    versions="accelerate >= 1.12, deepspeed >= 0.18.2, TRL >= 1.11, transformers >= 5",
    source="accelerate/accelerator.py:2401-2405 @1.15.0; TRL PR 6812",
    concerns="sp",
    applies=lambda context: "sequence_parallel" in context.lacks,
)
def sp_releases(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism on releases that do not have it."""
    return f"sp {choice.sp} needs {context.lacks['sequence_parallel']}"


@refuses(
    "sp-needs-zero",
    why="the only backend is DeepSpeed's Ulysses",
    versions="accelerate >= 1.12",
    source="accelerate/parallelism_config.py:324 @1.15.0",
    concerns="sp",
)
def sp_needs_zero(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism outside DeepSpeed."""
    if choice.sharding not in ZERO:
        return f"sp {choice.sp} runs only under zero1, zero2 or zero3, not {choice.sharding}"
    return None


@refuses(
    "sp-divides-heads",
    why="Ulysses swaps a sequence shard for a shard of the heads",
    versions="all",
    source="deepspeed/runtime/sequence_parallel/ulysses_sp.py:147-152 @0.19.8",
    concerns="sp",
)
def sp_divides_heads(context: RuleContext, choice: Choice) -> str | None:
    """A sequence-parallel size that the heads do not divide by."""
    sp = choice.sp
    for group in context.model.heads:
        if group.heads % sp:
            return f"sp {sp} must divide the {group.heads} attention heads"
        if group.kv_heads % sp and sp % group.kv_heads:
            return f"sp {sp} must divide the {group.kv_heads} key-value heads, or be a multiple"
    return None


@refuses(
    "sp-uniform-heads",
    why="Ulysses is set up with one head count and one width, and asserts that keys and values agree",
    versions="all",
    source="deepspeed/runtime/sequence_parallel/ulysses_sp.py: required_key_value_shape @0.19.8",
    concerns="sp",
    applies=lambda context: (
        len(context.model.heads) > 1 or any(group.head_dim != group.value_head_dim for group in context.model.heads)
    ),
)
def sp_uniform_heads(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism where keys and values, or layers, differ in shape."""
    return (
        f"sp {choice.sp} needs one head shape for keys and values in all layers, which "
        f"{context.model.model_type} does not have"
    )


@refuses(
    "sp-no-recurrence",
    why="a recurrent state would restart on every rank, with wrong gradients and no error",
    versions="refused by accelerate >= 1.15, silently wrong before",
    source="accelerate/big_modeling.py:760-784 @1.15.0",
    concerns="sp",
    applies=lambda context: context.model.linear_attention,
)
def sp_no_recurrence(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism for a model with linear attention."""
    return (
        f"sp {choice.sp} restarts the recurrent state of {context.model.model_type} on every "
        "rank; use recompute or offload instead"
    )


@refuses(
    "sp-attention",
    why="eager needs a whole mask, which is not there once the sequence is split",
    versions="all",
    source="accelerate/utils/dataclasses.py:2292-2309 @1.15.0",
    concerns="sp",
)
def sp_attention(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism with eager attention."""
    if choice.attention == "eager":
        return f"sp {choice.sp} supports attention sdpa and flash_attention_2, not eager"
    return None


@refuses(
    "sp-no-bfd-packing",
    why="both hand over cu_seq_lens, which the Ulysses data loader cannot split (IndexError)",
    versions="deepspeed up to 0.19.8",
    source="deepspeed/runtime/sequence_parallel/ulysses_sp.py:684 @0.19.8",
    concerns="sp",
)
def sp_no_bfd_packing(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism with bfd packing or padding-free rows."""
    if choice.packing and context.asks.packing_strategy != "wrapped":
        return (
            f"sp {choice.sp} crashes with packing_strategy {context.asks.packing_strategy}: "
            "set packing to false, or trl packing_strategy to wrapped"
        )
    if context.asks.padding_free:
        return f"sp {choice.sp} crashes with padding_free: set it to false"
    return None


@refuses(
    "sp-sft-only",
    why="the Ulysses data loader shards labels, and only SFT's loss is reduced over its ranks",
    versions="TRL up to 1.16",
    source="trl/trainer/sft_trainer.py:1576-1591, grpo_config.py:1068-1076 @1.16.0",
    concerns="sp",
    applies=lambda context: context.trainer != "sft",
)
def sp_sft_only(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism outside SFT."""
    return f"sp {choice.sp} works for sft only, not {context.trainer}"


@refuses(
    "sp-plain-loss",
    why="the trainer reduces the model's own negative log-likelihood over the ranks",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:1174-1187 @1.16.0",
    concerns="sp",
    applies=lambda context: (
        context.asks.loss_type == "dft"
        or context.asks.label_smoothing > 0
        or "compute_loss_func" in context.asks.full_logits
    ),
)
def sp_plain_loss(context: RuleContext, choice: Choice) -> str | None:
    """Sequence parallelism with another loss than nll."""
    return f"sp {choice.sp} refuses loss_type dft, label_smoothing_factor and compute_loss_func"


@refuses(
    "sp-even-shards",
    why="every rank takes an equal slice",
    versions="all",
    source="deepspeed/runtime/sequence_parallel/ulysses_sp.py:666-671 @0.19.8",
    concerns="sp",
)
def sp_even_shards(context: RuleContext, choice: Choice) -> str | None:
    """Sequences that do not divide by the sequence-parallel size."""
    given = context.asks.pad_to_multiple_of
    if given and given % choice.sp:
        return f"pad_to_multiple_of {given} must be a multiple of sp {choice.sp}"
    if context.seq_len < choice.sp:
        return f"sp {choice.sp} splits a sequence of seq_len {context.seq_len} in too many pieces"
    return None


@warns(
    "sp-equal-lengths",
    why="the group exchanges whole batches, which must be of one length",
    versions="deepspeed up to 0.19.8",
    source="deepspeed/runtime/sequence_parallel/ulysses_sp.py @0.19.8",
    concerns="sp",
)
def sp_equal_lengths(context: RuleContext, choice: Choice) -> str | None:
    """Unequal rows inside a sequence-parallel group."""
    if not choice.packing:
        return (
            f"sp {choice.sp} needs rows of one length in each group: every row is padded to {context.seq_len:,} tokens"
        )
    return None
