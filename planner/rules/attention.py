"""Attention implementations: packages, cards and model classes that they need."""

from __future__ import annotations

from planner.choice import Choice
from planner.job import rows_per_example
from planner.rules.book import refuses, warns
from planner.rules.context import RuleContext
from planner.units import format_bytes

FLASH_HEAD_DIM = 256
"""Widest head that FlashAttention 2 computes."""
LONG_MASK = 8192
"""Tokens beyond which a seq_len x seq_len mask is worth a remark (64 MiB a row)."""


@refuses(
    "flash-package",
    why="transformers imports flash-attn, or loads the same kernels from the hub with kernels",
    versions="all",
    source="transformers/modeling_utils.py:1777-1830 @5.24.0",
    concerns="flash",
    applies=lambda context: "flash_attention_2" in context.lacks,
)
def flash_package(context: RuleContext, choice: Choice) -> str | None:
    """FlashAttention 2 without a package that provides it."""
    return f"attention flash_attention_2 needs {context.lacks['flash_attention_2']}"


@refuses(
    "flash-card",
    why="FlashAttention 2 is written for Ampere and newer",
    versions="all",
    source="flash-attn README; transformers/modeling_utils.py:1645-1649 @5.24.0",
    concerns="flash",
    applies=lambda context: context.on_cpu or context.old_card,
)
def flash_card(context: RuleContext, choice: Choice) -> str | None:
    """FlashAttention 2 on a CPU or a card older than Ampere."""
    card = "a CPU" if context.on_cpu else f"compute capability {context.capability}"
    return f"attention flash_attention_2 needs compute capability 8.0, not {card}: choose sdpa"


@refuses(
    "flash-model",
    why="the class does not accept a FlashAttention implementation",
    versions="transformers 5.24",
    source="transformers: _supports_flash_attn of the model class",
    concerns="flash",
    applies=lambda context: not context.model.flash,
)
def flash_model(context: RuleContext, choice: Choice) -> str | None:
    """FlashAttention 2 for a model class without it."""
    return f"{context.model.model_type} does not support flash_attention_2: choose sdpa"


@refuses(
    "flash-sinks",
    why="FlashAttention 2 has no term for a learned sink; FlashAttention 3 kernels do",
    versions="all",
    source="transformers: _compatible_flash_implementations of gpt_oss @5.24.0",
    concerns="flash",
    applies=lambda context: context.model.sinks,
)
def flash_sinks(context: RuleContext, choice: Choice) -> str | None:
    """FlashAttention 2 for a model with attention sinks."""
    return f"{context.model.model_type} has attention sinks, which flash_attention_2 drops: choose eager"


@refuses(
    "flash-head-dim",
    why="its kernels stop at a head width of 256",
    versions="flash-attn 2",
    source="flash-attn README",
    concerns="flash",
    applies=lambda context: any(group.head_dim > FLASH_HEAD_DIM for group in context.model.heads),
)
def flash_head_dim(context: RuleContext, choice: Choice) -> str | None:
    """FlashAttention 2 for heads that are too wide."""
    widest = max(group.head_dim for group in context.model.heads)
    return f"flash_attention_2 stops at heads of {FLASH_HEAD_DIM}, the model has {widest}"


@refuses(
    "flash-half-precision",
    why="the kernels take bf16 and fp16 only, which fp32 weights reach through autocast",
    versions="all",
    source="transformers/modeling_utils.py:1614-1625 @5.24.0",
    concerns="flash",
)
def flash_half_precision(context: RuleContext, choice: Choice) -> str | None:
    """FlashAttention 2 in a run that stays in fp32."""
    if choice.weights == "fp32" and choice.mixed_precision == "no":
        return "flash_attention_2 takes no fp32: choose weights bf16 or mixed_precision bf16"
    return None


@refuses(
    "sdpa-model",
    why="the class has no sdpa form: soft-capped scores and sinks are not expressible in it",
    versions="transformers 5.24",
    source="transformers: _supports_sdpa of the model class, modeling_gemma2.py:353 @5.24.0",
    applies=lambda context: not context.model.sdpa or context.model.softcap or context.model.sinks,
)
def sdpa_model(context: RuleContext, choice: Choice) -> str | None:
    """Attention sdpa for a model class without it."""
    if choice.attention != "sdpa":
        return None
    model = context.model
    cause = "attention sinks" if model.sinks else "soft-capped scores" if model.softcap else "no sdpa"
    return f"{model.model_type} does not run under sdpa ({cause}): choose eager"


@warns(
    "eager-scores",
    why="eager attention writes the whole score matrix of every head",
    versions="all",
    source="transformers/modeling: eager_attention_forward",
)
def eager_scores(context: RuleContext, choice: Choice) -> str | None:
    """Eager attention, which materialises the scores."""
    if choice.attention == "eager" and context.model.heads:
        heads = max(group.heads for group in context.model.heads)
        size = 4 * heads * context.seq_len**2 * choice.micro_batch
        return f"eager attention materialises {format_bytes(size)} of fp32 scores per layer"
    return None


@warns(
    "packing-mask",
    why="transformers builds a block-diagonal mask from position_ids, which also repeats keys and "
    "values and rules out the flash kernel",
    versions="all",
    source="transformers/integrations/sdpa_attention.py:42-51 @5.24.0",
)
def packing_mask(context: RuleContext, choice: Choice) -> str | None:
    """Packed rows under sdpa at a long context."""
    if choice.packing and choice.attention == "sdpa" and context.seq_len > LONG_MASK:
        size = choice.micro_batch * context.seq_len**2
        return (
            f"packing under sdpa builds a {format_bytes(size)} mask per step and loses the flash "
            f"kernel; use flash_attention_2 beyond {LONG_MASK:,} tokens"
        )
    return None


@warns(
    "padding-mask",
    why="padded rows need a mask, and a mask rules out the causal fast path",
    versions="all",
    source="transformers/integrations/sdpa_attention.py @5.24.0",
)
def padding_mask(context: RuleContext, choice: Choice) -> str | None:
    """Padded batches of several rows under sdpa at a long context."""
    rows = choice.micro_batch * rows_per_example(context.trainer)
    if rows == 1 or choice.attention != "sdpa" or choice.packing or choice.cp > 1:
        return None
    if context.seq_len <= LONG_MASK:
        return None
    size = rows * context.seq_len**2
    return (
        f"{rows} padded rows of {context.seq_len:,} tokens build a {format_bytes(size)} mask "
        "under sdpa; flash_attention_2 needs none"
    )
