"""What the installed TRL, transformers and accelerate really say to what the rule book refuses.

Two child processes run every combination on tiny random models (10 to 15 seconds each on two cores).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planner.rules import JOB_RULES, RULES, WARNINGS
from profiles.releases import families, newest_known, optimizer_needs, trl_release
from tests.launcher.warm_python import warm_environment, warm_python

pytestmark = pytest.mark.stack

RULE_IDS = {known.id for known in (*RULES, *JOB_RULES, *WARNINGS)}
REFUSED = [
    # scenario, error, words of its message, rule that refuses it
    ("liger fused", "ValueError", "fused_linear_cross_entropy", "liger-fused-loss"),
    ("unknown loss_type", "ValueError", "Invalid `loss_type` focal", "unknown-loss-type"),
    ("selective reentrant", "ValueError", "requires non-reentrant gradient", "selective-not-reentrant"),
    ("lora on lm_head", "ValueError", "adapter to `lm_head` is not supported", "head-adapter"),
    ("dpo lora on lm_head", "ValueError", "adapter to `lm_head` is not supported", "head-adapter"),
    ("padding_free", "ValueError", "`max_length` is not enforced", "padding-free-length"),
    ("packing without length", "ValueError", "`max_length` can't be `None`", "packing-needs-length"),
    ("cp and sp", "ValueError", "are mutually exclusive", "cp-or-sp"),
    ("cp with replicas", "ValueError", "cannot be used with pure data parallelism", "cp-not-pure-replicas"),
    (
        "cp sliding",
        "ValueError",
        "does not support attention layers of type ['sliding_attention']",
        "cp-full-attention",
    ),
    ("sp linear", "ValueError", "does not support attention layers of type ['linear_attention']", "sp-no-recurrence"),
    ("sp eager", "ValueError", "'eager' and 'flex_attention' are not supported", "sp-attention"),
    ("grpo cp", "ValueError", "does not support sequence-dim parallelism", "cp-sft-only"),
    ("grpo auto batch", "ValueError", "auto_find_batch_size is not supported by GRPO", "online-auto-batch"),
    ("grpo one generation", "ValueError", "at least 2 generations", "online-generations"),
    ("grpo cut groups", "ValueError", "must be divisible by num_generations", "online-groups"),
    ("kto one row", "ValueError", "batch size must be > 1", "kto-pairs"),
    ("dpo sync precomputed", "ValueError", "`precompute_ref_log_probs=True`", "sync-precomputed-reference"),
    ("dpo sync adapter", "NotImplementedError", "while using a PEFT model", "sync-reference-adapter"),
    ("dpo every_n", "ValueError", "Unexpected keyword arguments: every_n_layers", "every-n-trainers"),
    ("kto every_n", "ValueError", "Unexpected keyword arguments: every_n_layers", "every-n-trainers"),
    ("gemma2 sdpa", "ValueError", "does not support an attention implementation", "sdpa-model"),
    ("gpt_oss sdpa", "ValueError", "does not support an attention implementation", "sdpa-model"),
    ("flash without package", "ImportError", "doesn't seem to be installed", "flash-package"),
    ("offload on cpu", "RuntimeError", "pin_memory", "offload-needs-gpu"),
    ("experts fp32 traced", "RuntimeError", "Expected inputs of BF16 type", "stacked-experts-fp32"),
]
REFUSED_IN_PARALLEL = [
    # The same of real_errors_parallel.py.
    ("mesh of another size", "ValueError", "does not match num_processes (8)", "sizes-fit-machine"),
    ("nothing to shard", "ValueError", "no dimension for FSDP to shard across", "fsdp-one-group"),
    ("nothing to shard", "ValueError", "no dimension for FSDP to shard across", "hsdp-two-dimensions"),
    ("cp without fsdp", "ValueError", "but no `fsdp_plugin` was provided", "cp-needs-fsdp2"),
    ("cp eager", "ValueError", "only with SDPA attention, you are using eager", "cp-needs-sdpa"),
    ("cp packing", "ValueError", "Packing is not compatible with context parallelism", "cp-no-packing"),
    ("cp eval_packing", "ValueError", "Packing is not compatible with context parallelism", "cp-no-packing"),
    ("cp mask", "ValueError", "only supports causal attention masks", "cp-causal-only"),
    ("sp other backend", "ValueError", "sp_backend must be one of ['deepspeed']", "sp-needs-zero"),
    ("sp dft", "ValueError", "are not supported with DeepSpeed sequence parallelism", "sp-plain-loss"),
    ("sp heads", "ValueError", "Attention head count 3 is not divisible by SP size 2", "sp-divides-heads"),
    ("sp kv heads", "ValueError", "KV attention head count 3 is not divisible by SP size 2", "sp-divides-heads"),
    ("sp packed", "IndexError", "tuple index out of range", "sp-no-bfd-packing"),
    ("sp odd length", "ValueError", "seqlen=5 isn't divisible by sp-size=2", "sp-even-shards"),
    ("tied in two groups", "ValueError", "already managed by another FSDP group", "fsdp2-tied-embeddings"),
    ("tp without plan", "NotImplementedError", "should undergo tensor parallel", "tp-not-offered"),
    ("n_gpu", "ValueError", "does not support `nn.DataParallel`", "none-is-one-gpu"),
    ("no deepspeed", "ImportError", "DeepSpeed is not installed", "zero-needs-deepspeed"),
    ("save best", "ValueError", "`save_only_model` along with `load_best_model_at_end`", "save-only-model-best"),
    ("zero3 auto batch", "ValueError", "isn't supported yet with DeepSpeed Zero-3", "zero3-auto-batch"),
    ("qlora without package", "ImportError", "requires bitsandbytes", "qlora-needs-bitsandbytes"),
    ("bnb without package", "ImportError", "need to install `bitsandbytes`", "optimizer-package"),
    ("unknown optimizer", "ValueError", "adamw_magic is not a valid OptimizerNames", "optimizer-known"),
    ("galore targets", "ValueError", "need to define `optim_target_modules`", "low-rank-whole-matrices"),
    ("layerwise ddp", "NotImplementedError", "does not support DDP", "layerwise-one-step"),
    ("layerwise accumulation", "ValueError", "does not support gradient accumulation", "layerwise-one-step"),
    ("no recompute", "ValueError", "does not support activation checkpointing", "model-recomputes"),
    ("dpo selective", "ValueError", "Unexpected keyword arguments: selective", "selective-sft-only"),
    ("dpo packing", "TypeError", "unexpected keyword argument 'packing'", "packing-sft-only"),
    (
        "grpo activation_offloading",
        "TypeError",
        "unexpected keyword argument 'activation_offloading'",
        "activation-offloading-config",
    ),
    ("activation_offloading on cpu", "AttributeError", "'NoneType' object", "activation-offloading-cpu"),
    ("fp16 gradients", "ValueError", "Attempting to unscale FP16 gradients", "fp16-trained-weights"),
    ("yarn without theta", "TypeError", "'NoneType' and 'Tensor'", "rope-keys"),
    ("yarn without factor", "KeyError", "factor", "rope-keys"),
    ("no peft", "ImportError", "`peft` library is not installed", "adapter-needs-peft"),
    ("bloom flash", "ValueError", "does not support Flash Attention 2", "flash-model"),
    ("bloom sdpa", "ValueError", "does not support an attention implementation", "sdpa-model"),
    ("gpt_oss flash", "ImportError", "`kernels` is either not installed", "flash-sinks"),
    ("kto one row", "ValueError", "batch size must be > 1", "kto-one-row"),
    ("lora on lm_head", "ValueError", "adapter to `lm_head` is not supported", "head-adapter-skipped"),
]
WRITTEN_OTHERWISE = [
    # Combinations that a written run never holds: the writer sets these arguments itself.
    ("selective without recompute", "requires `gradient_checkpointing=True`"),
    ("fsdp2 forward_prefetch", "forward_prefetch is not yet implemented in FSDP2"),
    ("fsdp2 offload without recompute", "requires `activation_checkpointing=True`"),
    ("fsdp checkpoints twice", "can't both be set to True"),
]
ACCEPTED = {
    "selective": "SFTTrainer",
    "lora": "SFTTrainer",
    "cp": 2,
    "cp full": None,
    "sp full": None,
    "sp sdpa": None,
    "gemma2 eager": "Gemma2ForCausalLM",
    "dpo every_n precomputed": 2,
    "kto every_n precomputed": 2,
    "reward every_n": 2,
    "experts fp32": {"finite": True},
    "mesh": None,
    "sp heads that divide": "UlyssesSPAttentionHF",
    "sp batch": None,
    "yarn": None,
}
"""Neighbours that the book lets pass, and what they answer (steps made, classes built)."""


ELSEWHERE = {
    "cp-two-chunks": "two processes die in a collective without a message",
    "sp-uniform-heads": "an assertion inside the exchange of a forward pass, which needs two ranks that answer",
    "chunked-sharded-head": "only slow, or wrong kinds of tensors, in releases that are not installed here",
}
OLDER = "holds for releases that are not installed here"
CUDA = "needs a CUDA device, or a package of CUDA kernels"
SILENT = "the library raises nothing: the run is another one than was asked for, or trains wrong"
OURS = "no library is asked: sizes or settings of a plan that contradict each other"
NOT_SHOWN = {
    **ELSEWHERE,
    **dict.fromkeys(
        (
            "fsdp2-releases", "hsdp-releases", "cp-releases", "sp-releases", "every-n-releases", "selective-releases",
            "offload-activations-releases", "loss-path-in-release", "liger-package", "liger-on-cpu",
            "liger-precomputed-reference", "loss-asked-by-hand", "fsdp2-upcast-lost", "fused-adamw-cpu",
            "qlora-sharded-releases",
        ),
        OLDER,
    ),
    **dict.fromkeys(
        (
            "flash-card", "flash-head-dim", "flash-half-precision", "bf16-card", "fp16-bf16-adapters",
            "bitsandbytes-dtensor", "int8-not-sharded", "qlora-needs-gpu", "optimizer-needs-gpu",
            "offload-activations-trainers", "selective-no-adapter-zero3",
        ),
        CUDA,
    ),
    **dict.fromkeys(
        (
            "cpu-no-sharding", "zero-flat-world", "sp-sft-only", "selective-needs-kernel", "fp16-on-cpu",
            "fp16-weights-mixed", "zero-one-dtype", "offload-activations-full", "offload-optimizer-engine",
            "offload-params-engine", "offload-params-reshard", "offload-optimizer-rule", "full-logits-at-length",
        ),
        SILENT,
    ),
    **dict.fromkeys(
        (
            "route-machine", "route-full-training", "route-sharding", "route-numerics", "route-recompute",
            "route-tied-head",
        ),
        CUDA,
    ),
    **dict.fromkeys(("route-sft", "route-shapes"), OURS),
    **dict.fromkeys(
        ("ddp-only-replicates", "whole-nodes", "fsdp1-older-stacks", "batch-product", "launcher-arguments"), OURS
    ),
}  # fmt: skip
"""Rules whose error no test here provokes, and why not."""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name in ("real_errors.py", "real_errors_parallel.py"):
        child = [warm_python(), Path(__file__).with_name(name)]
        environment = warm_environment()
        done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        answers |= json.loads(done.stdout)
    return answers


EVERY_REFUSAL = REFUSED + REFUSED_IN_PARALLEL


def test_every_rule_is_shown_or_says_why_not() -> None:
    shown = {rule for *_, rule in EVERY_REFUSAL} - {rule.id for rule in WARNINGS}
    refusing = {rule.id for rule in (*RULES, *JOB_RULES)}
    assert shown | set(NOT_SHOWN) == refusing
    assert shown & set(NOT_SHOWN) == set()
    assert (len(refusing), len(shown), len(NOT_SHOWN)) == (112, 57, 55)
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    assert f"{len(shown)} of {len(refusing)} refusals are shown" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("scenario", "error", "words", "rule"), EVERY_REFUSAL, ids=[f"{row[0]}-{row[3]}" for row in EVERY_REFUSAL]
)
def test_the_library_refuses_it_too(said: dict[str, Any], scenario: str, error: str, words: str, rule: str) -> None:
    assert rule in RULE_IDS
    assert said[scenario].get("error") == error, said[scenario]
    assert words in said[scenario]["message"]


@pytest.mark.parametrize(("scenario", "words"), WRITTEN_OTHERWISE, ids=[row[0] for row in WRITTEN_OTHERWISE])
def test_what_the_writer_must_not_write(said: dict[str, Any], scenario: str, words: str) -> None:
    assert said[scenario].get("error") == "ValueError", said[scenario]
    assert words in said[scenario]["message"]


@pytest.mark.parametrize("scenario", ACCEPTED)
def test_the_neighbour_runs(said: dict[str, Any], scenario: str) -> None:
    assert said[scenario].get("value", said[scenario]) == ACCEPTED[scenario]


def test_chunked_nll_is_an_alias_that_warns(said: dict[str, Any]) -> None:
    assert said["chunked_nll alias"]["value"] == {"loss_type": "nll", "warned": True}
    assert trl_release(newest_known()["trl"]).loss_type_argument("fused") is None


def test_accelerate_ignores_fp16_on_a_cpu(said: dict[str, Any]) -> None:
    assert said["fp16 on cpu"]["value"] == {"autocast": False, "scaler": False}


def test_accelerate_makes_no_fsdp_of_a_cpu(said: dict[str, Any]) -> None:
    assert said["fsdp on cpu"]["value"] == "NO"


def test_deepspeed_keeps_a_master_copy_unasked(said: dict[str, Any]) -> None:
    assert said["bf16 model without bf16"]["value"] == {"weights": "torch.bfloat16", "master": "torch.float32"}


def test_sft_defaults(said: dict[str, Any]) -> None:
    assert said["sft defaults"]["value"] == {"loss_type": "nll", "gradient_checkpointing": True}


def test_every_optimizer_name_is_known(said: dict[str, Any]) -> None:
    names = said["optimizers"]["value"]
    assert len(names) > 30
    assert [name for name in names if optimizer_needs(name) is None] == []


def test_family_traits_match_the_classes(said: dict[str, Any]) -> None:
    for model_type, traits in said["attention classes"]["value"].items():
        assert (model_type not in families("no_sdpa")) == traits["sdpa"], model_type
        assert (model_type not in families("no_flash")) == traits["flash"], model_type
        assert (model_type not in families("no_recompute")) == traits["recomputes"], model_type
