"""Family: how the layers of a transformers model class can differ from Llama's, as one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AttentionLayout = Literal["split", "fused", "neox", "latent"]
"""Separate q, k and v projections; one ``qkv_proj`` (Phi-3); one ``query_key_value`` (GPT-NeoX);
multi-head latent attention (DeepSeek)."""
MlpLayout = Literal["gated", "gated_fused", "plain"]
Pattern = Literal[
    "full",
    "window",
    "window_if_used",
    "qwen",
    "qwen2_moe",
    "alternating",
    "every_nth_full",
    "nope",
    "hybrid",
]
"""How a config without ``layer_types`` orders its layers; see ``planner.config.layers``."""
Rule = bool | str
"""A constant, or the config key that decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Where a mixture-of-experts family keeps its sizes."""

    experts: str = "num_experts"
    width: str = "moe_intermediate_size"
    biases: bool = False
    """Experts and router carry biases (gpt-oss)."""
    shared_width: str | None = None
    """Key of the width of one expert that every token passes (Qwen), gated by one more output."""
    shared_count: str | None = None
    """Key of the number of experts that every token passes, each of a routed one's width."""
    placed: Literal["all", "sparse_step", "after_first"] = "all"
    """Which layers route: all; by Qwen's ``mlp_only_layers`` and ``decoder_sparse_step``; those after
    ``first_k_dense_replace``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row."""

    class_name: str
    defaults: Mapping[str, object]
    """What transformers' config class fills in for keys that are missing."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Standard key -> the family's own."""
    attention: AttentionLayout = "split"
    out_name: str = "o_proj"
    qkv_bias: Rule = False
    out_bias: Rule = False
    ignores_head_dim: bool = False
    """A ``head_dim`` in the config is not read: heads divide the hidden width."""
    gated_attention: bool = False
    """``q_proj`` is twice as wide: half of it gates the attention output."""
    sinks: bool = False
    mlp: MlpLayout = "gated"
    mlp_names: tuple[str, str] = ("up_proj", "down_proj")
    mlp_bias: Rule = False
    mixture: Mixture | None = None
    norms: int = 2
    """Normalisations over the hidden width in one layer."""
    norm_tensors: int = 1
    """Parameters per normalised channel: 1 RMSNorm, 2 LayerNorm with bias, 0 without parameters."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """``full`` also where every head has weights of its own: both hold one weight per channel."""
    qk_norm_tensors: int = 1
    qk_norm_if: str | None = None
    """Config key that switches the query and key norms on; None when they are always there."""
    pattern: Pattern = "full"
    obeys_layer_types: bool = False
    period: int = 4
    """Every ``period``-th layer is full attention, in the patterns that have one."""
    period_key: str | None = None
    fused_deltanet: bool = False
    """Linear attention holds ``in_proj_qkvz`` and ``in_proj_ba``, not four projections."""
    head_bias: bool = False
    theta: float = 10_000.0
    rope_type: str = "default"
    """Scaling that transformers assumes when the config says nothing about RoPE at all."""
    nested_rope: bool = False
    partial_rotary_factor: float = 1.0
    rope_types: Mapping[str, str] = field(default_factory=dict[str, str])
    softcaps: bool = False
    logit_scale: str | None = None
    """Key of the constant that logits are multiplied with or divided by."""
