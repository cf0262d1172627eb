"""What single trainers refuse of a job, whatever the choice."""

from __future__ import annotations

from planner.choice import Choice
from planner.rules.book import refuses_job, warns
from planner.rules.context import RuleContext

ONLINE = frozenset({"grpo", "rloo"})
REFERENCE = frozenset({"dpo", "kto"})


@refuses_job(
    "online-auto-batch",
    why="a smaller batch would cut through the groups of completions",
    versions="all",
    source="trl/trainer/grpo_config.py:1089-1094 @1.16.0",
)
def online_auto_batch(context: RuleContext) -> str | None:
    """auto_find_batch_size in an online trainer."""
    if context.trainer in ONLINE and context.asks.auto_find_batch_size:
        return f"{context.trainer} refuses auto_find_batch_size: take it out of trl"
    return None


@refuses_job(
    "online-generations",
    why="advantages compare the completions of one prompt",
    versions="all",
    source="trl/trainer/grpo_config.py:1138-1141 @1.16.0",
)
def online_generations(context: RuleContext) -> str | None:
    """Fewer than two completions per prompt."""
    if context.trainer in ONLINE and context.num_generations < 2:
        return f"{context.trainer} needs num_generations of two or more in trl"
    return None


@refuses_job(
    "online-groups",
    why="a generation batch holds whole groups of completions",
    versions="all",
    source="trl/trainer/grpo_config.py:1096-1135 @1.16.0",
)
def online_groups(context: RuleContext) -> str | None:
    """A global batch that cuts through a group of completions."""
    if context.trainer not in ONLINE or context.asks.generation_batch:
        return None
    size = context.num_generations
    if size > 1 and context.global_batch % size:
        return (
            f"global_batch {context.global_batch:,} must be a multiple of {size} num_generations for {context.trainer}"
        )
    return None


@refuses_job(
    "kto-one-row",
    why="the KL term pairs each row with another of its micro-batch",
    versions="all",
    source="trl/trainer/kto_trainer.py:844-847 @1.16.0",
)
def kto_one_row(context: RuleContext) -> str | None:
    """KTO with a global batch of one row."""
    if context.global_batch < context.min_micro_batch:
        return "kto needs global_batch 2 or more, or trl loss_type apo_zero_unpaired"
    return None


@refuses_job(
    "sync-precomputed-reference",
    why="a reference that moves makes what was precomputed stale",
    versions="all",
    source="trl/trainer/dpo_trainer.py:1003-1007 @1.16.0",
)
def sync_precomputed_reference(context: RuleContext) -> str | None:
    """sync_ref_model with precomputed log-probabilities."""
    asks = context.asks
    if context.trainer in REFERENCE and asks.sync_ref_model and asks.precompute_ref_log_probs:
        return "sync_ref_model and precompute_ref_log_probs exclude each other: drop one from trl"
    return None


@refuses_job(
    "launcher-arguments",
    why="the run is written with an accelerate file, and two launch configurations contradict",
    versions="all",
    source="transformers/training_args.py: fsdp, deepspeed, parallelism_config @5.24.0",
)
def launcher_arguments(context: RuleContext) -> str | None:
    """FSDP, DeepSpeed or parallelism set in the trl section."""
    if context.asks.launcher:
        name = context.asks.launcher[0]
        return f"trl.{name} is decided by the plan: pin sharding, cp or sp instead"
    return None


@warns(
    "vllm-on-the-same-cards",
    why="colocated vLLM reserves a share of the whole card when it starts, for weights and keys and values of its own",
    versions="TRL 1.16",
    source="trl/trainer/grpo_config.py:158, 594 @1.16.0; TRL issue 2688",
    applies=lambda context: context.trainer in ONLINE and context.asks.vllm_share > 0,
)
def vllm_on_the_same_cards(context: RuleContext, choice: Choice) -> str | None:
    """Generation by vLLM on the cards that train."""
    share = context.asks.vllm_share
    return f"vLLM takes {share:.0%} of each card for itself, which is not counted: plan with --reserve {share + 0.05:g}"
