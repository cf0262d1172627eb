"""The families: one row per ``model_type`` of a text decoder that is read exactly.

Bias rules, defaults and names are those of transformers 5.24; the tests build every row's class on
the meta device and compare it with the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.config.family import Family, Mixture


def _sizes(vocab: int, width: int, heads: int, kv: int | None, positions: int, **more: object) -> dict[str, object]:
    """Defaults of one config class; ``kv`` None means as many as heads."""
    return {
        "vocab_size": vocab,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


def _routed(experts: int, per_token: int, width: int | None = None, **more: object) -> dict[str, object]:
    return {"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": width, **more}


_DELTANET: dict[str, object] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LATENT: dict[str, object] = {
    "kv_lora_rank": 512, "q_lora_rank": 1_536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip

LLAMA = Family(
    class_name="LlamaForCausalLM",
    defaults=_sizes(32_000, 11_008, 32, None, 2_048),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_BARE = replace(LLAMA, mlp_bias=False)
"""Llama whose MLP never has biases."""
_MISTRAL = Family(
    class_name="MistralForCausalLM",
    defaults=_sizes(32_000, 14_336, 32, 8, 131_072, sliding_window=4_096),
    pattern="window",
)
_QWEN2 = Family(
    class_name="Qwen2ForCausalLM",
    defaults=_sizes(151_936, 22_016, 32, 32, 32_768, sliding_window=4_096, max_window_layers=28),
    qkv_bias=True,
    pattern="qwen",
    obeys_layer_types=True,
)
_QWEN3 = replace(
    _QWEN2,
    class_name="Qwen3ForCausalLM",
    defaults=_sizes(151_936, 22_016, 32, 32, 32_768, sliding_window=4_096, max_window_layers=28, head_dim=128),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
)
_QWEN3_MOE = replace(
    _QWEN3,
    class_name="Qwen3MoeForCausalLM",
    defaults=_sizes(
        151_936,
        6_144,
        32,
        4,
        32_768,
        sliding_window=4_096,
        **_routed(128, 8, 768, decoder_sparse_step=1),
    ),
    pattern="window_if_used",
    obeys_layer_types=False,
    mixture=Mixture(placed="sparse_step"),
)
_QWEN3_NEXT = Family(
    class_name="Qwen3NextForCausalLM",
    defaults=_sizes(151_936, 5_632, 16, 2, 32_768, **_DELTANET, **_routed(512, 10, 512, decoder_sparse_step=1))
    | {"shared_expert_intermediate_size": 512},
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    gated_attention=True,
    qk_norm="head",
    pattern="hybrid",
    obeys_layer_types=True,
    period_key="full_attention_interval",
    fused_deltanet=True,
    mixture=Mixture(shared_width="shared_expert_intermediate_size", placed="sparse_step"),
    partial_rotary_factor=0.25,
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    class_name="Qwen3_5ForCausalLM",
    defaults=_sizes(248_320, 12_288, 16, 4, 32_768, **_DELTANET),
    fused_deltanet=False,
    mixture=None,
)
_GEMMA2 = replace(
    _BARE,
    class_name="Gemma2ForCausalLM",
    defaults=_sizes(256_000, 9_216, 8, 4, 8_192, head_dim=256, sliding_window=4_096)
    | {
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    norms=4,
    pattern="alternating",
    obeys_layer_types=True,
    softcaps=True,
)
_OLMO2 = replace(
    _BARE,
    class_name="Olmo2ForCausalLM",
    defaults=_sizes(50_304, 11_008, 32, None, 2_048),
    qk_norm="full",
)
_COHERE = replace(
    _BARE,
    class_name="CohereForCausalLM",
    defaults=_sizes(256_000, 22_528, 64, None, 8_192) | {"tie_word_embeddings": True},
    norms=1,
    qk_norm="full",
    qk_norm_if="use_qk_norm",
    logit_scale="logit_scale",
    theta=500_000.0,
)
_GLM = Family(
    class_name="GlmForCausalLM",
    defaults=_sizes(151_552, 13_696, 32, 2, 131_072, head_dim=128, attention_bias=True),
    qkv_bias="attention_bias",
    mlp="gated_fused",
    partial_rotary_factor=0.5,
)
_DEEPSEEK_V3 = Family(
    class_name="DeepseekV3ForCausalLM",
    defaults=_sizes(129_280, 18_432, 128, 128, 4_096, **_LATENT, n_routed_experts=256, n_shared_experts=1)
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 2_048, "first_k_dense_replace": 3},
    attention="latent",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mixture=Mixture(experts="n_routed_experts", shared_count="n_shared_experts", placed="after_first"),
)

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "internlm3": replace(LLAMA, defaults=_sizes(128_512, 10_240, 32, 2, 32_768, head_dim=128)),
    "exaone": replace(LLAMA, defaults=_sizes(102_400, 14_336, 32, 8, 4_096), theta=500_000.0),
    "mistral": _MISTRAL,
    "ministral3": replace(
        _MISTRAL,
        class_name="Ministral3ForCausalLM",
        defaults=_sizes(131_072, 14_336, 32, 8, 262_144, head_dim=128),
        theta=1_000_000.0,
        rope_type="yarn",
    ),
    "mixtral": replace(
        _MISTRAL,
        class_name="MixtralForCausalLM",
        defaults=_sizes(32_000, 14_336, 32, 8, 131_072, num_experts=8, num_experts_per_tok=2),
        names={"num_experts": "num_local_experts"},
        mixture=Mixture(width="intermediate_size"),
        theta=1_000_000.0,
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2,
        class_name="Qwen2MoeForCausalLM",
        defaults=_sizes(
            151_936,
            5_632,
            16,
            16,
            32_768,
            sliding_window=4_096,
            max_window_layers=28,
            qkv_bias=True,
        )
        | _routed(60, 4, 1_408, decoder_sparse_step=1, shared_expert_intermediate_size=5_632),
        qkv_bias="qkv_bias",
        pattern="qwen2_moe",
        mixture=Mixture(shared_width="shared_expert_intermediate_size", placed="sparse_step"),
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": replace(
        _QWEN3,
        class_name="Qwen3VLForConditionalGeneration",
        defaults=_sizes(151_936, 22_016, 32, 32, 128_000, head_dim=128),
        pattern="full",
        obeys_layer_types=False,
        theta=500_000.0,
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": replace(
        _QWEN3_MOE,
        class_name="Qwen3VLMoeForConditionalGeneration",
        defaults=_sizes(151_936, 5_632, 16, 16, 128_000)
        | _routed(60, 4, 1_408, decoder_sparse_step=1, tie_word_embeddings=True),
        pattern="full",
        theta=500_000.0,
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        class_name="Qwen3_5MoeForCausalLM",
        defaults=_sizes(248_320, 0, 16, 2, 32_768, **_DELTANET)
        | _routed(256, 8, 512, shared_expert_intermediate_size=512),
        mixture=Mixture(shared_width="shared_expert_intermediate_size"),
    ),
    "gemma": replace(
        _BARE,
        class_name="GemmaForCausalLM",
        defaults=_sizes(256_000, 24_576, 16, 16, 8_192, head_dim=256) | {"tie_word_embeddings": True},
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        class_name="Gemma3ForCausalLM",
        defaults=_sizes(262_208, 9_216, 8, 4, 131_072, head_dim=256, sliding_window=4_096)
        | {"tie_word_embeddings": True},
        qk_norm="head",
        pattern="every_nth_full",
        period=6,
        period_key="sliding_window_pattern",
        softcaps=False,
        theta=1_000_000.0,
        nested_rope=True,
    ),
    "phi3": Family(
        class_name="Phi3ForCausalLM",
        defaults=_sizes(32_064, 8_192, 32, None, 4_096),
        attention="fused",
        mlp="gated_fused",
        pattern="window",
        rope_types={"su": "longrope", "yarn": "longrope"},
    ),
    "phi": Family(
        class_name="PhiForCausalLM",
        defaults=_sizes(51_200, 8_192, 32, None, 2_048),
        out_name="dense",
        qkv_bias=True,
        out_bias=True,
        mlp="plain",
        mlp_names=("fc1", "fc2"),
        mlp_bias=True,
        norms=1,
        norm_tensors=2,
        qk_norm="head",
        qk_norm_if="qk_layernorm",
        qk_norm_tensors=2,
        head_bias=True,
        partial_rotary_factor=0.5,
    ),
    "smollm3": replace(
        LLAMA,
        class_name="SmolLM3ForCausalLM",
        defaults=_sizes(128_256, 11_008, 16, 4, 32_768, no_rope_layer_interval=4) | {"tie_word_embeddings": True},
        pattern="nope",
        obeys_layer_types=True,
        theta=2_000_000.0,
    ),
    "olmo": replace(
        _BARE,
        class_name="OlmoForCausalLM",
        defaults=_sizes(50_304, 11_008, 32, None, 2_048),
        norm_tensors=0,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        class_name="Olmo3ForCausalLM",
        defaults=_sizes(50_304, 11_008, 32, None, 2_048, sliding_window=4_096),
        pattern="every_nth_full",
        obeys_layer_types=True,
        theta=500_000.0,
        nested_rope=True,
    ),
    "olmoe": replace(
        _OLMO2,
        class_name="OlmoeForCausalLM",
        defaults=_sizes(50_304, 2_048, 16, None, 4_096, num_experts=64, num_experts_per_tok=8),
        mixture=Mixture(width="intermediate_size"),
    ),
    "granite": replace(LLAMA, class_name="GraniteForCausalLM", logit_scale="logits_scaling"),
    "granitemoe": replace(
        _BARE,
        class_name="GraniteMoeForCausalLM",
        defaults=_sizes(32_000, 11_008, 32, None, 2_048, num_experts=8, num_experts_per_tok=2),
        names={"num_experts": "num_local_experts"},
        mixture=Mixture(width="intermediate_size"),
        logit_scale="logits_scaling",
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, class_name="Glm4ForCausalLM", norms=4),
    "glm4_moe": Family(
        class_name="Glm4MoeForCausalLM",
        defaults=_sizes(151_552, 10_944, 96, 8, 131_072, n_routed_experts=128, n_shared_experts=1)
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1_408, "first_k_dense_replace": 1},
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        mixture=Mixture(experts="n_routed_experts", shared_count="n_shared_experts", placed="after_first"),
        partial_rotary_factor=0.5,
    ),
    "gpt_oss": Family(
        class_name="GptOssForCausalLM",
        defaults=_sizes(201_088, 2_880, 64, 8, 131_072, head_dim=64, sliding_window=128, attention_bias=True)
        | {"num_experts": 128, "num_experts_per_tok": 4},
        names={"num_experts": "num_local_experts"},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        sinks=True,
        pattern="alternating",
        obeys_layer_types=True,
        mixture=Mixture(width="intermediate_size", biases=True),
        theta=150_000.0,
        rope_type="yarn",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        class_name="DeepseekV2ForCausalLM",
        defaults=_sizes(102_400, 11_008, 32, None, 2_048, **_LATENT, n_routed_experts=64, n_shared_experts=2)
        | {"moe_intermediate_size": 1_407, "first_k_dense_replace": 0},
        mlp_bias="mlp_bias",
    ),
    "starcoder2": Family(
        class_name="Starcoder2ForCausalLM",
        defaults=_sizes(49_152, 12_288, 24, 2, 4_096, use_bias=True) | {"tie_word_embeddings": True},
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp="plain",
        mlp_names=("c_fc", "c_proj"),
        mlp_bias="use_bias",
        norm_tensors=2,
        pattern="window",
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        class_name="Cohere2ForCausalLM",
        defaults=_sizes(256_000, 22_528, 64, None, 8_192, sliding_window=4_096) | {"tie_word_embeddings": True},
        pattern="every_nth_full",
        obeys_layer_types=True,
        period_key="sliding_window_pattern",
        ignores_head_dim=True,
        qk_norm="none",
        qk_norm_if=None,
        theta=10_000.0,
    ),
    "stablelm": Family(
        class_name="StableLmForCausalLM",
        defaults=_sizes(50_304, 6_912, 32, 32, 4_096),
        qkv_bias="use_qkv_bias",
        ignores_head_dim=True,
        qk_norm="full",
        qk_norm_if="qk_layernorm",
        norm_tensors=2,
        partial_rotary_factor=0.25,
    ),
    "helium": replace(
        LLAMA,
        class_name="HeliumForCausalLM",
        defaults=_sizes(48_000, 7_040, 20, 20, 4_096, head_dim=128),
        out_bias=False,
        theta=100_000.0,
    ),
    "seed_oss": replace(
        LLAMA,
        class_name="SeedOssForCausalLM",
        defaults=_sizes(155_136, 27_648, 80, 8, 524_288, head_dim=128, attention_bias=True),
        out_bias="attention_out_bias",
    ),
    "arcee": replace(
        LLAMA,
        class_name="ArceeForCausalLM",
        defaults=_sizes(32_000, 18_432, 32, None, 4_096),
        mlp="plain",
    ),
    "ernie4_5": Family(
        class_name="Ernie4_5ForCausalLM",
        defaults=_sizes(103_424, 3_072, 16, 2, 131_072, head_dim=128) | {"tie_word_embeddings": True},
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        theta=500_000.0,
    ),
    "gpt_neox": Family(
        class_name="GPTNeoXForCausalLM",
        defaults=_sizes(50_432, 24_576, 64, None, 2_048, attention_bias=True),
        attention="neox",
        ignores_head_dim=True,
        out_name="dense",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp="plain",
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
        mlp_bias=True,
        norm_tensors=2,
        partial_rotary_factor=0.25,
    ),
}
