"""Every rule of the book refuses what it should and lets the nearest legal neighbour pass."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from planner.architecture import Architecture, FusedExperts, LayerKind
from planner.choice import Choice
from planner.job import Job
from planner.rules import (
    JOB_RULES,
    RULES,
    WARNINGS,
    JobRule,
    Rule,
    RuleContext,
    all_refusals,
    first_refusal,
    job_refusals,
    warnings_for,
    with_rules,
)
from planner.rules.context import read_context
from planner.stack import Stack
from profiles.releases import newest_known

FULL = LayerKind(
    name="full", attention="full", linears=(), norm_parameters=0, heads=32, kv_heads=8, head_dim=128, value_head_dim=128
)
SLIDING = replace(FULL, name="sliding", attention="sliding", window=1024)
LINEAR = replace(FULL, name="linear", attention="linear")
EXPERTS = replace(
    FULL,
    name="full+moe",
    experts=FusedExperts(num_experts=128, experts_per_token=8, hidden=2048, intermediate=768, num_parameters=1),
)


def architecture(model_type: str, *kinds: LayerKind, **changes: Any) -> Architecture:
    values: dict[str, Any] = {
        "model": f"test/{model_type}",
        "model_type": model_type,
        "config": {"model_type": model_type},
        "origin": "config.json",
        "hidden": 4096,
        "vocab": 151_936,
        "kinds": kinds,
        "order": tuple(range(len(kinds))),
        "tied": False,
        "embedding_parameters": 0,
        "final_norm_parameters": 0,
        "max_positions": 131_072,
    }
    return Architecture(**{**values, **changes})


MODELS = {
    "qwen3": architecture("qwen3", FULL),
    "short": architecture("qwen3", FULL, max_positions=40_960),
    "tied": architecture("qwen3", FULL, tied=True),
    "vision": architecture("qwen3_vl_text", FULL, vision_parameters=600_000_000),
    "moe": architecture("qwen3_moe", EXPERTS),
    "gemma2": architecture("gemma2", replace(SLIDING, attention_softcap=True), replace(FULL, attention_softcap=True)),
    "gemma3": architecture("gemma3_text", SLIDING, FULL, nested_rope=True, max_positions=32_768),
    "gpt_oss": architecture("gpt_oss", replace(SLIDING, attention_sinks=True), replace(EXPERTS, attention_sinks=True)),
    "next": architecture("qwen3_next", LINEAR, FULL),
    "mla": architecture("deepseek_v3", replace(FULL, kv_heads=32, head_dim=192)),
    "odd": architecture("qwen2", replace(FULL, heads=24, kv_heads=8)),
    "scaled": architecture("qwen3", FULL, rope_type="llama3"),
    "wide": architecture("gemma4_text", replace(FULL, head_dim=512, value_head_dim=512)),
    "llama4": architecture("llama4_text", FULL),
    "jetmoe": architecture("jetmoe", FULL),
    "bloom": architecture("bloom", FULL),
}

INSTALLED = {**newest_known(), "deepspeed": "0.19.8", "bitsandbytes": "0.50.0", "flash-attn": "2.8.3"}


def context_for(
    *,
    model: str = "qwen3",
    job: dict[str, Any] | None = None,
    stack: dict[str, str | None] | None = None,
    device: str = "cuda",
    gpus: int = 8,
    capability: str | None = "9.0",
) -> RuleContext:
    versions = {k: v for k, v in {**INSTALLED, **(stack or {})}.items() if v is not None}
    absent = {k: "absent" for k, v in (stack or {}).items() if v is None}
    facts = read_context(
        Job.model_validate({"model": "m", "seq_len": 4096, "global_batch": 8, **(job or {})}),
        MODELS[model],
        Stack.model_validate({"versions": versions, "origin": absent}),
        device=device,
        gpus_per_node=gpus,
        compute_capability=capability,
    )
    return with_rules(facts)


BASE = Choice(method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8)


def choice(**changes: Any) -> Choice:
    if "offload" in changes:
        changes["offload"] = frozenset(changes["offload"])
    return replace(BASE, **changes)


ONE = {"sharding": "none", "dp_shard": 1, "grad_accum": 8}
DDP = {"sharding": "ddp", "dp_shard": 1, "dp_replicate": 8}
CP = {"cp": 4, "dp_shard": 2, "grad_accum": 4}
SP = {"sharding": "zero3", "sp": 4, "dp_shard": 2, "grad_accum": 4}
ZERO3 = {"sharding": "zero3"}
OLD = {"trl": "1.14.2"}
CPU = {"device": "cpu", "gpus": 1, "capability": None}


@dataclass(frozen=True)
class Case:
    rule: str
    bad: dict[str, Any]
    good: dict[str, Any]
    at: dict[str, Any] = field(default_factory=dict[str, Any])
    """Context of both."""
    bad_at: dict[str, Any] = field(default_factory=dict[str, Any])
    good_at: dict[str, Any] = field(default_factory=dict[str, Any])


def trl(**given: Any) -> dict[str, Any]:
    return {"job": {"trl": given}}


CASES = [
    # Shardings and sizes.
    Case("cpu-no-sharding", {**ONE, "sharding": "zero2"}, ONE, at=CPU),
    Case("none-is-one-gpu", {"sharding": "none"}, ONE),
    Case("ddp-only-replicates", {**ONE, "sharding": "ddp"}, DDP),
    Case("ddp-only-replicates", {**DDP, "dp_replicate": 4, "dp_shard": 2}, DDP),
    Case("fsdp-one-group", {"dp_replicate": 2, "dp_shard": 4}, {"sharding": "hsdp", "dp_replicate": 2, "dp_shard": 4}),
    Case("fsdp-one-group", {"dp_shard": 1, "grad_accum": 8}, {"dp_shard": 2, "grad_accum": 4}),
    Case(
        "hsdp-releases",
        {"sharding": "hsdp", "dp_replicate": 2, "dp_shard": 4},
        {},
        at={"stack": {"accelerate": "1.9.0"}},
    ),
    Case("hsdp-two-dimensions", {"sharding": "hsdp"}, {"sharding": "hsdp", "dp_replicate": 4, "dp_shard": 2}),
    Case("zero-flat-world", {**ZERO3, "dp_replicate": 2, "dp_shard": 4}, ZERO3),
    Case("tp-not-offered", {"tp": 2, "dp_shard": 4, "grad_accum": 2}, {"dp_shard": 4, "grad_accum": 2}),
    Case("sizes-fit-machine", {}, {"dp_shard": 4, "grad_accum": 2}, at={"gpus": 4}),
    Case(
        "whole-nodes",
        {"dp_shard": 12, "grad_accum": 4},
        {"dp_shard": 16, "grad_accum": 3},
        at={"job": {"nodes": 2, "global_batch": 48}},
    ),
    Case("fsdp2-releases", {}, {}, bad_at={"stack": {"torch": "2.5.1"}}, good_at={"stack": {"torch": "2.6.0"}}),
    Case(
        "fsdp1-older-stacks",
        {"sharding": "fsdp1"},
        {"sharding": "fsdp1"},
        good_at={"stack": {"torch": "2.4.0", "transformers": "4.56.2"}},
    ),
    Case(
        "fsdp2-tied-embeddings",
        {},
        {},
        at={"model": "tied"},
        bad_at={"stack": {"accelerate": "1.14.0"}},
        good_at={"stack": {"accelerate": "1.15.0"}},
    ),
    Case(
        "fsdp2-tied-embeddings",
        {},
        {},
        at={"model": "tied"},
        bad_at={"stack": {"accelerate": "1.14.0"}},
        good_at={"stack": {"accelerate": "1.14.0", "torch": "2.12.1"}},
    ),
    Case("zero-needs-deepspeed", ZERO3, ZERO3, bad_at={"stack": {"deepspeed": None}}),
    Case("save-only-model-best", {}, DDP, at=trl(save_only_model=True, load_best_model_at_end=True)),
    Case("zero3-auto-batch", ZERO3, {"sharding": "zero2"}, at=trl(auto_find_batch_size=True)),
    # Context parallelism.
    Case("cp-or-sp", {"cp": 2, "sp": 2, "dp_shard": 2, "grad_accum": 4}, {"cp": 2, "dp_shard": 4, "grad_accum": 2}),
    Case(
        "cp-releases", CP, CP, bad_at={"stack": {"accelerate": "1.12.0"}}, good_at={"stack": {"accelerate": "1.14.0"}}
    ),
    Case(
        "cp-releases", CP, CP, bad_at={"stack": {"accelerate": "1.10.1"}}, good_at={"stack": {"accelerate": "1.11.0"}}
    ),
    Case("cp-needs-fsdp2", {**CP, **ZERO3}, CP),
    Case(
        "cp-not-pure-replicas",
        {"sharding": "hsdp", "cp": 4, "dp_replicate": 2, "dp_shard": 1, "grad_accum": 4},
        {"sharding": "hsdp", "cp": 2, "dp_replicate": 2, "dp_shard": 2, "grad_accum": 2},
    ),
    Case("cp-needs-sdpa", {**CP, "attention": "flash_attention_2"}, {"attention": "flash_attention_2"}),
    Case("cp-full-attention", CP, CP, bad_at={"model": "gemma3"}, good_at={"model": "qwen3"}),
    Case("cp-full-attention", CP, {}, at={"model": "next"}),
    Case("cp-no-packing", {**CP, "packing": True}, CP),
    Case("cp-no-packing", CP, CP, bad_at=trl(eval_packing=True)),
    Case("cp-no-packing", CP, CP, bad_at=trl(padding_free=True)),
    Case("cp-sft-only", CP, CP, bad_at={"job": {"trainer": "dpo"}}),
    Case("cp-sft-only", CP, {}, at={"job": {"trainer": "grpo"}}),
    Case("cp-two-chunks", CP, CP, bad_at=trl(pad_to_multiple_of=12), good_at=trl(pad_to_multiple_of=16)),
    Case("cp-two-chunks", {"cp": 8, "dp_shard": 1, "grad_accum": 8}, CP, at={"job": {"seq_len": 12}}),
    # Sequence parallelism.
    Case("sp-releases", SP, SP, bad_at={"stack": {"deepspeed": "0.18.1"}}, good_at={"stack": {"deepspeed": "0.18.2"}}),
    Case(
        "sp-releases",
        {**SP, "loss_path": "full_logits"},
        {**SP, "loss_path": "full_logits"},
        bad_at={"stack": {"trl": "1.10.0"}},
        good_at={"stack": {"trl": "1.11.0"}},
    ),
    Case("sp-needs-zero", {**SP, "sharding": "fsdp"}, SP),
    Case("sp-divides-heads", {**SP, "sp": 5, "dp_shard": 1, "grad_accum": 8}, SP),
    Case(
        "sp-divides-heads",
        {**SP, "sp": 3, "dp_shard": 2, "grad_accum": 4},
        {**SP, "sp": 2, "dp_shard": 4, "grad_accum": 2},
    ),
    Case(
        "sp-divides-heads",
        {**SP, "sp": 3, "dp_shard": 1, "grad_accum": 8},
        {**SP, "sp": 8, "dp_shard": 1, "grad_accum": 8},
        at={"model": "odd"},
    ),
    Case(
        "sp-divides-heads",
        {**SP, "sp": 3, "dp_shard": 1, "grad_accum": 8},
        {**SP, "sp": 16, "dp_shard": 1, "grad_accum": 8},
        at={"gpus": 16},
    ),
    Case("sp-uniform-heads", SP, SP, bad_at={"model": "mla"}),
    Case("sp-no-recurrence", SP, SP, bad_at={"model": "next"}),
    Case("sp-attention", {**SP, "attention": "eager"}, {**SP, "attention": "flash_attention_2"}),
    Case("sp-no-bfd-packing", {**SP, "packing": True}, SP),
    Case(
        "sp-no-bfd-packing", {**SP, "packing": True}, {**SP, "packing": True}, good_at=trl(packing_strategy="wrapped")
    ),
    Case("sp-no-bfd-packing", SP, SP, bad_at=trl(padding_free=True, max_length=None)),
    Case("sp-sft-only", SP, SP, bad_at={"job": {"trainer": "reward"}}),
    Case("sp-plain-loss", SP, ZERO3, at=trl(loss_type="dft")),
    Case("sp-plain-loss", SP, SP, bad_at=trl(label_smoothing_factor=0.1), good_at=trl(label_smoothing_factor=0.0)),
    Case("sp-even-shards", SP, SP, bad_at=trl(pad_to_multiple_of=6), good_at=trl(pad_to_multiple_of=8)),
    Case(
        "sp-even-shards", {**SP, "sp": 16, "dp_shard": 1, "grad_accum": 8}, SP, at={"gpus": 16, "job": {"seq_len": 12}}
    ),
    # Batches.
    Case("batch-product", {"grad_accum": 3}, {"dp_shard": 4, "micro_batch": 2}),
    Case("kto-pairs", {}, {"dp_shard": 4, "micro_batch": 2}, at={"job": {"trainer": "kto"}}),
    Case(
        "kto-pairs",
        {},
        {},
        bad_at={"job": {"trainer": "kto"}},
        good_at={"job": {"trainer": "kto", "trl": {"loss_type": "apo_zero_unpaired"}}},
    ),
    # Loss paths.
    Case("loss-path-in-release", {"loss_path": "full_logits"}, {}),
    Case(
        "loss-path-in-release", {"loss_path": "chunked"}, {"loss_path": "chunked_fp32"}, at={"stack": {"trl": "1.12.0"}}
    ),
    Case(
        "loss-path-in-release",
        {"loss_path": "chunked"},
        {"loss_path": "full_logits"},
        at={"stack": OLD, "job": {"trainer": "dpo"}},
    ),
    Case(
        "liger-package",
        {"loss_path": "liger"},
        {"loss_path": "liger"},
        at={"stack": OLD},
        good_at={"stack": {**OLD, "liger-kernel": "0.8.2"}},
    ),
    Case(
        "liger-package",
        {"loss_path": "liger"},
        {"loss_path": "liger"},
        bad_at={"stack": {**OLD, "liger-kernel": "0.8.0"}},
        good_at={"stack": {"trl": "1.12.0", "liger-kernel": "0.8.0"}},
    ),
    Case(
        "liger-on-cpu",
        {**ONE, "loss_path": "liger"},
        {**ONE, "loss_path": "chunked"},
        at={**CPU, "stack": {**OLD, "liger-kernel": "0.8.2"}},
    ),
    Case(
        "liger-precomputed-reference",
        {"loss_path": "liger"},
        {"loss_path": "liger"},
        bad_at={
            "stack": {"trl": "1.13.0", "liger-kernel": "0.8.2"},
            "job": {"trainer": "dpo", "trl": {"precompute_ref_log_probs": True}},
        },
        good_at={
            "stack": {"trl": "1.14.0", "liger-kernel": "0.8.2"},
            "job": {"trainer": "dpo", "trl": {"precompute_ref_log_probs": True}},
        },
    ),
    Case(
        "liger-precomputed-reference",
        {"loss_path": "liger"},
        {"loss_path": "full_logits"},
        at={
            "stack": {"trl": "1.13.0", "liger-kernel": "0.8.2"},
            "job": {"trainer": "kto", "trl": {"precompute_ref_log_probs": True, "loss_type": "apo_zero_unpaired"}},
        },
    ),
    Case(
        "loss-asked-by-hand",
        {"loss_path": "chunked"},
        {"loss_path": "full_logits"},
        at={"stack": OLD, **trl(loss_type="nll")},
    ),
    Case(
        "loss-asked-by-hand",
        {"loss_path": "full_logits"},
        {"loss_path": "chunked"},
        at={"stack": OLD, **trl(loss_type="chunked_nll")},
    ),
    Case(
        "loss-asked-by-hand",
        {"loss_path": "chunked"},
        {"loss_path": "full_logits"},
        at={"stack": OLD, **trl(loss_type="dft")},
    ),
    Case(
        "loss-asked-by-hand",
        {"loss_path": "chunked"},
        {"loss_path": "liger"},
        at={"stack": {**OLD, "liger-kernel": "0.8.2"}, **trl(use_liger_kernel=True)},
    ),
    Case(
        "chunked-sharded-head",
        {"loss_path": "chunked_fp32"},
        {"loss_path": "chunked_fp32"},
        bad_at={"stack": {"trl": "1.6.0"}},
        good_at={"stack": {"trl": "1.7.0"}},
    ),
    Case(
        "chunked-sharded-head",
        {"loss_path": "chunked_fp32"},
        {**DDP, "loss_path": "chunked_fp32"},
        at={"stack": {"trl": "1.6.0"}},
    ),
    Case(
        "head-adapter-skipped",
        {"method": "lora"},
        {"method": "full"},
        at={"job": {"lora": {"target_modules": ["q_proj", "lm_head"]}}},
    ),
    Case(
        "head-adapter-skipped",
        {"method": "lora", "loss_path": "chunked"},
        {"method": "lora", "loss_path": "full_logits"},
        at={"stack": OLD, "job": {"method": "lora", "lora": {"target_modules": ["lm_head"]}}},
    ),
    Case(
        "head-adapter-skipped",
        {"method": "lora", "loss_path": "chunked"},
        {"method": "lora", "loss_path": "liger"},
        at={"stack": {**OLD, "liger-kernel": "0.8.2"}, "job": {"lora": {"target_modules": ["lm_head"]}}},
    ),
    # Recompute.
    Case("model-recomputes", {}, {"recompute": "none"}, at={"model": "jetmoe"}),
    Case(
        "every-n-releases",
        {"recompute": "every_2"},
        {"recompute": "every_2"},
        bad_at={"stack": {"transformers": "5.15.0"}},
        good_at={"stack": {"transformers": "5.16.0"}},
    ),
    Case("every-n-trainers", {"recompute": "every_3"}, {}, at={"job": {"trainer": "dpo"}}),
    Case(
        "every-n-trainers",
        {"recompute": "every_3"},
        {"recompute": "every_3"},
        bad_at={"job": {"trainer": "dpo"}},
        good_at={"job": {"trainer": "dpo", "trl": {"precompute_ref_log_probs": True}}},
    ),
    Case(
        "every-n-trainers",
        {"recompute": "every_4"},
        {"recompute": "every_4"},
        bad_at={"job": {"trainer": "grpo"}},
        good_at={"job": {"trainer": "reward"}},
    ),
    Case(
        "selective-releases",
        {"recompute": "selective", "loss_path": "chunked"},
        {"loss_path": "chunked"},
        at={"stack": OLD},
    ),
    Case(
        "selective-sft-only",
        {"recompute": "selective"},
        {"recompute": "selective"},
        bad_at={"job": {"trainer": "reward"}},
    ),
    Case(
        "selective-not-reentrant",
        {"recompute": "selective"},
        {},
        at=trl(gradient_checkpointing_kwargs={"use_reentrant": True}),
    ),
    Case(
        "selective-not-reentrant",
        {"recompute": "selective"},
        {"recompute": "selective"},
        bad_at=trl(activation_checkpointing_kwargs={"use_reentrant": True}),
        good_at=trl(activation_checkpointing_kwargs={"use_reentrant": False}),
    ),
    Case(
        "selective-no-adapter-zero3",
        {**ZERO3, "recompute": "selective", "method": "lora"},
        {"sharding": "zero2", "recompute": "selective", "method": "lora"},
    ),
    Case("selective-needs-kernel", {"recompute": "selective", "attention": "eager"}, {"recompute": "selective"}),
    # Offload.
    Case("offload-needs-gpu", {**ONE, "offload": ["activations"]}, ONE, at=CPU),
    Case(
        "offload-activations-releases",
        {"offload": ["activations"]},
        {"offload": ["activations"]},
        bad_at={"stack": {"transformers": "5.16.0"}},
        good_at={"stack": {"transformers": "5.17.0"}},
    ),
    Case(
        "offload-activations-full", {"offload": ["activations"], "recompute": "selective"}, {"offload": ["activations"]}
    ),
    Case("offload-activations-full", {"offload": ["activations"], "recompute": "none"}, {"offload": ["activations"]}),
    Case(
        "offload-activations-trainers",
        {"offload": ["activations"]},
        {},
        at={"job": {"trainer": "kto", "trl": {"loss_type": "apo_zero_unpaired"}}},
    ),
    Case(
        "offload-optimizer-engine", {**DDP, "offload": ["optimizer"]}, {"sharding": "zero2", "offload": ["optimizer"]}
    ),
    Case("offload-optimizer-engine", {"offload": ["optimizer"]}, {"offload": ["optimizer", "params"]}),
    Case("offload-params-engine", {"sharding": "zero2", "offload": ["params"]}, {**ZERO3, "offload": ["params"]}),
    Case("offload-params-engine", {"offload": ["params"]}, {"offload": ["optimizer", "params"]}),
    Case(
        "offload-params-reshard",
        {"sharding": "fsdp_no_reshard", "offload": ["optimizer", "params"]},
        {"offload": ["optimizer", "params"]},
    ),
    Case(
        "offload-optimizer-rule",
        {**ZERO3, "offload": ["optimizer"], "optimizer": "adamw_bnb_8bit"},
        {**ZERO3, "offload": ["optimizer"], "optimizer": "adamw_torch"},
    ),
    Case(
        "offload-activations-trainers",
        {"sharding": "zero2", "offload": ["activations", "optimizer"]},
        {"sharding": "zero2", "offload": ["optimizer"]},
        at={"job": {"trainer": "dpo"}},
    ),
    Case(
        "offload-activations-releases",
        {"sharding": "zero2", "offload": ["activations", "optimizer"]},
        {"sharding": "zero2", "offload": ["optimizer"]},
        at={"stack": {"transformers": "5.16.0"}},
    ),
    # Attention.
    Case(
        "flash-package",
        {"attention": "flash_attention_2"},
        {"attention": "flash_attention_2"},
        bad_at={"stack": {"flash-attn": None}},
        good_at={"stack": {"flash-attn": None, "kernels": "0.18.3"}},
    ),
    Case(
        "flash-card",
        {"attention": "flash_attention_2", "mixed_precision": "fp16"},
        {"mixed_precision": "fp16"},
        at={"capability": "7.5"},
    ),
    Case("flash-card", {**ONE, "attention": "flash_attention_2"}, ONE, at=CPU),
    Case("flash-model", {"attention": "flash_attention_2"}, {}, at={"model": "llama4"}),
    Case("flash-sinks", {"attention": "flash_attention_2"}, {"attention": "eager"}, at={"model": "gpt_oss"}),
    Case("flash-head-dim", {"attention": "flash_attention_2"}, {}, at={"model": "wide"}),
    Case(
        "flash-half-precision",
        {"attention": "flash_attention_2", "mixed_precision": "no"},
        {"attention": "flash_attention_2", "mixed_precision": "no", "weights": "bf16"},
    ),
    Case("sdpa-model", {}, {"attention": "eager"}, at={"model": "gemma2"}),
    Case("sdpa-model", {}, {"attention": "flash_attention_2"}, at={"model": "gemma2"}),
    Case("sdpa-model", {}, {"attention": "eager"}, at={"model": "gpt_oss"}),
    Case("sdpa-model", {}, {"attention": "eager"}, at={"model": "bloom"}),
    # Precision.
    Case("bf16-card", {}, {"mixed_precision": "fp16"}, at={"capability": "7.0"}),
    Case(
        "bf16-card",
        {"weights": "bf16", "mixed_precision": "no"},
        {"weights": "bf16", "mixed_precision": "no"},
        bad_at={"capability": "7.5"},
        good_at={"capability": "8.0"},
    ),
    Case("fp16-on-cpu", {**ONE, "mixed_precision": "fp16"}, {**ONE, "mixed_precision": "bf16"}, at=CPU),
    Case("fp16-weights-mixed", {"weights": "fp16"}, {"weights": "bf16"}),
    Case("fp16-weights-mixed", {"weights": "bf16", "mixed_precision": "fp16"}, {"mixed_precision": "fp16"}),
    Case(
        "fp16-trained-weights",
        {**DDP, "weights": "fp16", "mixed_precision": "fp16"},
        {"weights": "fp16", "mixed_precision": "fp16"},
    ),
    Case(
        "fp16-trained-weights",
        {"weights": "fp16", "mixed_precision": "no"},
        {**DDP, "weights": "fp16", "mixed_precision": "fp16", "method": "lora"},
    ),
    Case(
        "fp16-bf16-adapters",
        {**DDP, "method": "qlora", "weights": "fp16", "mixed_precision": "fp16"},
        {**DDP, "method": "qlora", "weights": "fp16", "mixed_precision": "no"},
    ),
    Case("zero-one-dtype", {**ZERO3, "weights": "bf16", "mixed_precision": "no"}, {**ZERO3, "weights": "bf16"}),
    Case(
        "fsdp2-upcast-lost",
        {"weights": "bf16"},
        {"weights": "bf16"},
        bad_at={"stack": {"accelerate": "1.13.0"}},
        good_at={"stack": {"accelerate": "1.14.0"}},
    ),
    Case("fsdp2-upcast-lost", {"weights": "bf16"}, {"weights": "fp32"}, at={"stack": {"accelerate": "1.13.0"}}),
    Case("stacked-experts-fp32", ONE, {**ONE, "weights": "bf16"}, at={"model": "moe"}),
    Case("stacked-experts-fp32", DDP, {}, at={"model": "moe"}),
    Case("stacked-experts-fp32", ONE, ONE, bad_at={"model": "moe"}, good_at={"model": "moe", **CPU}),
    # Optimizers.
    Case("optimizer-known", {"optimizer": "adamw_magic"}, {"optimizer": "adafactor"}),
    Case("optimizer-known", {"optimizer": "adamw_torch_npu_fused"}, {"optimizer": "adamw_torch"}),
    Case(
        "optimizer-package",
        {**DDP, "optimizer": "adamw_bnb_8bit"},
        {**DDP, "optimizer": "adamw_bnb_8bit"},
        bad_at={"stack": {"bitsandbytes": None}},
    ),
    Case("optimizer-needs-gpu", {**ONE, "optimizer": "paged_adamw_8bit"}, {**ONE, "optimizer": "adamw_torch"}, at=CPU),
    Case("fused-adamw-cpu", ONE, {**ONE, "optimizer": "adamw_torch"}, at={**CPU, "stack": {"torch": "2.3.1"}}),
    Case("bitsandbytes-dtensor", {"optimizer": "adamw_bnb_8bit"}, {"sharding": "zero2", "optimizer": "adamw_bnb_8bit"}),
    Case(
        "low-rank-whole-matrices",
        {"optimizer": "galore_adamw"},
        {**DDP, "optimizer": "galore_adamw"},
        at={"stack": {"galore-torch": "1.0"}, **trl(optim_target_modules="all-linear")},
    ),
    Case(
        "low-rank-whole-matrices",
        {**DDP, "optimizer": "apollo_adamw"},
        {**DDP, "optimizer": "apollo_adamw"},
        at={"stack": {"apollo-torch": "1.0"}},
        good_at=trl(optim_target_modules=["q_proj"]),
    ),
    Case(
        "layerwise-one-step",
        {**DDP, "optimizer": "galore_adamw_layerwise"},
        {**ONE, "grad_accum": 1, "micro_batch": 8, "optimizer": "galore_adamw_layerwise"},
        at={"stack": {"galore-torch": "1.0"}, **trl(optim_target_modules="all-linear")},
    ),
    Case(
        "layerwise-one-step",
        {**ONE, "optimizer": "galore_adamw_layerwise"},
        {**ONE, "grad_accum": 1, "micro_batch": 8, "optimizer": "galore_adamw_layerwise"},
        at={"stack": {"galore-torch": "1.0"}, **trl(optim_target_modules="all-linear")},
    ),
    # Adapters.
    Case("adapter-needs-peft", {"method": "lora"}, {"method": "lora"}, bad_at={"stack": {"peft": None}}),
    Case(
        "qlora-needs-bitsandbytes",
        {"method": "qlora"},
        {"method": "qlora"},
        bad_at={"stack": {"bitsandbytes": "0.45.0"}},
        good_at={"stack": {"bitsandbytes": "0.46.1"}},
    ),
    Case("qlora-needs-bitsandbytes", {"method": "qlora"}, {"method": "lora"}, at={"stack": {"bitsandbytes": None}}),
    Case("qlora-needs-gpu", {**ONE, "method": "qlora"}, {**ONE, "method": "lora"}, at=CPU),
    Case(
        "int8-not-sharded",
        {**ZERO3, "method": "qlora"},
        {"sharding": "zero2", "method": "qlora"},
        at={"job": {"quantization": "int8"}},
    ),
    Case(
        "int8-not-sharded",
        {"method": "qlora"},
        {"method": "qlora"},
        bad_at={"job": {"quantization": "int8"}},
        good_at={"job": {"quantization": "nf4"}},
    ),
    Case("qlora-sharded-releases", {"method": "qlora"}, {**DDP, "method": "qlora"}, at={"stack": {"peft": "0.9.0"}}),
]


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Contexts laid over each other; the job, its trl section and the stack are laid over key by key."""
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            out[key] = merged(out.get(key, {}), cast("dict[str, Any]", value)) if isinstance(value, dict) else value
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_refuses_and_its_neighbour_passes(case: Case) -> None:
    context = context_for(**merged(case.at, case.bad_at))
    refused = all_refusals(context, choice(**case.bad))
    assert case.rule in {refusal.rule for refusal in refused}
    assert first_refusal(context, choice(**case.bad)) in refused
    assert all_refusals(context_for(**merged(case.at, case.good_at)), choice(**case.good)) == ()


@dataclass(frozen=True)
class JobCase:
    rule: str
    bad: dict[str, Any]
    good: dict[str, Any]


def asked(trainer: str = "sft", /, **given: Any) -> dict[str, Any]:
    job = {key[1:]: given.pop(key) for key in [k for k in given if k.startswith("_")]}
    return {"job": {"trainer": trainer, "trl": given, **job}}


JOB_CASES = [
    JobCase(
        "head-adapter",
        asked(_method="lora", _lora={"target_modules": ["lm_head"]}),
        asked(_method="lora", _lora={"target_modules": "all-linear"}),
    ),
    JobCase(
        "head-adapter",
        asked("dpo", _method="lora", _lora={"target_modules": ["model.lm_head"]}),
        asked("reward", _method="lora", _lora={"target_modules": ["lm_head"]}),
    ),
    JobCase("unknown-loss-type", asked(loss_type="focal"), asked(loss_type="dft")),
    JobCase(
        "unknown-loss-type",
        {**asked(loss_type="nll"), "stack": {"trl": "0.22.2"}},
        {**asked(loss_type="nll"), "stack": {"trl": "0.23.0"}},
    ),
    JobCase(
        "unknown-loss-type",
        {**asked(loss_type="chunked_nll"), "stack": {"trl": "1.3.0"}},
        asked(loss_type="chunked_nll"),
    ),
    JobCase(
        "liger-fused-loss",
        asked(liger_kernel_config={"fused_linear_cross_entropy": True}),
        asked(liger_kernel_config={"rope": True}),
    ),
    JobCase(
        "full-logits-at-length",
        asked(label_smoothing_factor=0.1, _seq_len=32_768),
        asked(label_smoothing_factor=0.1, _seq_len=8192),
    ),
    JobCase("full-logits-at-length", asked(compute_metrics="accuracy", _seq_len=32_768), asked(_seq_len=32_768)),
    JobCase(
        "activation-offloading-config",
        asked("grpo", activation_offloading=True),
        asked("dpo", activation_offloading=True),
    ),
    JobCase(
        "activation-offloading-cpu", {**asked(activation_offloading=True), **CPU}, asked(activation_offloading=True)
    ),
    JobCase(
        "sync-reference-adapter", asked("dpo", sync_ref_model=True, _method="lora"), asked("dpo", sync_ref_model=True)
    ),
    JobCase(
        "rope-keys",
        asked(model_init_kwargs={"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        asked(model_init_kwargs={"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}),
    ),
    JobCase(
        "rope-keys",
        asked(model_init_kwargs={"rope_parameters": {"factor": 4.0, "rope_theta": 1e6}}),
        asked(model_init_kwargs={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ),
    JobCase("packing-sft-only", asked("dpo", _data={"packing": True}), asked(_data={"packing": True})),
    JobCase("packing-needs-length", asked(max_length=None, _data={"packing": True}), asked(_data={"packing": True})),
    JobCase("padding-free-length", asked(padding_free=True), asked(padding_free=True, max_length=None)),
    JobCase("padding-free-length", asked(padding_free=True), asked(padding_free=True, _data={"packing": True})),
    JobCase("online-auto-batch", asked("rloo", auto_find_batch_size=True), asked("dpo", auto_find_batch_size=True)),
    JobCase("online-generations", asked("grpo", num_generations=1), asked("grpo", num_generations=2)),
    JobCase("online-groups", asked("grpo", _global_batch=12), asked("grpo", _global_batch=16)),
    JobCase("online-groups", asked("rloo", _global_batch=3), asked("rloo", _global_batch=3, steps_per_generation=2)),
    JobCase("kto-one-row", asked("kto", _global_batch=1), asked("kto", _global_batch=2)),
    JobCase(
        "sync-precomputed-reference",
        asked("dpo", sync_ref_model=True, precompute_ref_log_probs=True),
        asked("dpo", precompute_ref_log_probs=True),
    ),
    JobCase("launcher-arguments", asked(deepspeed="zero3.json"), asked(deepspeed=None)),
]


@pytest.mark.parametrize("case", JOB_CASES, ids=lambda case: case.rule)
def test_job_rule_refuses_and_its_neighbour_passes(case: JobCase) -> None:
    assert case.rule in {refusal.rule for refusal in job_refusals(context_for(**case.bad))}
    assert job_refusals(context_for(**case.good)) == ()


LONG = {"job": {"seq_len": 16_384}}
WARNING_CASES = [
    Case("zero-one-gpu", {**ONE, **ZERO3}, {**ONE, **ZERO3, "offload": ["optimizer"]}),
    Case("fsdp2-rounds-logps", {}, ZERO3, at={"job": {"trainer": "dpo"}}),
    Case("fsdp2-rounds-logps", {}, {"mixed_precision": "no"}, at={"job": {"trainer": "grpo"}}),
    Case("cp-causal-only", CP, {}, at={"model": "vision"}),
    Case(
        "activation-offloading-selective",
        {"recompute": "selective"},
        {},
        at=trl(activation_offloading=True),
    ),
    Case(
        "vllm-on-the-same-cards",
        ZERO3,
        ZERO3,
        bad_at={"job": {"trainer": "grpo", "trl": {"use_vllm": True}}},
        good_at={"job": {"trainer": "grpo", "trl": {"use_vllm": True, "vllm_mode": "server"}}},
    ),
    Case("sp-equal-lengths", SP, {**SP, "packing": True}),
    Case("extra-logits-pass", {}, {}, bad_at=trl(label_smoothing_factor=0.1)),
    Case(
        "fp32-head-copies",
        {"loss_path": "chunked_fp32"},
        {"loss_path": "chunked"},
        bad_at={"stack": {"trl": "1.12.0"}},
        good_at={"stack": {"trl": "1.13.0"}},
    ),
    Case("full-logits-by-release", {"loss_path": "full_logits"}, {"loss_path": "chunked"}, at={"stack": OLD}),
    Case(
        "fp32-head-copies",
        {"loss_path": "chunked_fp32"},
        {"loss_path": "liger"},
        at={"stack": {"trl": "1.12.0", "liger-kernel": "0.8.2"}},
    ),
    Case("eager-scores", {"attention": "eager"}, {}),
    Case("packing-mask", {"packing": True}, {"packing": True, "attention": "flash_attention_2"}, at=LONG),
    Case("packing-mask", {"packing": True}, {"packing": True}, bad_at=LONG),
    Case("padding-mask", {"micro_batch": 2}, {}, at=LONG),
    Case("padding-mask", {**ZERO3}, {**ZERO3}, bad_at={"job": {"seq_len": 16_384, "trainer": "reward"}}, good_at=LONG),
    Case("fp32-frozen-base", {"method": "lora"}, {"method": "lora", "weights": "bf16"}),
    Case(
        "fsdp2-upcasts-base",
        {"method": "lora", "weights": "bf16"},
        {"method": "lora", "weights": "bf16"},
        bad_at={"stack": {"accelerate": "1.12.0"}},
    ),
    Case(
        "zero3-quantised-load",
        {**ZERO3, "method": "qlora", "weights": "bf16"},
        {"sharding": "zero2", "method": "qlora", "weights": "bf16"},
    ),
    Case("packing-images", {"packing": True}, {}, at={"model": "vision"}),
    Case(
        "beyond-positions",
        {},
        {},
        at={"model": "short", "job": {"seq_len": 163_840}},
        good_at=trl(model_init_kwargs={"rope_parameters": {"rope_type": "yarn"}}),
    ),
    Case("beyond-positions", {}, {}, bad_at={"model": "scaled", "job": {"seq_len": 262_144}}),
    Case("beyond-positions", {}, {}, bad_at={"model": "gemma3", "job": {"seq_len": 65_536}}),
    Case(
        "fsdp2-upcasts-base",
        {"method": "lora", "weights": "bf16"},
        {"method": "full", "weights": "bf16"},
        at={"stack": {"accelerate": "1.12.0"}},
    ),
    Case("trl-floor", {}, {}, bad_at={"stack": {"transformers": "4.55.0"}}),
    Case("unread-release", {}, {}, bad_at={"stack": {"trl": "1.40.0"}}),
    Case("unread-release", {"loss_path": "full_logits"}, {}, bad_at={"stack": {"trl": "0.11.4"}}),
]


@pytest.mark.parametrize("case", WARNING_CASES, ids=lambda case: case.rule)
def test_warning_speaks_only_where_it_should(case: Case) -> None:
    [rule] = [rule for rule in WARNINGS if rule.id == case.rule]
    said = warnings_for(context_for(**merged(case.at, case.bad_at)), choice(**case.bad))
    bad = rule.check(context_for(**merged(case.at, case.bad_at)), choice(**case.bad))
    assert bad is not None
    assert bad in said
    assert warnings_for(context_for(**merged(case.at, case.good_at)), choice(**case.good)) == ()


def test_every_rule_has_a_case() -> None:
    routes = {rule.id for rule in RULES if rule.check.__module__ == "planner.rules.routes"}  # test_routes.py has theirs
    assert {rule.id for rule in RULES} - routes == {case.rule for case in CASES}
    assert {rule.id for rule in JOB_RULES} == {case.rule for case in JOB_CASES}
    assert {rule.id for rule in WARNINGS} == {case.rule for case in WARNING_CASES}


def test_rules_are_told_apart_and_explained() -> None:
    rules: list[Rule | JobRule] = [*RULES, *JOB_RULES, *WARNINGS]
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert all((rule.refuses, rule.why, rule.versions, rule.source)), rule.id


def test_reasons_are_one_line_without_a_full_stop() -> None:
    reasons = [
        refusal.reason
        for case in CASES
        for refusal in all_refusals(context_for(**merged(case.at, case.bad_at)), choice(**case.bad))
    ]
    reasons += [refusal.reason for case in JOB_CASES for refusal in job_refusals(context_for(**case.bad))]
    for reason in reasons:
        assert "\n" not in reason
        assert not reason.endswith((".", "!"))


def test_reasons_carry_the_numbers() -> None:
    [refusal] = all_refusals(context_for(), choice(grad_accum=3))
    assert refusal.reason == "micro_batch 1 x grad_accum 3 x 8 data-parallel ranks is 24, not global_batch 8"
    old = context_for(stack={"transformers": "5.15.0"})
    [refusal] = all_refusals(old, choice(recompute="every_2"))
    assert refusal.reason == "recompute every_2 needs transformers >= 5.16.0, the stack has 5.15.0"
    # 12 bytes x 32,768 tokens x 151,936 words = 59,743,666,176 bytes = 55.6 GiB.
    [refusal] = job_refusals(context_for(**asked(label_smoothing_factor=0.1, _seq_len=32_768)))
    assert "55.6 GiB per sequence" in refusal.reason
    # 163,840 wanted over 40,960 trained positions.
    [warning] = warnings_for(context_for(model="short", job={"seq_len": 163_840}), choice())
    assert "factor 4" in warning
    # 151,936 x 4,096 x 4 bytes = 2,489,319,424 bytes = 2.3 GiB.
    [warning] = warnings_for(context_for(stack={"trl": "1.12.0"}), choice(loss_path="chunked_fp32"))
    assert "2.3 GiB" in warning


def test_published_long_context_runs_are_legal() -> None:
    """Runs that were really made with TRL 1.13, and one million tokens on 4 and 8 cards."""
    stack: dict[str, str | None] = {
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "trl": "1.13.0",
        "accelerate": "1.15.0",
    }
    runs = [
        (163_840, 1, ONE, 8),
        (262_144, 1, {**ONE, "offload": ["activations"]}, 8),
        (1_048_576, 4, {"cp": 4, "dp_shard": 1, "grad_accum": 8, "offload": ["activations"]}, 8),
        (1_048_576, 8, {"cp": 8, "dp_shard": 1, "grad_accum": 8, "offload": ["activations"]}, 8),
    ]
    for seq_len, gpus, sizes, batch in runs:
        context = context_for(stack=stack, gpus=gpus, job={"seq_len": seq_len, "global_batch": batch})
        assert job_refusals(context) == ()
        assert all_refusals(context, choice(weights="bf16", loss_path="chunked", **sizes)) == ()


def test_a_candidate_is_judged_in_microseconds() -> None:
    """A tenth of the pace that the book is built for (200,000 a second), so that a busy machine passes too."""
    context = context_for()
    candidates = [choice(), choice(**ZERO3), choice(**CP), choice(**DDP, recompute="selective")]
    begin = time.process_time()
    for _ in range(2500):
        for candidate in candidates:
            assert first_refusal(context, candidate) is None
    assert time.process_time() - begin < 0.5
