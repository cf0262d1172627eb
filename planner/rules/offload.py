"""Offload to host memory: which library moves what, and what it does not go with."""

from __future__ import annotations

from planner.choice import FSDP2, ZERO, Choice
from planner.rules.book import refuses, refuses_job, warns
from planner.rules.context import RuleContext
from planner.rules.recompute import reenables_checkpointing
from profiles.releases import optimizer_needs

TRAINERS_THAT_OFFLOAD = frozenset({"sft", "dpo", "kto", "reward"})
"""Configs with TRL's own ``activation_offloading`` (up to 1.16; GRPO and RLOO: open PR 7143)."""


@refuses(
    "offload-needs-gpu",
    why="pinned memory and a device to offload from are missing",
    versions="all",
    source="transformers/modeling_utils.py:3160-3167 @5.24.0 (RuntimeError: pin_memory)",
    concerns="offload",
    applies=lambda context: context.on_cpu,
)
def offload_needs_gpu(context: RuleContext, choice: Choice) -> str | None:
    """Offload on a CPU machine."""
    return f"offload {', '.join(sorted(choice.offload))} needs a GPU: the tensors are on the host"


@refuses(
    "offload-activations-releases",
    why="the offload argument of checkpointing came with transformers 5.17",
    versions="transformers >= 5.17",
    source="transformers/modeling_utils.py:3160-3167 @5.24.0; transformers PR 48444",
    concerns="offload",
    applies=lambda context: "offload_activations" in context.lacks,
)
def offload_activations_releases(context: RuleContext, choice: Choice) -> str | None:
    """Offloaded activations on releases that do not have it."""
    if "activations" in choice.offload:
        return f"offload activations needs {context.lacks['offload_activations']}"
    return None


@refuses(
    "offload-activations-full",
    why="what is offloaded is each checkpoint's saved input; SAC's own tensors bypass it, and "
    "torch announces an error for that mix",
    versions="transformers >= 5.17",
    source="transformers/modeling_utils.py:3160-3167 @5.24.0; pytorch PR 190581, issue 191236",
    concerns="offload",
)
def offload_activations_full(context: RuleContext, choice: Choice) -> str | None:
    """Offloaded activations without recompute of every layer."""
    if "activations" in choice.offload and choice.recompute != "full":
        return f"offload activations moves the checkpoints of recompute full, and recompute is {choice.recompute}"
    return None


@refuses(
    "offload-activations-trainers",
    why="these trainers re-enable checkpointing with the raw arguments, and torch raises on offload in the second step",
    versions="TRL up to 1.16",
    source="trl/models/utils.py:396-414 @1.16.0",
    concerns="offload",
    applies=reenables_checkpointing,
)
def offload_activations_trainers(context: RuleContext, choice: Choice) -> str | None:
    """Offloaded activations in a trainer that re-enables checkpointing."""
    if "activations" in choice.offload:
        return f"offload activations crashes {context.trainer} in its second step: drop it"
    return None


@refuses(
    "offload-optimizer-engine",
    why="states stay where the optimizer's parameters are; only DeepSpeed and FSDP2 move them",
    versions="all",
    source="accelerate/utils/dataclasses.py: offload_optimizer_device, CPUOffloadPolicy @1.15.0",
    concerns="offload",
)
def offload_optimizer_engine(context: RuleContext, choice: Choice) -> str | None:
    """Offloaded optimizer states without an engine that moves them."""
    if "optimizer" not in choice.offload or choice.sharding in ZERO:
        return None
    if choice.sharding in FSDP2:
        if "params" in choice.offload:
            return None
        return f"{choice.sharding} offloads the optimizer only together with params: add params"
    return f"offload optimizer needs zero1, zero2 or zero3, not {choice.sharding}"


@refuses(
    "offload-params-engine",
    why="ZeRO-1 and 2 keep whole weights on every GPU; FSDP2's policy moves weights, gradients and states as one",
    versions="all",
    source="deepspeed/runtime/zero/stage3.py:772-785 @0.19.8; TRL issue 2062",
    concerns="offload",
)
def offload_params_engine(context: RuleContext, choice: Choice) -> str | None:
    """Offloaded weights without an engine that moves them."""
    if "params" not in choice.offload or choice.sharding == "zero3":
        return None
    if choice.sharding in FSDP2:
        if "optimizer" in choice.offload:
            return None
        return f"{choice.sharding} offloads params only together with the optimizer: add optimizer"
    return f"offload params needs zero3 or an FSDP2 sharding, not {choice.sharding}"


@refuses(
    "offload-params-reshard",
    why="without resharding every layer stays on the GPU after its forward, offloaded or not",
    versions="all",
    source="torch/distributed/fsdp/_fully_shard",
    concerns="offload",
)
def offload_params_reshard(context: RuleContext, choice: Choice) -> str | None:
    """Offloaded weights that are never resharded."""
    if "params" in choice.offload and choice.sharding == "fsdp_no_reshard":
        return "fsdp_no_reshard keeps the weights that offload params moves: choose fsdp"
    return None


@refuses(
    "offload-optimizer-rule",
    why="accelerate puts DeepSpeed's CPU Adam in the place of any optimizer that has no CPU twin",
    versions="all",
    source="accelerate/utils/deepspeed.py:29-97, accelerator.py:2376-2383 @1.15.0",
    concerns="offload",
)
def offload_optimizer_rule(context: RuleContext, choice: Choice) -> str | None:
    """An offloaded optimizer that DeepSpeed would silently replace."""
    if "optimizer" not in choice.offload or choice.sharding not in ZERO:
        return None
    needs = optimizer_needs(choice.optimizer)
    if needs is not None and not needs.cpu_equivalent:
        return (
            f"{choice.sharding} with offload optimizer would replace {choice.optimizer} by Adam "
            "on the CPU: choose adamw_torch_fused"
        )
    return None


@warns(
    "activation-offloading-selective",
    why="what selective recompute keeps bypasses the hooks that offload, and torch announces an error for that mix",
    versions="TRL >= 1.15",
    source="pytorch PR 190581, issue 191236; trl/models/activation_offloading.py @1.16.0",
    concerns="selective",
    applies=lambda context: context.asks.activation_offloading,
)
def activation_offloading_selective(context: RuleContext, choice: Choice) -> str | None:
    """TRL's activation_offloading beside selective recompute."""
    return "activation_offloading moves nothing of what recompute selective keeps: drop one of them"


@refuses_job(
    "activation-offloading-config",
    why="their configs have no such argument",
    versions="TRL up to 1.16",
    source="trl/trainer/grpo_config.py, rloo_config.py @1.16.0; TRL PR 7143",
)
def activation_offloading_config(context: RuleContext) -> str | None:
    """activation_offloading in a trainer that does not have it."""
    if context.asks.activation_offloading and context.trainer not in TRAINERS_THAT_OFFLOAD:
        return f"{context.trainer} has no activation_offloading: take it out of trl"
    return None


@refuses_job(
    "activation-offloading-cpu",
    why="it copies to pinned memory on a second stream of an accelerator",
    versions="all",
    source="trl/models/activation_offloading.py @1.16.0",
)
def activation_offloading_cpu(context: RuleContext) -> str | None:
    """activation_offloading on a CPU machine."""
    if context.asks.activation_offloading and context.on_cpu:
        return "activation_offloading needs a GPU: take it out of trl"
    return None
