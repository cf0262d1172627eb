"""Batches, packing and positions."""

from __future__ import annotations

from planner.choice import Choice
from planner.rules.book import refuses, refuses_job, warns
from planner.rules.context import RuleContext

ROPE_KEYS = ("rope_type", "rope_theta", "factor")
"""What YaRN needs; ``original_max_position_embeddings`` falls back to the config's."""


@refuses(
    "batch-product",
    why="the global batch is what the user asked for, split over ranks and steps",
    versions="all",
    source="transformers/trainer.py:2580 @5.24.0",
)
def batch_product(context: RuleContext, choice: Choice) -> str | None:
    """Batch sizes that do not multiply to the global batch."""
    made = choice.micro_batch * choice.grad_accum * choice.dp_shard * choice.dp_replicate
    if made != context.global_batch:
        ranks = choice.dp_shard * choice.dp_replicate
        return (
            f"micro_batch {choice.micro_batch} x grad_accum {choice.grad_accum} x {ranks:,} "
            f"data-parallel ranks is {made:,}, not global_batch {context.global_batch:,}"
            + _closest(choice.micro_batch * ranks, context.global_batch)
        )
    return None


def _closest(once: int, wanted: int) -> str:
    """The batches next to the wanted one that multiples of ``once`` make; empty where it is one of them."""
    below = wanted // once * once
    if below == wanted:
        return ""
    near = f"{below:,} or {below + once:,}" if below else f"{once:,}"
    return f"; closest: {near}"


@refuses(
    "kto-pairs",
    why="the KL term pairs each row with another of its micro-batch",
    versions="all",
    source="trl/trainer/kto_trainer.py:844-847 @1.16.0",
    applies=lambda context: context.min_micro_batch > 1,
)
def kto_pairs(context: RuleContext, choice: Choice) -> str | None:
    """KTO with one row per micro-batch."""
    if choice.micro_batch < context.min_micro_batch:
        return "kto needs micro_batch 2 or more, or trl loss_type apo_zero_unpaired"
    return None


@refuses_job(
    "packing-sft-only",
    why="only SFTConfig has packing",
    versions="all",
    source="trl/trainer/*_config.py @1.16.0",
)
def packing_sft_only(context: RuleContext) -> str | None:
    """Packed rows outside SFT."""
    if context.packing and context.trainer != "sft":
        return f"{context.trainer} does not pack rows: set data.packing to false"
    return None


@refuses_job(
    "packing-needs-length",
    why="rows are packed up to max_length, which null lifts",
    versions="all",
    source="trl/trainer/sft_trainer.py:1466-1468 @1.16.0",
)
def packing_needs_length(context: RuleContext) -> str | None:
    """Packing without a length to fill."""
    if context.packing and not context.asks.keeps_max_length:
        return "packing fills rows of seq_len tokens: take max_length: null out of trl"
    return None


@refuses_job(
    "padding-free-length",
    why="without packing TRL does not enforce max_length on padding-free rows and says so",
    versions="all",
    source="trl/trainer/sft_trainer.py:999-1004 @1.16.0",
)
def padding_free_length(context: RuleContext) -> str | None:
    """padding_free without packing while a length is set."""
    asks = context.asks
    if context.trainer == "sft" and asks.padding_free and not context.packing:
        if not asks.keeps_max_length:
            return None
        return "padding_free needs data.packing, or rows that are cut already and max_length: null"
    return None


@refuses_job(
    "rope-keys",
    why="from_pretrained puts the dict in the place of the model's own, and merges nothing: without rope_theta the "
    "class raises TypeError, without factor or rope_type KeyError",
    versions="transformers >= 5",
    source="transformers/modeling_rope_utils.py:962-1014, 1151-1153 @5.24.0",
)
def rope_keys(context: RuleContext) -> str | None:
    """YaRN set by hand without a key that it needs."""
    missing = [key for key in ROPE_KEYS if key not in context.asks.rope_keys]
    if context.asks.rope_keys and not context.model.nested_rope and missing:
        return f"model_init_kwargs.rope_parameters needs {', '.join(missing)} too: the dict replaces the model's own"
    return None


@warns(
    "packing-images",
    why="TRL refuses packing and padding-free rows as soon as the data set holds images",
    versions="all",
    source="trl/trainer/sft_trainer.py:779-787 @1.16.0",
    applies=lambda context: context.model.vision,
)
def packing_images(context: RuleContext, choice: Choice) -> str | None:
    """Packing for a model with a vision tower."""
    if choice.packing:
        return "packing works on text rows only: a data set with images is refused by TRL"
    return None


@warns(
    "beyond-positions",
    why="positions that were never trained give a high loss (7.3 instead of 2.8 at 160k tokens)",
    versions="all",
    source="TRL long-context guide; transformers/modeling_rope_utils.py @5.24.0",
    applies=lambda context: 0 < context.model.max_positions < context.seq_len and not context.asks.rope,
)
def beyond_positions(context: RuleContext, choice: Choice) -> str | None:
    """A length beyond the positions that the model was trained on."""
    trained = context.model.max_positions
    ratio = f"{context.seq_len / trained:.4g}"
    said = f"{context.seq_len:,} tokens go beyond the {trained:,} positions of the model"
    if context.model.rope_type == "default" and not context.model.nested_rope:
        return f"{said}: the run adds YaRN with factor {ratio}"
    return f"{said}, and its own position scaling is kept: set rope_parameters in model_init_kwargs"
