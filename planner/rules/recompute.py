"""Recompute modes: releases, trainers and checkpointing variants that they go with."""

from __future__ import annotations

from planner.choice import Choice
from planner.rules.book import refuses
from planner.rules.context import RuleContext


def reenables_checkpointing(context: RuleContext) -> bool:
    """Whether the trainer switches checkpointing off and on again with the raw arguments.

    DPO and KTO do so around the reference's forward pass, unless its log-probabilities are
    precomputed; GRPO and RLOO around every generation. Only ``use_reentrant`` survives it.
    Source: trl/models/utils.py:396-414 @1.16.0.
    """
    if context.trainer in ("dpo", "kto"):
        return not context.asks.precompute_ref_log_probs
    return context.trainer in ("grpo", "rloo")


@refuses(
    "model-recomputes",
    why="the class does not support gradient checkpointing and the trainer raises",
    versions="all",
    source="transformers/modeling_utils.py:3154 @5.24.0",
    applies=lambda context: not context.model.recomputes,
)
def model_recomputes(context: RuleContext, choice: Choice) -> str | None:
    """Recompute for a model class without gradient checkpointing."""
    if choice.recompute != "none":
        return f"{context.model.model_type} does not support recompute: choose recompute none"
    return None


@refuses(
    "every-n-releases",
    why="every_n_layers came with transformers 5.16",
    versions="transformers >= 5.16",
    source="transformers/modeling_utils.py:3245-3247 @5.24.0; transformers PR 48200",
    concerns="every_n",
    applies=lambda context: "recompute_every_n" in context.lacks,
)
def every_n_releases(context: RuleContext, choice: Choice) -> str | None:
    """Recompute of every n-th layer on releases that do not have it."""
    return f"recompute {choice.recompute} needs {context.lacks['recompute_every_n']}"


@refuses(
    "every-n-trainers",
    why="these trainers re-enable checkpointing with the raw arguments, and torch raises on "
    "every_n_layers in the second step",
    versions="TRL up to 1.16",
    source="trl/models/utils.py:396-414, dpo_trainer.py:1327 @1.16.0",
    concerns="every_n",
    applies=reenables_checkpointing,
)
def every_n_trainers(context: RuleContext, choice: Choice) -> str | None:
    """Recompute of every n-th layer in a trainer that re-enables checkpointing."""
    cure = (
        "set precompute_ref_log_probs or choose recompute full"
        if context.trainer in ("dpo", "kto")
        else "choose recompute full"
    )
    return f"recompute {choice.recompute} crashes {context.trainer} in its second step: {cure}"


@refuses(
    "selective-releases",
    why="TRL's selective checkpointing came with 1.15",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:1083-1098 @1.16.0",
    concerns="selective",
    applies=lambda context: "recompute_selective" in context.lacks,
)
def selective_releases(context: RuleContext, choice: Choice) -> str | None:
    """Selective recompute on releases that do not have it."""
    return f"recompute selective needs {context.lacks['recompute_selective']}"


@refuses(
    "selective-sft-only",
    why="only SFT strips the key before it reaches torch, which raises on it",
    versions="TRL >= 1.15",
    source="trl/models/selective_activation_checkpointing.py @1.16.0",
    concerns="selective",
    applies=lambda context: context.trainer != "sft",
)
def selective_sft_only(context: RuleContext, choice: Choice) -> str | None:
    """Selective recompute outside SFT."""
    return f"recompute selective works for sft only, not {context.trainer}: choose full"


@refuses(
    "selective-not-reentrant",
    why="it intercepts saved tensors, which reentrant checkpointing does not have",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:1090 @1.16.0",
    concerns="selective",
    applies=lambda context: context.asks.use_reentrant,
)
def selective_not_reentrant(context: RuleContext, choice: Choice) -> str | None:
    """Selective recompute with reentrant checkpointing."""
    return "recompute selective refuses use_reentrant: take it out of trl"


@refuses(
    "selective-no-adapter-zero3",
    why="adapters under ZeRO-3 force reentrant checkpointing",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:880-886 @1.16.0; TRL issue 2514",
    concerns="selective",
)
def selective_no_adapter_zero3(context: RuleContext, choice: Choice) -> str | None:
    """Selective recompute of an adapter's base under ZeRO-3."""
    if choice.sharding == "zero3" and choice.method != "full":
        return f"recompute selective does not go with {choice.method} under zero3: choose full"
    return None


@refuses(
    "selective-needs-kernel",
    why="it keeps the outputs of fused attention kernels; eager has none, so it would be full",
    versions="TRL >= 1.15",
    source="trl/models/selective_activation_checkpointing.py @1.16.0",
    concerns="selective",
)
def selective_needs_kernel(context: RuleContext, choice: Choice) -> str | None:
    """Selective recompute with eager attention."""
    if choice.attention == "eager":
        return "recompute selective finds nothing to keep in eager attention: choose full"
    return None
