"""LoRA counts against what PEFT really attaches to the real classes, on the meta device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from planner.architecture import Architecture
from planner.config.reader import read_architecture
from planner.memory.adapters import (
    TargetError,
    adapts_experts,
    lora_modules,
    lora_parameters,
    outer_lora_modules,
    target_names,
    unknown_targets,
)
from profiles.models import find_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

CASES: list[tuple[str, Any]] = [
    ("meta-llama/Llama-3.1-8B", "all-linear"),
    ("meta-llama/Llama-3.1-8B", ["q_proj", "v_proj"]),
    ("meta-llama/Llama-3.1-8B", ["self_attn.q_proj", "mlp.up_proj", "lm_head"]),
    ("Qwen/Qwen2.5-1.5B", "all-linear"),
    ("Qwen/Qwen3-0.6B", "all-linear"),
    ("Qwen/Qwen3-0.6B", ["embed_tokens", "q_proj"]),
    ("mistralai/Mistral-7B-v0.1", "all-linear"),
    ("google/gemma-2-2b", "all-linear"),
    ("google/gemma-3-1b-pt", [*ATTENTION, *MLP]),
    ("google/gemma-3-4b-pt", "all-linear"),
    ("google/gemma-3-4b-pt", ["q_proj", "v_proj"]),
    ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "all-linear"),
    ("microsoft/phi-4", "all-linear"),
    ("microsoft/phi-4", ["qkv_proj", "o_proj"]),
    ("HuggingFaceTB/SmolLM3-3B", "all-linear"),
    ("allenai/OLMo-2-0425-1B", "all-linear"),
    ("ibm-granite/granite-3.3-2b-base", "all-linear"),
    ("THUDM/GLM-4-9B-0414", "all-linear"),
    ("openai/gpt-oss-20b", "all-linear"),
    ("Qwen/Qwen3.5-0.8B", "all-linear"),
    ("Qwen/Qwen3.6-35B-A3B", "all-linear"),
    ("Qwen/Qwen3.6-35B-A3B", ["q_proj", "up_proj", "linear_fc1"]),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "all-linear"),
    ("Qwen/Qwen3-30B-A3B", "all-linear"),
    ("Qwen/Qwen3-30B-A3B", ATTENTION),
    ("Qwen/Qwen3-30B-A3B", MLP),
    ("Qwen/Qwen3-30B-A3B", ["down_proj", "gate"]),
    ("mistralai/Mixtral-8x7B-v0.1", "all-linear"),
    ("mistralai/Mixtral-8x7B-v0.1", ["w1", "w2", "w3"]),
    ("deepseek-ai/DeepSeek-V2-Lite", "all-linear"),
    ("deepseek-ai/DeepSeek-V2-Lite", ["q_proj", *MLP]),
]

MIXTURE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
}


def architecture(model_id: str) -> Architecture:
    model = find_model(model_id)
    assert model is not None
    return read_architecture(model.config, model=model.name, origin="bundled")


def attached(config: dict[str, Any], targets: Any, r: int) -> int:
    """Trainable parameters after PEFT has attached its adapters."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tests.planner.real_models import build

    lora = LoraConfig(r=r, target_modules=targets, task_type="CAUSAL_LM")
    with torch.device("meta"), warnings.catch_warnings():
        # PEFT calls deprecated names of transformers, and warns of patterns that it then applies.
        warnings.simplefilter("ignore")
        model = get_peft_model(build(config), lora, autocast_adapter_dtype=False)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.stack
@pytest.mark.parametrize(("model_id", "targets"), CASES, ids=str)
def test_counts_equal_what_peft_attaches(model_id: str, targets: Any) -> None:
    from tests.planner.real_models import cut

    model = find_model(model_id)
    assert model is not None
    config = cut(model.config, 4)
    read = read_architecture(config, model=model_id, origin="bundled")
    assert lora_parameters(read, 8, targets) == attached(config, targets, 8)


@pytest.mark.stack
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe"])
def test_mixtures_with_dense_layers_are_counted_as_peft_converts_them(model_type: str) -> None:
    experts = {"glm4_moe": "n_routed_experts", "granitemoe": "num_local_experts"}.get(model_type, "num_experts")
    config = MIXTURE | {"model_type": model_type, experts: 6}
    read = read_architecture(config, model=model_type, origin="config.json")
    assert lora_parameters(read, 4, "all-linear") == attached(config, "all-linear", 4)


@pytest.mark.stack
def test_half_of_a_fused_pair_is_refused_as_peft_refuses_it() -> None:
    config = MIXTURE | {"model_type": "qwen3_moe", "num_experts": 6}
    read = read_architecture(config, model="m", origin="config.json")
    with pytest.raises(ValueError, match="without also targeting"):
        attached(config, ["gate_proj"], 4)
    with pytest.raises(TargetError, match="lora targets lack up_proj: PEFT adapts the fused"):
        lora_parameters(read, 4, ["gate_proj"])


def test_whole_models_have_the_known_counts() -> None:
    # r (in + out) over q, k, v, o, gate, up, down of 32 layers: 16 x 81,920 x 32.
    assert lora_parameters(architecture("meta-llama/Llama-3.1-8B"), 16, "all-linear") == 41_943_040
    assert lora_parameters(architecture("meta-llama/Llama-2-7b-hf"), 8, ["q_proj", "v_proj"]) == 4_194_304
    assert lora_parameters(architecture("Qwen/Qwen3-8B"), 16, "all-linear") == 43_646_976


def test_modules_come_per_kind_and_sum_to_the_parameters() -> None:
    read = architecture("Qwen/Qwen3.6-35B-A3B")
    per_kind = lora_modules(read, "all-linear")
    assert len(per_kind) == len(read.kinds)
    assert [m.name for m in per_kind[0]][:5] == ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    inside = sum(m.count * 4 * (m.in_features + m.out_features) for i in read.order for m in per_kind[i])
    outside = sum(m.count * 4 * (m.in_features + m.out_features) for m in outer_lora_modules(read, "all-linear"))
    assert inside + outside == lora_parameters(read, 4, "all-linear")
    assert outside > 0


def test_rank_scales_the_count() -> None:
    read = architecture("google/gemma-3-4b-it")
    assert lora_parameters(read, 32, "all-linear") == 32 * lora_parameters(read, 1, "all-linear")


def test_unknown_targets_are_named() -> None:
    read = architecture("microsoft/phi-4")
    assert unknown_targets(read, ["q_proj", "qkv_proj"]) == ("q_proj",)
    assert unknown_targets(read, "all-linear") == ()
    assert unknown_targets(read, ["self_attn.o_proj", "layers.3.o_proj"]) == ("layers.3.o_proj",)
    assert lora_parameters(read, 8, ["q_proj"]) == 0
    assert target_names(read) == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head")
    assert unknown_targets(architecture("mistralai/Mixtral-8x7B-v0.1"), ["w1", "w2", "w3", "gate"]) == ()


def test_experts_are_adapted_only_where_peft_reaches_them() -> None:
    assert adapts_experts(architecture("Qwen/Qwen3-30B-A3B"), "all-linear")
    assert not adapts_experts(architecture("Qwen/Qwen3-30B-A3B"), ["q_proj", "v_proj"])
    assert not adapts_experts(architecture("openai/gpt-oss-20b"), "all-linear")
    assert not adapts_experts(architecture("Qwen/Qwen3.6-35B-A3B"), "all-linear")
