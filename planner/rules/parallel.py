"""Shardings: how many GPUs each one needs, and which releases can run it."""

from __future__ import annotations

from planner.choice import SHARDED, Choice
from planner.rules.book import refuses, warns
from planner.rules.context import RuleContext

_ONE_GROUP = frozenset({"fsdp", "fsdp_no_reshard", "fsdp1"})
"""Shardings with a single group of ranks that divide the model."""


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count:,} GPUs"


@refuses(
    "cpu-no-sharding",
    why="accelerate never promotes a CPU run to FSDP and ignores DeepSpeed there: it would be DDP",
    versions="all",
    source="accelerate/state.py:986-1016 @1.15.0",
    applies=lambda context: context.on_cpu,
)
def cpu_no_sharding(context: RuleContext, choice: Choice) -> str | None:
    """A sharded run on a CPU machine."""
    if choice.sharding != "none" and choice.sharding != "ddp":
        return f"on cpu accelerate runs {choice.sharding} as ddp; choose sharding none or ddp"
    return None


@refuses(
    "none-is-one-gpu",
    why="without a launcher TRL refuses nn.DataParallel, and nothing would spread the work",
    versions="all",
    source="trl/trainer/sft_trainer.py:1115-1123 @1.16.0",
)
def none_is_one_gpu(context: RuleContext, choice: Choice) -> str | None:
    """Sharding none on several GPUs."""
    if choice.sharding == "none" and choice.num_gpus != 1:
        return f"sharding none runs on one GPU, not on {choice.num_gpus:,}"
    return None


@refuses(
    "ddp-only-replicates",
    why="DDP copies the whole model to each rank; it has no shard, context or sequence dimension",
    versions="all",
    source="accelerate/parallelism_config.py:367-397 @1.15.0",
)
def ddp_only_replicates(context: RuleContext, choice: Choice) -> str | None:
    """DDP with another parallelism, or on one GPU."""
    if choice.sharding != "ddp":
        return None
    if choice.dp_replicate < 2:
        return "ddp needs two or more replicas; on one GPU choose sharding none"
    if choice.num_gpus != choice.dp_replicate:
        return f"ddp only replicates: {choice.num_gpus:,} GPUs need dp_replicate {choice.num_gpus:,}"
    return None


@refuses(
    "fsdp-one-group",
    why="FSDP shards over dp_shard x cp; with that product at 1 there is no mesh to shard over",
    versions="accelerate >= 1.6",
    source="accelerate/parallelism_config.py:379-388 @1.15.0",
)
def fsdp_one_group(context: RuleContext, choice: Choice) -> str | None:
    """FSDP with replicas, or with one GPU."""
    if choice.sharding not in _ONE_GROUP:
        return None
    if choice.dp_replicate > 1:
        return f"{choice.sharding} has one shard group; for replicas of it choose sharding hsdp"
    if choice.dp_shard * choice.cp < 2:
        return f"{choice.sharding} shards over dp_shard x cp, which is 1: choose two or more GPUs"
    return None


@refuses(
    "hsdp-two-dimensions",
    why="HSDP is a mesh of dp_replicate x dp_shard; with either at 1 it is ddp or fsdp",
    versions="accelerate >= 1.6",
    source="accelerate/parallelism_config.py:136-143, 336-341 @1.15.0",
)
def hsdp_two_dimensions(context: RuleContext, choice: Choice) -> str | None:
    """Hybrid sharding without both replicas and shards."""
    if choice.sharding == "hsdp" and (choice.dp_replicate < 2 or choice.dp_shard < 2):
        return f"hsdp needs dp_replicate and dp_shard of two or more, not {choice.dp_replicate} x {choice.dp_shard}"
    return None


@refuses(
    "hsdp-releases",
    why="the mesh of replicas and shards is accelerate's ParallelismConfig, which came with 1.10",
    versions="accelerate >= 1.10",
    source="accelerate/parallelism_config.py:136-143 @1.15.0",
    concerns="fsdp2",
    applies=lambda context: "parallelism_config" in context.lacks,
)
def hsdp_releases(context: RuleContext, choice: Choice) -> str | None:
    """Hybrid sharding on releases that have no mesh for it."""
    if choice.sharding == "hsdp":
        return f"hsdp needs {context.lacks['parallelism_config']}"
    return None


@refuses(
    "zero-flat-world",
    why="DeepSpeed partitions over the whole world, whatever the mesh says",
    versions="all",
    source="deepspeed/runtime/zero/stage_1_and_2.py, stage3.py @0.19.8",
    concerns="zero",
)
def zero_flat_world(context: RuleContext, choice: Choice) -> str | None:
    """ZeRO with replicas of shard groups."""
    if choice.dp_shard > 1 and choice.dp_replicate > 1:
        return f"{choice.sharding} partitions over all GPUs: set dp_shard or dp_replicate, not both"
    return None


@refuses(
    "tp-not-offered",
    why="transformers can cut a model while loading it (distributed_config in model_init_kwargs), and TRL trains that "
    "as one process would; but its optimizer cannot be checkpointed, so no run resumes, accelerate's tp_size alone "
    "raises, and trlfit counts neither its memory nor its exchanges",
    versions="TRL 1.16, transformers 5.24, accelerate 1.15",
    source="transformers/trainer.py:632-640 @5.24.0, accelerate/accelerator.py:1904-1914 @1.15.0; "
    "tests/launcher/test_tensor_parallel.py",
)
def tp_not_offered(context: RuleContext, choice: Choice) -> str | None:
    """Tensor parallelism."""
    if choice.tp > 1:
        return (
            f"tp {choice.tp} is not offered: such a run cannot resume from a checkpoint and is not counted here; "
            "fsdp and zero3 divide the same states"
        )
    return None


@refuses(
    "sizes-fit-machine",
    why="one process drives one GPU, and sizes multiply",
    versions="all",
    source="accelerate/parallelism_config.py:367-377 @1.15.0; accelerate issue 3804",
)
def sizes_fit_machine(context: RuleContext, choice: Choice) -> str | None:
    """More processes than the machine has room for."""
    if choice.num_gpus > context.num_gpus:
        return (
            f"dp_replicate {choice.dp_replicate} x dp_shard {choice.dp_shard} x cp {choice.cp} "
            f"x sp {choice.sp} x tp {choice.tp} makes {_gpus(choice.num_gpus)}, "
            f"the machine has {context.num_gpus:,}"
        )
    return None


@refuses(
    "whole-nodes",
    why="accelerate starts the same number of processes on every node",
    versions="all",
    source="accelerate/commands/launch.py: num_processes // num_machines",
    applies=lambda context: context.num_gpus > context.gpus_per_node,
)
def whole_nodes(context: RuleContext, choice: Choice) -> str | None:
    """A run over a part of a node."""
    total = choice.num_gpus
    if total > context.gpus_per_node and total % context.gpus_per_node:
        return (
            f"{total:,} GPUs are not whole nodes of {context.gpus_per_node}: "
            "every node gets the same number of processes"
        )
    return None


@refuses(
    "fsdp2-releases",
    why="fully_shard is reached through accelerate's fsdp_version 2",
    versions="accelerate >= 1.6, torch >= 2.6",
    source="accelerate/utils/constants.py:46 @1.15.0",
    concerns="fsdp2",
    applies=lambda context: "fsdp2" in context.lacks,
)
def fsdp2_releases(context: RuleContext, choice: Choice) -> str | None:
    """FSDP2 on releases that do not have it."""
    return f"{choice.sharding} needs {context.lacks['fsdp2']}"


@refuses(
    "fsdp1-older-stacks",
    why="FSDP1 is kept to estimate older stacks; runs are written with FSDP2",
    versions="accelerate >= 1.6, torch >= 2.6",
    source="transformers/training_args.py:2826 @5.24.0 defaults to version 2",
    applies=lambda context: "fsdp2" not in context.lacks,
)
def fsdp1_older_stacks(context: RuleContext, choice: Choice) -> str | None:
    """FSDP1 where FSDP2 is there."""
    if choice.sharding == "fsdp1":
        return "fsdp1 is only estimated, for stacks without FSDP2; this one has it: choose fsdp"
    return None


@refuses(
    "fsdp2-tied-embeddings",
    why="torch 2.13 raises when a shared parameter is visible to two FSDP groups; accelerate 1.15 "
    "puts embedding and head into one",
    versions="torch >= 2.13 with accelerate < 1.15",
    source="accelerate/utils/fsdp_utils.py:860-877 @1.15.0; accelerate PR 4171",
    concerns="fsdp2",
    applies=lambda context: context.model.tied and "fsdp2_tied_embeddings" in context.lacks,
)
def fsdp2_tied_embeddings(context: RuleContext, choice: Choice) -> str | None:
    """A tied head under FSDP2 on torch >= 2.13 with an older accelerate."""
    return (
        f"{context.model.model_type} ties its head to the embedding, which {choice.sharding} "
        f"shards only with {context.lacks['fsdp2_tied_embeddings']}"
    )


@refuses(
    "zero-needs-deepspeed",
    why="ZeRO is DeepSpeed's",
    versions="deepspeed >= 0.14.4",
    source="trl METADATA, extra deepspeed",
    concerns="zero",
    applies=lambda context: "zero" in context.lacks,
)
def zero_needs_deepspeed(context: RuleContext, choice: Choice) -> str | None:
    """ZeRO without DeepSpeed."""
    return f"{choice.sharding} needs {context.lacks['zero']}"


@refuses(
    "save-only-model-best",
    why="a sharded best checkpoint cannot be loaded back without its optimizer state",
    versions="all",
    source="transformers/trainer.py:889-896 @5.24.0",
    applies=lambda context: context.asks.save_only_model and context.asks.load_best_model_at_end,
)
def save_only_model_best(context: RuleContext, choice: Choice) -> str | None:
    """Save_only_model with load_best_model_at_end on a sharded run."""
    if choice.sharding in SHARDED:
        return f"save_only_model with load_best_model_at_end is refused under {choice.sharding}: drop one of them"
    return None


@refuses(
    "zero3-auto-batch",
    why="the trainer refuses it",
    versions="all",
    source="transformers/trainer.py:898-906 @5.24.0",
    concerns="zero",
    applies=lambda context: context.asks.auto_find_batch_size,
)
def zero3_auto_batch(context: RuleContext, choice: Choice) -> str | None:
    """Auto_find_batch_size under ZeRO-3."""
    if choice.sharding == "zero3":
        return "auto_find_batch_size does not work under zero3: set it to false"
    return None


@warns(
    "zero-one-gpu",
    why="one rank has nothing to divide: it pays the fp32 master copy and the buckets",
    versions="all",
    source="deepspeed/runtime/zero/stage_1_and_2.py:560-577 @0.19.8",
    concerns="zero",
)
def zero_one_gpu(context: RuleContext, choice: Choice) -> str | None:
    """ZeRO on one GPU without offload."""
    if choice.num_gpus == 1 and not choice.offload:
        return f"{choice.sharding} on one GPU divides nothing and adds a master copy and buckets"
    return None


@warns(
    "fsdp2-rounds-logps",
    why="accelerate's mixed-precision policy casts the fused head's outputs to bf16",
    versions="TRL >= 1.15, accelerate >= 1.6",
    source="accelerate/utils/dataclasses.py:2109-2143 @1.15.0 (-94.1755 becomes -94.0)",
    concerns="fsdp2",
    applies=lambda context: context.trainer in ("dpo", "kto", "grpo", "rloo"),
)
def fsdp2_rounds_logps(context: RuleContext, choice: Choice) -> str | None:
    """Preference log-probabilities under FSDP2."""
    if choice.mixed_precision != "no" and choice.loss_path == "fused":
        return (
            f"{choice.sharding} rounds {context.trainer}'s log-probabilities to "
            f"{choice.mixed_precision}; zero2 and zero3 keep them in fp32"
        )
    return None
