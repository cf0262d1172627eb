"""Dtypes: what weights may be loaded in, under which mixed precision and on which card."""

from __future__ import annotations

from planner.choice import FSDP2, ZERO, Choice
from planner.rules.book import refuses, warns
from planner.rules.context import RuleContext


@refuses(
    "bf16-card",
    why="cards before Ampere have no bf16 tensor cores: torch emulates it, slower than fp32",
    versions="all",
    source="torch.cuda.is_bf16_supported; NVIDIA Ampere whitepaper",
    applies=lambda context: not context.on_cpu and context.old_card,
)
def bf16_card(context: RuleContext, choice: Choice) -> str | None:
    """bf16 on a card older than Ampere."""
    if choice.weights == "bf16" or choice.mixed_precision == "bf16":
        return (
            f"bf16 needs compute capability 8.0, the card has {context.capability}: "
            "choose mixed_precision fp16 with weights fp32"
        )
    return None


@refuses(
    "fp16-on-cpu",
    why="accelerate ignores fp16 on a CPU: there is no autocast and no scaler, only the name",
    versions="all",
    source="accelerate/accelerator.py:565-569 @1.15.0",
    applies=lambda context: context.on_cpu,
)
def fp16_on_cpu(context: RuleContext, choice: Choice) -> str | None:
    """fp16 on a CPU machine."""
    if choice.mixed_precision == "fp16" or choice.weights == "fp16":
        return "fp16 needs a GPU: choose bf16, or mixed_precision no"
    return None


@refuses(
    "fp16-weights-mixed",
    why="the two half precisions have different ranges, and autocast would convert at every layer",
    versions="all",
    source="torch.autocast",
)
def fp16_weights_mixed(context: RuleContext, choice: Choice) -> str | None:
    """Weights of one half precision under mixed precision of the other."""
    if choice.weights == "fp16" and choice.mixed_precision == "bf16":
        return "weights fp16 do not go with mixed_precision bf16: choose weights bf16 or fp32"
    if choice.weights == "bf16" and choice.mixed_precision == "fp16":
        return "weights bf16 do not go with mixed_precision fp16: choose weights fp32"
    return None


@refuses(
    "fp16-trained-weights",
    why="the gradient scaler refuses fp16 gradients, and without it they underflow",
    versions="all",
    source="torch/amp/grad_scaler.py: Attempting to unscale FP16 gradients",
)
def fp16_trained_weights(context: RuleContext, choice: Choice) -> str | None:
    """Training the fp16 weights themselves."""
    if choice.weights != "fp16" or choice.method != "full":
        return None
    if choice.mixed_precision == "no":
        return "weights fp16 without mixed precision have no loss scaling: choose weights fp32"
    if choice.sharding in FSDP2 or choice.sharding in ZERO:
        # Both keep fp32 copies of what trains.
        return None
    return "weights fp16 cannot be trained under a gradient scaler: choose weights fp32"


@refuses(
    "fp16-bf16-adapters",
    why="TRL casts the adapters of a quantised base to bf16, whose gradients the fp16 scaler refuses",
    versions="TRL >= 0.26",
    source="trl/trainer/sft_trainer.py:902-911 @1.16.0; pytorch issue 127176, TRL issue 4901",
    concerns="adapter",
    applies=lambda context: context.release.qlora_adapters_bf16,
)
def fp16_bf16_adapters(context: RuleContext, choice: Choice) -> str | None:
    """QLoRA under fp16 mixed precision."""
    if choice.method == "qlora" and choice.mixed_precision == "fp16":
        return "qlora adapters are bf16, which mixed_precision fp16 cannot scale: choose bf16 or no"
    return None


@refuses(
    "zero-one-dtype",
    why="DeepSpeed keeps the half-precision weights and an fp32 master copy all the same, so the run would be that of "
    "mixed precision under another name, and accelerate would not know of it",
    versions="deepspeed 0.19.8",
    source="deepspeed/runtime/engine.py:2064-2090, zero/stage_1_and_2.py:560-577 @0.19.8; tried",
    concerns="zero",
)
def zero_one_dtype(context: RuleContext, choice: Choice) -> str | None:
    """Half-precision weights under ZeRO without mixed precision."""
    if choice.mixed_precision == "no" and choice.weights != "fp32":
        return (
            f"{choice.sharding} takes weights {choice.weights} only with mixed_precision "
            f"{choice.weights}, which keeps an fp32 master copy"
        )
    return None


@refuses(
    "fsdp2-upcast-lost",
    why="accelerate 1.13 casts into a name it throws away: trained weights stay in half precision, "
    "or mix dtypes in one group",
    versions="accelerate 1.13",
    source="accelerate/utils/fsdp_utils.py:733-740 @1.13.0; accelerate issues 3979, 3985",
    concerns="fsdp2",
    applies=lambda context: "fsdp2_fp32_shards" in context.lacks,
)
def fsdp2_upcast_lost(context: RuleContext, choice: Choice) -> str | None:
    """Half-precision weights under FSDP2 with the accelerate that forgets to upcast them."""
    if choice.weights != "fp32" and choice.mixed_precision != "no":
        return (
            f"weights {choice.weights} under {choice.sharding} need "
            f"{context.lacks['fsdp2_fp32_shards']}: upgrade to 1.14"
        )
    return None


@refuses(
    "stacked-experts-fp32",
    why="torch's grouped_mm is no autocast operation: fp32 experts would be multiplied in fp32, "
    "expert by expert and off the tensor cores, and its traced form refuses fp32 outright",
    versions="transformers >= 5",
    source="transformers/integrations/moe.py:374-381 @5.24.0; torch/_meta_registrations.py:8645",
    applies=lambda context: context.model.stacked_experts and not context.on_cpu,
)
def stacked_experts_fp32(context: RuleContext, choice: Choice) -> str | None:
    """fp32 experts under autocast."""
    if (
        choice.weights == "fp32"
        and choice.mixed_precision != "no"
        and choice.sharding not in FSDP2
        and choice.sharding not in ZERO
    ):
        return (
            f"the experts of {context.model.model_type} run through grouped_mm, which autocast "
            f"leaves in fp32 and torch declares for bf16: choose weights {choice.mixed_precision}"
        )
    return None


@warns(
    "fp32-frozen-base",
    why="TRL loads in fp32 unless told otherwise, and a frozen base gains nothing from it",
    versions="TRL >= 0.27",
    source="trl/trainer/utils.py:1332 @1.16.0",
    concerns="adapter",
    # On a CPU fp32 is what trains fastest.
    applies=lambda context: not context.on_cpu,
)
def fp32_frozen_base(context: RuleContext, choice: Choice) -> str | None:
    """An adapter on an fp32 base."""
    if choice.weights == "fp32":
        return f"{choice.method} holds its frozen base in fp32: weights bf16 halves it"
    return None


@warns(
    "fsdp2-upcasts-base",
    why="these releases upcast the whole model, the frozen base included",
    versions="accelerate < 1.13",
    source="accelerate/utils/fsdp_utils.py:709-712 @1.12.0",
    concerns="fsdp2",
    applies=lambda context: "fsdp2_frozen_kept" in context.lacks,
)
def fsdp2_upcasts_base(context: RuleContext, choice: Choice) -> str | None:
    """A frozen base under FSDP2 with an accelerate that upcasts it."""
    if choice.method == "lora" and choice.mixed_precision != "no":
        return (
            f"{choice.sharding} holds the frozen base in fp32: keeping it in {choice.weights} "
            f"needs {context.lacks['fsdp2_frozen_kept']}"
        )
    return None
