"""Adapters and quantised bases: packages, devices and shardings that they need."""

from __future__ import annotations

from planner.choice import FSDP2, Choice
from planner.rules.book import refuses, refuses_job, warns
from planner.rules.context import RuleContext

_DIVIDES_WEIGHTS = FSDP2 | {"fsdp1", "zero3"}
"""Shardings that cut the base weights themselves."""


@refuses(
    "adapter-needs-peft",
    why="adapters are PEFT's",
    versions="all",
    source="trl METADATA, extra peft",
    concerns="adapter",
    applies=lambda context: "lora" in context.lacks,
)
def adapter_needs_peft(context: RuleContext, choice: Choice) -> str | None:
    """LoRA or QLoRA without PEFT."""
    return f"{choice.method} needs {context.lacks['lora']}"


@refuses(
    "qlora-needs-bitsandbytes",
    why="4-bit and int8 linears are bitsandbytes'",
    versions="all",
    source="transformers/utils/import_utils.py:166 @5.24.0",
    concerns="adapter",
    applies=lambda context: "qlora" in context.lacks,
)
def qlora_needs_bitsandbytes(context: RuleContext, choice: Choice) -> str | None:
    """QLoRA without bitsandbytes."""
    if choice.method == "qlora":
        return f"qlora needs {context.lacks['qlora']}"
    return None


@refuses(
    "qlora-needs-gpu",
    why="the quantised matmuls are CUDA kernels",
    versions="all",
    source="bitsandbytes documentation, backends",
    concerns="adapter",
    applies=lambda context: context.on_cpu,
)
def qlora_needs_gpu(context: RuleContext, choice: Choice) -> str | None:
    """QLoRA on a CPU machine."""
    if choice.method == "qlora":
        return "qlora needs a GPU: choose method lora"
    return None


@refuses(
    "int8-not-sharded",
    why="only 4-bit weights can be stored in a floating dtype, which is what FSDP and ZeRO-3 cut",
    versions="all",
    source="PEFT issue 2833, accelerate issue 3730, bitsandbytes issue 1709",
    concerns="adapter",
    applies=lambda context: context.quantization == "int8",
)
def int8_not_sharded(context: RuleContext, choice: Choice) -> str | None:
    """An int8 base under a sharding that cuts the weights."""
    if choice.method == "qlora" and choice.sharding in _DIVIDES_WEIGHTS:
        return f"an int8 base cannot be sharded by {choice.sharding}: choose quantization nf4, or sharding ddp"
    return None


@refuses(
    "qlora-sharded-releases",
    why="quant_storage, which makes 4-bit weights shardable, came with bitsandbytes 0.43",
    versions="bitsandbytes >= 0.43, peft >= 0.10",
    source="PEFT 0.10.0 release notes; bitsandbytes PR 970",
    concerns="adapter",
    applies=lambda context: "qlora_sharded" in context.lacks,
)
def qlora_sharded_releases(context: RuleContext, choice: Choice) -> str | None:
    """A sharded 4-bit base on releases that cannot store it in a floating dtype."""
    if choice.method == "qlora" and choice.sharding in _DIVIDES_WEIGHTS:
        return f"qlora under {choice.sharding} needs {context.lacks['qlora_sharded']}"
    return None


@refuses_job(
    "sync-reference-adapter",
    why="with an adapter there is no second model to synchronise: the base is the reference",
    versions="all",
    source="trl/trainer/dpo_trainer.py:994-998 @1.16.0",
)
def sync_reference_adapter(context: RuleContext) -> str | None:
    """sync_ref_model with an adapter."""
    if context.asks.sync_ref_model and context.adapter and context.trainer in ("dpo", "kto"):
        return (
            f"{context.trainer} has no reference model to sync under {context.method}: take sync_ref_model out of trl"
        )
    return None


@warns(
    "zero3-quantised-load",
    why="transformers does not use zero.Init for a quantised model",
    versions="transformers 5.24",
    source="transformers/modeling_utils.py:1435 @5.24.0",
    concerns="adapter",
)
def zero3_quantised_load(context: RuleContext, choice: Choice) -> str | None:
    """A quantised base under ZeRO-3, which every rank loads whole."""
    if choice.method == "qlora" and choice.sharding == "zero3":
        return "under zero3 every rank loads the whole quantised base before it is divided"
    return None
