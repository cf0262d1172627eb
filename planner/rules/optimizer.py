"""Optimizers: packages, devices and shardings that each one needs."""

from __future__ import annotations

from planner.choice import FSDP2, ZERO, Choice
from planner.rules.book import DEFAULT_OPTIMIZER, refuses
from planner.rules.context import RuleContext
from profiles.releases import optimizer_needs


@refuses(
    "optimizer-known",
    why="the trainer takes the names of its own table only",
    versions="transformers 5.24",
    source="transformers/training_args.py:113-158 @5.24.0",
    concerns="optimizer",
)
def optimizer_known(context: RuleContext, choice: Choice) -> str | None:
    """An optimizer that transformers does not have, or not for this hardware."""
    needs = optimizer_needs(choice.optimizer)
    if needs is None:
        return f"optimizer {choice.optimizer} is not one of transformers' optim names"
    if needs.other_device:
        return f"optimizer {choice.optimizer} is for another kind of accelerator"
    return None


@refuses(
    "optimizer-package",
    why="it lives in a package of its own",
    versions="all",
    source="transformers/trainer_optimizer.py @5.24.0",
    concerns="optimizer",
)
def optimizer_package(context: RuleContext, choice: Choice) -> str | None:
    """An optimizer whose package is not in the stack."""
    needs = optimizer_needs(choice.optimizer)
    if needs is not None and needs.package and needs.package not in context.versions:
        return f"optimizer {choice.optimizer} needs the package {needs.package}"
    return None


@refuses(
    "optimizer-needs-gpu",
    why="its kernels, and the unified memory of the paged ones, are CUDA's",
    versions="all",
    source="bitsandbytes/optim, torchao/optim",
    concerns="optimizer",
    applies=lambda context: context.on_cpu,
)
def optimizer_needs_gpu(context: RuleContext, choice: Choice) -> str | None:
    """An 8-bit or paged optimizer on a CPU machine."""
    needs = optimizer_needs(choice.optimizer)
    if needs is not None and needs.package == "bitsandbytes":
        return f"optimizer {choice.optimizer} needs a GPU: choose adamw_torch"
    return None


@refuses(
    "fused-adamw-cpu",
    why="the fused CPU kernel came with torch 2.4",
    versions="torch >= 2.4",
    source="torch/optim/adamw.py",
    applies=lambda context: context.on_cpu and "fused_adamw_cpu" in context.lacks,
)
def fused_adamw_cpu(context: RuleContext, choice: Choice) -> str | None:
    """Fused AdamW on a CPU with an older torch."""
    if choice.optimizer == DEFAULT_OPTIMIZER:
        return f"adamw_torch_fused on cpu needs {context.lacks['fused_adamw_cpu']}"
    return None


@refuses(
    "bitsandbytes-dtensor",
    why="its kernels get DTensor shards they cannot address: illegal memory access",
    versions="bitsandbytes up to 0.50",
    source="bitsandbytes issue 1633",
    concerns="optimizer",
)
def bitsandbytes_dtensor(context: RuleContext, choice: Choice) -> str | None:
    """A bitsandbytes optimizer under FSDP2."""
    if choice.sharding not in FSDP2:
        return None
    needs = optimizer_needs(choice.optimizer)
    if needs is not None and needs.package == "bitsandbytes":
        return (
            f"optimizer {choice.optimizer} does not work on {choice.sharding}'s shards: "
            "choose adamw_torch_fused, or zero2"
        )
    return None


@refuses(
    "low-rank-whole-matrices",
    why="it projects whole weight matrices, which a sharded run does not have",
    versions="all",
    source="transformers/trainer_optimizer.py:95-180 @5.24.0",
    concerns="optimizer",
)
def low_rank_whole_matrices(context: RuleContext, choice: Choice) -> str | None:
    """GaLore or APOLLO over shards, or without target modules."""
    needs = optimizer_needs(choice.optimizer)
    if needs is None or not needs.whole_matrices:
        return None
    if choice.sharding in FSDP2 or choice.sharding in ZERO:
        return f"optimizer {choice.optimizer} projects whole matrices: choose sharding none or ddp"
    if not context.asks.optim_target_modules:
        return f"optimizer {choice.optimizer} needs trl.optim_target_modules"
    return None


@refuses(
    "layerwise-one-step",
    why="it steps inside backward, before gradients are averaged or accumulated",
    versions="all",
    source="transformers/trainer_optimizer.py:108-112, 157-159 @5.24.0",
    concerns="optimizer",
)
def layerwise_one_step(context: RuleContext, choice: Choice) -> str | None:
    """A layerwise optimizer on several GPUs or with gradient accumulation."""
    needs = optimizer_needs(choice.optimizer)
    if needs is None or not needs.layerwise:
        return None
    if choice.num_gpus > 1:
        return f"optimizer {choice.optimizer} runs on one GPU only, not on {choice.num_gpus}"
    if choice.grad_accum > 1:
        return f"optimizer {choice.optimizer} refuses grad_accum {choice.grad_accum}: set it to 1"
    return None
