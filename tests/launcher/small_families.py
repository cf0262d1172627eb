"""Small configs of real families, each with something of its own in its layers."""

from __future__ import annotations

from typing import Any


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        **more,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_sizes(tie_word_embeddings=False)},
    "qwen2": {"model_type": "qwen2", **_sizes(num_key_value_heads=4)},
    "qwen3": {"model_type": "qwen3", **_sizes(head_dim=128)},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_sizes(head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
    },
    "gemma2": {"model_type": "gemma2", **_sizes(head_dim=64, sliding_window=512)},
    "gemma3": {
        "model_type": "gemma3_text",
        **_sizes(head_dim=128, num_attention_heads=4, num_key_value_heads=1, sliding_window=512),
    },
    "phi3": {"model_type": "phi3", **_sizes(sliding_window=None, pad_token_id=0)},
    "mistral-window": {"model_type": "mistral", **_sizes(sliding_window=1536, tie_word_embeddings=False)},
    "olmo2": {"model_type": "olmo2", **_sizes(num_key_value_heads=8, tie_word_embeddings=False)},
    "granite": {"model_type": "granite", **_sizes()},
    "smollm3": {"model_type": "smollm3", **_sizes(pad_token_id=0)},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_sizes(head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=128, intermediate_size=512),
    },
}


def config_of(family: str, layers: int) -> dict[str, Any]:
    """The family's config at a depth."""
    return {**FAMILIES[family], "num_hidden_layers": layers}
