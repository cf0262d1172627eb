"""Architecture: what a ``config.json`` says about shapes, as values that the memory and time models read.

A decoder is a sequence of layers of a few distinct *kinds* (full attention, sliding window, linear attention,
mixture of experts, ...). Each kind lists its linear modules by name, so that parameter counts, LoRA adapters and
matmul work come from one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

AttentionKind = Literal["full", "sliding", "chunked", "linear", "none"]
ParameterRole = Literal["embedding", "attention", "mlp", "experts", "norms", "head", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One ``nn.Linear`` inside a layer."""

    name: str
    """The last part of its module name, as PEFT's ``target_modules`` matches it: ``q_proj``."""
    in_features: int
    out_features: int
    bias: bool = False
    role: Literal["attention", "mlp", "experts", "other"] = "attention"
    count: int = 1
    """How many such modules the layer holds (separate experts of a mixture, for one)."""
    tokens_share: float = 1.0
    """Share of the layer's tokens that one call sees: 1 for dense modules, top_k / num_experts for one expert."""

    @property
    def num_parameters(self) -> int:
        """Weights and biases of all ``count`` modules."""
        return self.count * (self.in_features * self.out_features + (self.out_features if self.bias else 0))

    @property
    def num_weights(self) -> int:
        """Weights only: what a 4-bit base quantises."""
        return self.count * self.in_features * self.out_features


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts:
    """The experts of a mixture held as stacked 3-D parameters (transformers >= 5), which no ``nn.Linear`` covers."""

    num_experts: int
    experts_per_token: int
    hidden: int
    intermediate: int
    num_parameters: int
    """All experts of the layer, biases included."""
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One distinct kind of decoder layer."""

    name: str
    """Stable and readable: ``full``, ``sliding``, ``linear``, ``full+moe``."""
    attention: AttentionKind
    linears: tuple[Linear, ...]
    norm_parameters: int
    """All parameters of the normalisations of this layer, q/k norms included."""
    other_parameters: int = 0
    """Parameters that are neither linear, norm nor expert: convolution kernels, decay vectors, attention sinks."""
    experts: FusedExperts | None = None
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    """Per-head width of queries and keys."""
    value_head_dim: int = 0
    """Per-head width of values; equals ``head_dim`` except under latent attention."""
    window: int | None = None
    """Tokens that a sliding or chunked layer looks back."""
    intermediate: int = 0
    """Width of the dense MLP, 0 when the layer has none (pure mixture)."""
    gated: bool = True
    """The MLP multiplies an activated gate with an up projection (SwiGLU, GeGLU)."""
    num_norms: int = 2
    """Normalisations over the hidden width that one token passes (2; 4 with Gemma's post norms)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Normalisation of queries and keys: over each head, or over the whole projected width (OLMo-2)."""
    attention_softcap: bool = False
    """Scores are soft-capped, so no fused kernel applies under sdpa (Gemma 2)."""
    attention_sinks: bool = False
    """The softmax carries a learned sink (gpt-oss): no SDPA kernel."""
    attention_gate: bool = False
    """Half of a doubled ``q_proj`` gates the attention output (Qwen3-Next, Qwen3.5). This and what follows tell layers
    apart, whose traces differ (``planner.memory.coefficients_json.shape_hash``)."""
    conv_channels: int = 0
    """Channels of the depthwise convolution of a linear-attention layer; there ``heads`` are value heads and
    ``kv_heads`` are key heads."""
    conv_kernel: int = 0

    @property
    def num_parameters(self) -> int:
        """Every parameter of one layer of this kind."""
        experts = self.experts.num_parameters if self.experts else 0
        return sum(m.num_parameters for m in self.linears) + self.norm_parameters + self.other_parameters + experts

    def parameters_of(self, role: ParameterRole) -> int:
        """Parameters of one layer that belong to ``role``."""
        total = sum(m.num_parameters for m in self.linears if m.role == role)
        if role == "norms":
            total += self.norm_parameters
        if role == "other":
            total += self.other_parameters
        if role == "experts" and self.experts:
            total += self.experts.num_parameters
        return total

    @property
    def active_parameters(self) -> int:
        """Parameters that one token's forward pass multiplies with."""
        active = self.norm_parameters + self.other_parameters
        for m in self.linears:
            active += round(m.num_parameters * m.tokens_share)
        if self.experts:
            active += self.experts.num_parameters * self.experts.experts_per_token // self.experts.num_experts
        return active


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes of one model, resolved from its ``config.json``."""

    model: str
    """Hub id, or the name of the folder it was read from."""
    model_type: str
    """``model_type`` of the (text) config: the transformers class family."""
    config: dict[str, object] = field(repr=False, hash=False, compare=False)
    """The config.json it was read from, whole: the tracer builds the real class from it."""
    origin: str
    """Where the shapes came from: ``bundled``, ``folder``, ``config.json``, ``hub cache``, ``hub``."""
    hidden: int
    vocab: int
    kinds: tuple[LayerKind, ...]
    order: tuple[int, ...]
    """Index into ``kinds`` for every layer, from the first to the last."""
    tied: bool
    """Output head and input embedding share one matrix."""
    embedding_parameters: int
    """Everything outside layers, final norm and head: token (and learned position) embeddings."""
    final_norm_parameters: int
    head_bias: bool = False
    other_parameters: int = 0
    """Parameters outside all of the above that the text model still holds."""
    vision_parameters: int = 0
    """Towers and projectors of a composite model; held in memory, not walked as decoder layers."""
    vision_linears: tuple[Linear, ...] = ()
    """Every ``nn.Linear`` of those towers, which ``all-linear`` adapts too; counted in ``vision_parameters``."""
    max_positions: int = 0
    """Positions that the model was trained on (``max_position_embeddings``), 0 when it has no limit."""
    rope_theta: float | None = None
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    """Share of each head that is rotated."""
    nested_rope: bool = False
    """RoPE is configured per layer type (Gemma 3): a flat ``rope_parameters`` would be refused."""
    logit_softcap: float | None = None
    logit_scale: bool = False
    """Logits are multiplied by a constant (Granite's ``logits_scaling``, Cohere)."""
    is_composite: bool = False
    """The text model sits inside ``text_config``."""
    class_name: str = ""
    """The transformers class that was counted and that TRL loads: ``LlamaForCausalLM``."""
    stored_dtype: str | None = None
    """dtype that the checkpoint is stored in, as the config states it: ``bfloat16``."""
    remote_code: bool = False
    """The config names ``auto_map`` code of its own; transformers must be told to trust it."""
    notes: tuple[str, ...] = ()
    """One sentence for each thing that was assumed while reading."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.order)

    def layers(self) -> Iterator[LayerKind]:
        """Every layer in order."""
        return (self.kinds[i] for i in self.order)

    @property
    def head_parameters(self) -> int:
        """Parameters of an untied head; 0 when it is the embedding itself (a bias still counts)."""
        weight = 0 if self.tied else self.vocab * self.hidden
        return weight + (self.vocab if self.head_bias else 0)

    @property
    def num_parameters(self) -> int:
        """All parameters, tied weights once: ``sum(p.numel() for p in model.parameters())``."""
        return (
            sum(kind.num_parameters for kind in self.layers())
            + self.embedding_parameters
            + self.final_norm_parameters
            + self.head_parameters
            + self.other_parameters
            + self.vision_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token's forward pass uses; embedding looked up, head multiplied."""
        return (
            sum(kind.active_parameters for kind in self.layers())
            + self.final_norm_parameters
            + self.vocab * self.hidden
        )

    def parameters_of(self, role: ParameterRole) -> int:
        """All parameters of the model in ``role``; the roles together make ``num_parameters``."""
        total = sum(kind.parameters_of(role) for kind in self.layers())
        if role == "embedding":
            total += self.embedding_parameters
        elif role == "norms":
            total += self.final_norm_parameters
        elif role == "head":
            total += self.head_parameters
        elif role == "other":
            total += self.other_parameters + self.vision_parameters
        return total

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Distinct attention kinds, in the order of first use."""
        return tuple(dict.fromkeys(kind.attention for kind in self.layers()))

    @property
    def is_moe(self) -> bool:
        """Any layer routes tokens to experts."""
        return any(k.experts is not None or any(m.tokens_share < 1 for m in k.linears) for k in self.kinds)
