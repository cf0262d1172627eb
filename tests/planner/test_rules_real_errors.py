"""What the installed TRL, transformers and accelerate really say to what the rule book refuses.

One child process runs every combination on tiny random models (10 to 15 seconds on two cores).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.rules import JOB_RULES, RULES
from profiles.releases import families, newest_known, optimizer_needs, trl_release

pytestmark = pytest.mark.stack

RULE_IDS = {known.id for known in RULES} | {known.id for known in JOB_RULES}
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
WRITTEN_OTHERWISE = [
    # Combinations that a written run never holds: the writer sets these arguments itself.
    ("selective without recompute", "requires `gradient_checkpointing=True`"),
    ("fsdp2 forward_prefetch", "forward_prefetch is not yet implemented in FSDP2"),
    ("fsdp2 offload without recompute", "requires `activation_checkpointing=True`"),
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
}
"""Neighbours that the book lets pass, and what they answer (steps made, classes built)."""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    child = Path(__file__).with_name("real_errors.py")
    done = subprocess.run([sys.executable, child], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize(("scenario", "error", "words", "rule"), REFUSED, ids=[row[0] for row in REFUSED])
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
