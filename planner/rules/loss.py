"""Loss paths: what each TRL release has for each trainer, and what turns a path off."""

from __future__ import annotations

from planner.choice import FSDP2, Choice
from planner.rules.book import refuses, refuses_job, warns
from planner.rules.context import RuleContext
from planner.units import format_bytes
from profiles.releases import within

LOGIT_BYTES = 12
"""Peak bytes per full logit (saved and incoming gradients of its log-softmax)."""
LONG_LOGITS_BYTES = 16 * 2**30
"""Full logits beyond this are refused where they come on top of the loss path."""
_CHUNKED = frozenset({"chunked", "chunked_fp32"})


@refuses(
    "loss-path-in-release",
    why="each release computes the loss in its own way, and older ways are removed",
    versions="all",
    source="profiles/releases.toml, rows [[trl]]",
)
def loss_path_in_release(context: RuleContext, choice: Choice) -> str | None:
    """A loss path that this TRL does not have for this trainer."""
    if choice.loss_path not in context.loss_paths:
        has = ", ".join(context.release.loss_paths_for(context.trainer))
        return f"trl {context.trl} has no {choice.loss_path} loss for {context.trainer}; it has {has}"
    return None


def _lacks_liger(context: RuleContext) -> bool:
    have = context.versions.get("liger-kernel")
    return have is None or not within(have, (context.release.liger_kernel,))


@refuses(
    "liger-package",
    why="the fused cross entropy is Liger's",
    versions="TRL < 1.15",
    source="trl METADATA, extra liger",
    applies=lambda context: "liger" in context.loss_paths and _lacks_liger(context),
)
def liger_package(context: RuleContext, choice: Choice) -> str | None:
    """The Liger path without its package."""
    if choice.loss_path == "liger":
        have = context.versions.get("liger-kernel", "none")
        wants = context.release.liger_kernel.replace(">=", ">= ")
        return f"loss path liger needs liger-kernel {wants}, the stack has {have}"
    return None


@refuses(
    "liger-on-cpu",
    why="its kernels are written in Triton",
    versions="TRL < 1.15",
    source="liger_kernel/ops",
    applies=lambda context: context.on_cpu and "liger" in context.loss_paths,
)
def liger_on_cpu(context: RuleContext, choice: Choice) -> str | None:
    """The Liger path on a CPU machine."""
    if choice.loss_path == "liger":
        return "loss path liger needs a GPU"
    return None


@refuses(
    "liger-precomputed-reference",
    why="Liger's preference loss computes the reference itself",
    versions="TRL < 1.14",
    source="trl/trainer/dpo_trainer.py:826-832 @1.10.0",
    applies=lambda context: (
        context.trainer in ("dpo", "kto")
        and context.asks.precompute_ref_log_probs
        and within(context.trl, ("<1.14.0",))
    ),
)
def liger_precomputed_reference(context: RuleContext, choice: Choice) -> str | None:
    """Liger's preference loss with precomputed reference log-probabilities."""
    if choice.loss_path == "liger":
        return "loss path liger refuses precompute_ref_log_probs before trl 1.14: drop one of them"
    return None


@refuses(
    "loss-asked-by-hand",
    why="loss_type and use_liger_kernel select the loss path, so they must agree with the knob",
    versions="TRL < 1.15",
    source="trl/trainer/sft_trainer.py:1333-1368 @1.14.2",
    applies=lambda context: (
        context.trainer == "sft"
        and len(context.loss_paths) > 1
        and (context.asks.loss_type is not None or context.asks.use_liger is not None)
    ),
)
def loss_asked_by_hand(context: RuleContext, choice: Choice) -> str | None:
    """A loss path that contradicts the trl section."""
    path, asks = choice.loss_path, context.asks
    if asks.use_liger is not None and asks.use_liger != (path == "liger"):
        return f"trl.use_liger_kernel {str(asks.use_liger).lower()} does not go with {path}"
    if asks.loss_type == "chunked_nll" and path not in _CHUNKED:
        return f"trl.loss_type chunked_nll does not go with loss path {path}"
    if asks.loss_type == "nll" and path in _CHUNKED:
        return f"trl.loss_type nll means full logits in trl {context.trl}, not {path}"
    if asks.loss_type == "dft" and path in _CHUNKED:
        return f"trl.loss_type dft needs full logits in trl {context.trl}, not {path}"
    return None


@refuses(
    "chunked-sharded-head",
    why="every 256-token chunk gathers the head again, and with adapters it mixes tensor kinds",
    versions="TRL < 1.7",
    source="trl/trainer/sft_trainer.py:1316-1322 @1.4.0; TRL issues 6065, 6077, 5873",
    applies=lambda context: "chunked_sharded_head" in context.lacks,
)
def chunked_sharded_head(context: RuleContext, choice: Choice) -> str | None:
    """The chunked loss over a head that is sharded."""
    if choice.loss_path in _CHUNKED and (choice.sharding in FSDP2 or choice.sharding == "zero3"):
        return f"{choice.loss_path} under {choice.sharding} needs {context.lacks['chunked_sharded_head']}"
    return None


@refuses(
    "head-adapter-skipped",
    why="the loss multiplies with lm_head.weight itself, so an adapter on it would never train",
    versions="TRL >= 1.4",
    source="trl/trainer/sft_trainer.py:1354-1360 @1.14.2, :1066-1073 @1.16.0",
    concerns="adapter",
    applies=lambda context: context.head_adapter,
)
def head_adapter_skipped(context: RuleContext, choice: Choice) -> str | None:
    """An adapter on the output head under a loss path that bypasses it."""
    if choice.loss_path == "full_logits":
        return None
    if choice.loss_path == "liger" and context.trainer == "sft":
        return None
    return (
        f"loss path {choice.loss_path} bypasses lm_head, so its adapter would never train: "
        "take lm_head out of lora.target_modules"
    )


@refuses_job(
    "head-adapter",
    why="every loss path of this release multiplies with lm_head.weight itself",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:1066-1073, dpo_trainer.py:836-842 @1.16.0",
)
def head_adapter(context: RuleContext) -> str | None:
    """An adapter on the output head where no loss path can train it."""
    if context.adapter and context.head_adapter and context.loss_paths == frozenset({"fused"}):
        if context.trainer == "reward":
            return None
        return f"trl {context.trl} cannot train an adapter on lm_head: take lm_head out of lora.target_modules"
    return None


@refuses_job(
    "unknown-loss-type",
    why="the trainer raises on any other value",
    versions="all",
    source="trl/trainer/sft_trainer.py:1042-1043 @1.16.0",
)
def unknown_loss_type(context: RuleContext) -> str | None:
    """A loss_type that this SFT does not have."""
    asked, known = context.asks.loss_type, context.release.loss_types
    if context.trainer != "sft" or asked is None or asked in known:
        return None
    if not known:
        return f"trl {context.trl} has no loss_type argument: take it out of trl, or use trl >= 0.23"
    return f"trl.loss_type {asked} is not known to trl {context.trl}; it takes {', '.join(known)}"


@refuses_job(
    "liger-fused-loss",
    why="Liger's cross entropy replaces the model's forward, which TRL patches with its own head",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:1127-1140 @1.16.0",
)
def liger_fused_loss(context: RuleContext) -> str | None:
    """Liger's fused cross entropy beside TRL's own fused head."""
    if context.asks.liger_fused_loss and "fused" in context.loss_paths:
        return (
            f"trl {context.trl} has its own fused head and refuses liger_kernel_config "
            "fused_linear_cross_entropy: take it out of trl"
        )
    return None


@refuses_job(
    "full-logits-at-length",
    why="these ask for the whole logits in one more forward pass beside the fused loss",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:1593-1609, 1665-1688 @1.16.0",
)
def full_logits_at_length(context: RuleContext) -> str | None:
    """Metrics or label smoothing that need full logits at a long context."""
    if context.trainer != "sft" or "fused" not in context.loss_paths:
        return None
    asked = context.asks.full_logits
    if context.asks.label_smoothing > 0:
        asked += ("label_smoothing_factor",)
    size = LOGIT_BYTES * context.seq_len * context.model.vocab
    if not asked or size <= LONG_LOGITS_BYTES:
        return None
    return (
        f"trl.{asked[0]} needs full logits, {LOGIT_BYTES} x {context.seq_len:,} tokens x "
        f"{context.model.vocab:,} words = {format_bytes(size)} per sequence: take it out of trl"
    )


@warns(
    "extra-logits-pass",
    why="these ask for the whole logits in one more forward pass beside the fused loss",
    versions="TRL >= 1.15",
    source="trl/trainer/sft_trainer.py:1593-1609, 1665-1688 @1.16.0",
    applies=lambda context: (
        context.trainer == "sft"
        and "fused" in context.loss_paths
        and (bool(context.asks.full_logits) or context.asks.label_smoothing > 0)
    ),
)
def extra_logits_pass(context: RuleContext, choice: Choice) -> str | None:
    """Metrics or label smoothing that add a pass with full logits."""
    size = LOGIT_BYTES * context.seq_len * context.model.vocab * choice.micro_batch
    return (
        "label smoothing and custom metrics or losses add a forward pass with full logits, "
        f"{format_bytes(size)} more that the plan does not count"
    )


@warns(
    "fp32-head-copies",
    why="h.float() @ w.float().t() copies the head for every 256 tokens and again in its recompute",
    versions="TRL 1.4 to 1.12",
    source="trl/trainer/sft_trainer.py:101 @1.12.0; TRL PR 6863",
    applies=lambda context: "chunked_fp32" in context.loss_paths,
)
def fp32_head_copies(context: RuleContext, choice: Choice) -> str | None:
    """The chunked loss of TRL 1.4 to 1.12, which copies the head to fp32."""
    if choice.loss_path == "chunked_fp32":
        size = 4 * context.model.vocab * context.model.hidden
        return (
            f"trl {context.trl} copies lm_head to fp32 ({format_bytes(size)}) for every 256 "
            "tokens; 1.13 does not, and 1.15 fuses the loss"
        )
    return None


@warns(
    "full-logits-by-release",
    why="this release holds the whole logits three times over while it runs backward",
    versions="TRL < 1.15",
    source="transformers/loss/loss_utils.py; trl/trainer/sft_trainer.py",
    applies=lambda context: "full_logits" in context.loss_paths and context.trainer == "sft",
)
def full_logits_by_release(context: RuleContext, choice: Choice) -> str | None:
    """Full logits where a newer TRL would not hold them."""
    if choice.loss_path == "full_logits":
        each = context.release.nll_bytes(choice.micro_batch)
        size = each * context.seq_len * context.model.vocab * choice.micro_batch // choice.cp
        return (
            f"full logits take {format_bytes(size // choice.sp)} with trl {context.trl}; "
            "1.15 fuses the loss and holds none"
        )
    return None
