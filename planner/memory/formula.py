"""Formula tier: closed forms of what a Hugging Face decoder layer keeps and allocates, per token.

The counts follow the modelling code of transformers 5: which inputs autograd keeps for each operator, in which
dtype, given that RMSNorm computes in fp32, that autocast casts each linear's input on its own, and that a frozen
linear keeps no input. H hidden, F intermediate, Q heads x head_dim, K kv_heads x head_dim, all in elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.architecture import Architecture, LayerKind
from planner.memory.adapters import adapts_experts, lora_modules
from planner.memory.coefficients import Affine, Coefficients, LayerBytes, ModeBytes

CHECKED_FAMILIES = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"})
CHECKED_ERROR = 0.06
UNCHECKED_ERROR = 0.15
"""Half-widths said for this tier, as shares of activations, working set and loss. Against 43 whole-model traces of the
checked families the peak is off by 0.2 % in the median and 3.6 % at worst (tests/planner/test_memory_traced.py holds it
to that); other families follow the same code patterns but were not traced."""

SOURCE = "closed forms of transformers 5 decoder layers; checked against whole-model traces of five families"

ADAPTER_BACKWARD_BYTES = 5.0
"""Bytes per token and element of the intermediate width that an fp32 adapter on the down projection adds in backward:
its input's gradient in bf16 and fp32 beside the base's (4.0 to 5.4 in traces of four families)."""

FP32_NORM_FAMILIES = ("gemma", "t5gemma", "vaultgemma", "recurrent_gemma")
"""RMSNorm that multiplies by (1 + weight) in fp32 and so keeps its normalised value in fp32 as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOptions:
    """Everything besides the architecture that changes what a layer keeps."""

    residual_bytes: int
    """Bytes per element of the residual stream: 4 under fp32 weights with autocast, else the compute dtype's."""
    compute_bytes: int
    """Bytes per element inside matmuls."""
    trains_base: bool
    """Full training: base linears and norms keep inputs for their own gradients."""
    lora_targets: str | tuple[str, ...] | None = None
    lora_r: int = 0
    lora_dropout: bool = False
    adapter_bytes: int = 4
    attention: str = "sdpa"
    masked: bool = False
    """A 2-D mask is materialised for full-attention layers too: padded rows, or packed rows without flash attention."""
    quantised: bool = False
    """Frozen linears are stored in 4 bits and dequantised for every product; traces see that, closed forms do not."""
    mask_bias: bool = True
    """Masked SDPA makes a bias of the mask, as it does on CUDA; the CPU kernel reads the mask itself."""
    autocast: bool = True
    """The forward runs under autocast, which widens some operators (LayerNorm) under half-precision weights too; traces
    see that, closed forms do not."""


@lru_cache(maxsize=256)
def formula_coefficients(architecture: Architecture, options: ActivationOptions) -> Coefficients:
    """Coefficients of ``architecture`` by closed forms.

    Args:
        architecture: shapes; every kind is priced once.
        options: dtypes, method, attention and masking.

    Returns:
        Coefficients with ``evidence`` ``formula``.
    """
    layers = tuple(_layer(architecture, kind, options) for kind in architecture.kinds)
    hidden, residual = architecture.hidden, options.residual_bytes
    head_dim = max((k.head_dim for k in architecture.kinds), default=0)
    rotary = 2 * head_dim * options.residual_bytes
    mask = float(_masks(architecture, options) * (residual if options.attention == "eager" else 1))
    # A frozen norm still keeps the fp32 value that its own input gradient needs.
    norm = _norm_saved(architecture.model_type, hidden, options)
    return Coefficients(
        layers=layers,
        # Two int64 per token (ids and labels) and the rotary tables.
        model_saved=Affine(16 + rotary, 0, mask),
        final_norm_saved=Affine(norm + residual * hidden),
        evidence="formula",
        relative_error=CHECKED_ERROR if architecture.model_type in CHECKED_FAMILIES else UNCHECKED_ERROR,
        source=SOURCE,
    )


def _masks(architecture: Architecture, options: ActivationOptions) -> int:
    """Masks over pairs of tokens: one for all windowed layers, one for full ones that cannot do without.

    SDPA's are of a byte a pair; eager attention adds its mask to the scores, in the dtype of the embeddings.
    """
    if options.attention == "flash_attention_2":
        return 0
    windowed = any(k.attention in ("sliding", "chunked") for k in architecture.kinds)
    whole = any(k.attention not in ("sliding", "chunked", "linear") for k in architecture.kinds)
    return windowed + (whole and (options.masked or options.attention == "eager"))


def _norm_saved(model_type: str, width: int, o: ActivationOptions) -> float:
    """Bytes per token that one RMSNorm over ``width`` keeps, its output not counted."""
    fp32_copy = 4 * width  # the residual stream itself when that is fp32
    if not o.trains_base:
        return fp32_copy
    normalised = 4 if model_type.startswith(FP32_NORM_FAMILIES) else o.residual_bytes
    return fp32_copy + normalised * width


def _layer(architecture: Architecture, kind: LayerKind, o: ActivationOptions) -> LayerBytes:
    attention = _attention(architecture, kind, o)
    mlp_saved, mlp_peak = _mlp(kind, o)
    norms = kind.num_norms * _norm_saved(architecture.model_type, architecture.hidden, o)
    saved = norms + attention.saved + mlp_saved + _adapters(architecture, kind, o)
    if o.lora_targets is not None:
        fp32_down = o.adapter_bytes != o.compute_bytes and _adapts_down(architecture, kind, o)
        mlp_peak += (ADAPTER_BACKWARD_BYTES if fp32_down else o.compute_bytes) * kind.intermediate
    boundary = float(o.residual_bytes * architecture.hidden)
    kept = o.compute_bytes * kind.heads * (kind.value_head_dim or kind.head_dim) + 4 * kind.heads
    own = _own_gradients(kind, o)
    merged = _merged_experts(architecture, kind, o)
    forward = _forward_transient(kind, architecture.hidden, o)
    # The gradient of the layer's output lives through its whole backward. Attention runs backward when the MLP's saved
    # tensors are gone.
    widest = boundary + max(mlp_peak, attention.peak)
    at_attention = boundary + attention.peak
    pairs = attention.pairs + attention.pairs_peak
    # Both the update and the merged weight exist while it is being merged.
    running = Affine(forward, 2 * merged, pairs)
    recomputing = Affine(saved + widest, own + merged, pairs)
    recomputing_attention = Affine(saved - mlp_saved + at_attention, 0, pairs)
    return LayerBytes(
        none=ModeBytes(
            kept=Affine(saved, merged, attention.pairs),
            forward=Affine(max(saved, forward), 2 * merged, pairs),
            backward=Affine(widest, own, attention.pairs_peak),
            attention_backward=Affine(at_attention - mlp_saved, 0, attention.pairs_peak),
        ),
        full=ModeBytes(
            kept=Affine(boundary),
            forward=running,
            backward=recomputing,
            attention_backward=recomputing_attention,
        ),
        selective=ModeBytes(
            kept=Affine(boundary + kept),
            forward=running,
            backward=recomputing,
            attention_backward=recomputing_attention,
        ),
    )


def _adapts_down(architecture: Architecture, kind: LayerKind, o: ActivationOptions) -> bool:
    """Whether the last linear of the MLP carries an adapter."""
    down = next((m.name for m in reversed(kind.linears) if m.role == "mlp"), None)
    modules = lora_modules(architecture, o.lora_targets or ())[architecture.kinds.index(kind)]
    return any((m.role, m.name) == ("mlp", down) for m in modules)


def _merged_experts(architecture: Architecture, kind: LayerKind, o: ActivationOptions) -> float:
    """Bytes of the expert stack that PEFT merges with its adapter on every forward (peft ParamWrapper).

    The gate-and-up stack, two thirds of the experts' weights, is the larger of the two.
    """
    if o.lora_targets is None or kind.experts is None or not adapts_experts(architecture, o.lora_targets):
        return 0.0
    return o.compute_bytes * kind.experts.num_parameters * (2 / 3 if kind.experts.gated else 1 / 2)


def _own_gradients(kind: LayerKind, o: ActivationOptions) -> float:
    """Gradients that the layer has made of its own weights when its activations are still at their widest."""
    if not o.trains_base:
        return 0.0
    last_two = [m.num_weights for m in kind.linears if m.role == "mlp"][-2:]
    return float(o.residual_bytes * sum(last_two))


def _linear_input(width: int, num_linears: int, trained: bool, o: ActivationOptions) -> float:
    """Bytes per token that ``num_linears`` linears reading the same tensor keep of it."""
    if not trained:
        return 0.0
    copies = num_linears if o.residual_bytes != o.compute_bytes else 1
    return float(copies * o.compute_bytes * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionBytes:
    saved: float
    """Per token, from forward to backward."""
    peak: float
    """Per token, on top while it runs backward."""
    pairs: float = 0.0
    """Per token pair, from forward to backward."""
    pairs_peak: float = 0.0
    """Per token pair, on top while it runs either way."""


def _attention(architecture: Architecture, kind: LayerKind, o: ActivationOptions) -> _AttentionBytes:
    hidden, c = architecture.hidden, o.compute_bytes
    projections = [m for m in kind.linears if m.role == "attention"]
    inputs = _linear_input(hidden, max(len(projections) - 1, 1), o.trains_base, o)
    q = kind.heads * kind.head_dim
    k = kind.kv_heads * kind.head_dim
    v = kind.kv_heads * (kind.value_head_dim or kind.head_dim)
    out = kind.heads * (kind.value_head_dim or kind.head_dim)
    if kind.attention == "linear":
        # Gated delta rule: mixed q/k/v before and after the convolution, gates, and the chunked states, all kept.
        width = sum(m.out_features * m.count for m in projections[:-1])
        return _AttentionBytes(saved=inputs + 4 * c * width, peak=2.0 * c * width)
    saved = inputs
    if kind.qk_norm != "none":
        saved += sum(_norm_saved(architecture.model_type, w, o) for w in (q, k))
    fused = o.attention == "flash_attention_2"
    repeated = not fused and (o.masked or kind.attention in ("sliding", "chunked"))
    saved += c * (q + ((q + out) if repeated else (k + v)) + out) + 4 * kind.heads
    if repeated and kind.kv_heads != kind.heads:
        saved += c * (k + v)
    peak = float(c * (q + k + v + out))
    if o.attention == "eager":
        # Scores: softmax in fp32 and its low-precision copy are kept; a soft cap keeps the tanh as well.
        scores = kind.heads * (4.0 + c + (c if kind.attention_softcap else 0.0))
        return _AttentionBytes(saved=saved, peak=peak, pairs=scores, pairs_peak=scores)
    if repeated and o.mask_bias:
        # SDPA's memory-efficient kernel takes the mask as a bias in the query's dtype: a copy for the call, and one
        # that backward keeps. Fitted to the recorded limit of Gemma-3-1B (107,520 tokens on 80 GB).
        return _AttentionBytes(saved=saved, peak=peak, pairs=float(c), pairs_peak=float(c))
    return _AttentionBytes(saved=saved, peak=peak)


def _mlp(kind: LayerKind, o: ActivationOptions) -> tuple[float, float]:
    """(bytes kept per token, transient per token in backward) of the MLP or the experts."""
    c = o.compute_bytes
    saved = peak = 0.0
    dense = [m for m in kind.linears if m.role == "mlp"]
    if dense and kind.intermediate:
        width = kind.intermediate
        hidden = dense[0].in_features
        saved += _linear_input(hidden, max(len(dense) - 1, 1), o.trains_base, o)
        kept = (4 if kind.gated else 2) if o.trains_base else (3 if kind.gated else 1)
        saved += kept * c * width
        peak = max(peak, 2.0 * c * width)
    for experts, top_k, width, hidden in _routed(kind):
        # Rows are gathered per expert, so everything is kept top_k times; the router keeps fp32 probabilities.
        kept = 4 * width + 3 * hidden if o.trains_base else 3 * width + 2 * hidden
        saved += c * top_k * kept + 8 * experts
        peak = max(peak, c * top_k * (2.0 * width + 2.0 * hidden))
    return saved, peak


def _routed(kind: LayerKind) -> list[tuple[int, int, int, int]]:
    """(experts, experts per token, width, hidden) of the mixture, if the layer has one."""
    if kind.experts is None:
        return []
    e = kind.experts
    return [(e.num_experts, e.experts_per_token, e.intermediate, e.hidden)]


def _adapters(architecture: Architecture, kind: LayerKind, o: ActivationOptions) -> float:
    """Bytes per token that LoRA adds: adapted modules' inputs, and the rank-r values between the two factors.

    An fp32 adapter under autocast keeps a cast copy of its own for every module; one in the compute dtype keeps the
    input itself, which modules that read the same tensor share (and attention's output is kept anyway).
    """
    if o.lora_targets is None:
        return 0.0
    modules = lora_modules(architecture, o.lora_targets)[architecture.kinds.index(kind)]
    ranks = sum(m.count * m.tokens_share * o.compute_bytes * o.lora_r for m in modules)
    if o.adapter_bytes != o.compute_bytes or o.lora_dropout:
        # Dropout keeps a mask of one byte a value.
        width = o.compute_bytes + (1 if o.lora_dropout else 0)
        return ranks + sum(m.count * m.tokens_share * width * m.in_features for m in modules)
    # The last projection reads attention's output, which is kept anyway.
    last = next((m.name for m in reversed(kind.linears) if m.role == "attention"), None)
    shared = {(m.role, m.in_features, m.tokens_share) for m in modules if (m.role, m.name) != ("attention", last)}
    return ranks + sum(o.compute_bytes * width * share for _, width, share in shared)


def _forward_transient(kind: LayerKind, hidden: int, o: ActivationOptions) -> float:
    """Bytes per token at the widest moment of a forward that keeps nothing: gate, activation and up together."""
    c = o.compute_bytes
    mlp = 3.0 * c * kind.intermediate if kind.gated else 2.0 * c * kind.intermediate
    for _, top_k, width, h in _routed(kind):
        mlp = max(mlp, c * top_k * (3.0 * width + 2.0 * h))
    if o.lora_targets is not None:
        # An fp32 adapter reads an fp32 copy of its input, which autocast copies back.
        copies = 2.0 * c + o.adapter_bytes if o.adapter_bytes != c else 0.0
        mlp = max(mlp, copies * kind.intermediate) + (2.0 * c * hidden if copies else 0.0)
    attention = c * (2.0 * kind.heads + 2.0 * kind.kv_heads) * kind.head_dim
    return max(mlp, attention) + 3.0 * o.residual_bytes * hidden
