"""Work of one token: matmul and attention FLOPs, bytes moved outside matmuls, kernel launches.

Closed forms fitted to counts of the real classes (a dispatch mode over transformers 5.24 on the meta device): for 14
counts of seven models from 0.27 to 32 B parameters FLOPs agree to the digit, bytes and launches within 2 %. A trace of
the user's model gives the same values with better evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.adapters import lora_modules
from planner.architecture import Architecture, LayerKind, Linear
from planner.choice import Choice
from planner.formula import FP32_NORM_FAMILIES
from planner.states import adapter_bytes

BYTES_PER_HIDDEN = 386.0
BYTES_PER_INTERMEDIATE = 36.0
BYTES_PER_QK = 77.0
BYTES_PER_QK_NORMED = 239.0
BYTES_PER_EXTRA_NORM = 220.0
BYTES_PER_ROUTED_HIDDEN = 51.0
"""Bytes that one layer moves outside matmuls per token and element of each width, with recompute, bf16 throughout:
386 H + 36 F + 77 (Q + K), 239 (Q + K) with per-head norms, 51 H per routed expert copy. Counts: Qwen3 0.6B, 4B, 8B,
32B, 30B-A3B, Llama-3-8B, gemma-3-270m at 4 x 4,096 tokens."""
FROZEN_BYTES_PER_HIDDEN = 35.0
"""Bytes per token and layer that a frozen base saves: its norms make no gradients of their weights."""
NO_RECOMPUTE_SHARE = 0.773
"""The same without recompute (Llama-3-8B: 61.6 of 79.7 MB per token)."""
FP32_RESIDUAL_FACTOR = 1.37
"""The same under fp32 weights with autocast (Qwen3-0.6B: 47.4 of 34.7 MB per token)."""
FP32_RESIDUAL_FACTOR_FP32_NORMS = 1.145
"""The same where norms compute in fp32 anyway (gemma-3-270m: 18.8 of 16.4 MB per token)."""
ADAPTER_BYTES = 15.1
"""Per element of an adapted module's input and output (Qwen3-8B, q and v alone: +2.0 MB per token, all linears: +35.9
MB, both less what the frozen base saves)."""
ADAPTER_FP32_BYTES = 45.6
"""The same with fp32 adapters under autocast (+119 MB per token)."""
LAUNCHES_PER_LAYER = 148
LAUNCHES_QK_NORM = 64
LAUNCHES_EXPERTS = 60
LAUNCHES_EXTRA_NORM = 50
LAUNCHES_FROZEN = -14
LAUNCHES_PER_ADAPTER = 13.6
LAUNCHES_FP32_RESIDUAL = 38
LAUNCHES_FP32_RESIDUAL_FP32_NORMS = 15
NO_RECOMPUTE_LAUNCHES = 0.757
"""Kernels per layer, forward and backward with recompute (Llama-3-8B 4,740 / 32; Qwen3 7,632 / 36; MoE 13,044 / 48;
gemma-3-270m 5,613 / 18 with four norms; adapters 8,097 and 10,545 / 36; fp32 residual 7,002 / 28 and 5,890 / 18)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One token of one rank through the layers: everything but the loss and the optimizer step."""

    matmul_flops: float
    expert_flops: float
    """Matmuls of routed experts, which run at a lower rate."""
    attention_flops: float
    masked_attention_flops: float
    """Attention with a materialised mask or scores: the whole square, no fused causal kernel."""
    elementwise_bytes: float
    launches: float
    """Of a whole micro-batch, however many tokens it has."""
    recompute_flops: float
    """Matmul FLOPs of the recomputed forwards, contained in ``matmul_flops`` and ``expert_flops``."""
    useful_flops: float
    """What the textbook counts, for model FLOPs utilisation: nothing recomputed, half of a masked square."""


def recomputed_share(recompute: str, num_layers: int) -> float:
    """Share of the layers whose forward runs twice."""
    if recompute.startswith("every_"):
        n = int(recompute.removeprefix("every_"))
        return -(-num_layers // n) / num_layers
    return 1.0 if recompute in ("full", "selective") else 0.0


def token_work(
    architecture: Architecture,
    choice: Choice,
    *,
    sequence: int,
    lora_r: int,
    lora_targets: str | tuple[str, ...],
    masked: bool,
    fp32_residual: bool,
) -> Work:
    """Work of one token on one rank.

    Args:
        architecture: shapes.
        choice: the knobs.
        sequence: tokens that a query may look back on: the whole sequence, also under context parallelism.
        lora_r: adapter rank.
        lora_targets: adapted modules.
        masked: a mask is materialised, so full-attention layers lose the causal kernel.
        fp32_residual: the residual stream is fp32.
    """
    again = recomputed_share(choice.recompute, architecture.num_layers)
    full = choice.method == "full"
    adapters = lora_modules(architecture, lora_targets) if not full else None
    total = dict.fromkeys(Work.__slots__, 0.0)
    for index, kind in enumerate(architecture.kinds):
        modules = adapters[index] if adapters is not None else None
        count = architecture.order.count(index)
        products = _products(kind, modules, lora_r, again)
        kernel, square = _attention_flops(kind, choice, sequence, again, masked)
        moved, launches = _elementwise(architecture, kind, modules, fp32_residual, adapter_bytes(choice) == 4)
        total["matmul_flops"] += count * (products.dense + products.dense_again)
        total["expert_flops"] += count * (products.routed + products.routed_again)
        total["recompute_flops"] += count * (products.dense_again + products.routed_again)
        total["attention_flops"] += count * kernel
        total["masked_attention_flops"] += count * square
        total["elementwise_bytes"] += count * moved * (NO_RECOMPUTE_SHARE + again * (1 - NO_RECOMPUTE_SHARE))
        useful_attention = (kernel + square / 2) * 7.0 / _attention_passes(choice, again)
        total["useful_flops"] += count * (products.dense + products.routed + useful_attention)
        total["launches"] += count * launches * (NO_RECOMPUTE_LAUNCHES + again * (1 - NO_RECOMPUTE_LAUNCHES))
    return Work(**total)


class _Products(NamedTuple):
    """FLOPs of one layer's matmuls for one token: forward and backward, and those of the recompute."""

    dense: float
    dense_again: float
    routed: float
    routed_again: float


def _products(kind: LayerKind, adapters: tuple[Linear, ...] | None, lora_r: int, again: float) -> _Products:
    dense, routed = _multiplied(kind)
    # Forward 2, input gradients 2, weight gradients 2 where the base trains.
    base = 6.0 if adapters is None else 4.0
    # The recompute stops before the layer's last product, whose output nothing needs: its down projection, unless a
    # norm behind it or an adapter beside it does; then the adapter's own second factor.
    unneeded = 0.0 if kind.num_norms > 2 else _last_linear(kind)
    extra = extra_again = 0.0
    if adapters is not None:
        width = sum(m.count * m.tokens_share * (m.in_features + m.out_features) for m in adapters)
        extra, extra_again = 6.0 * lora_r * width, 2.0 * lora_r * width
        last = [m for m in adapters if m.role == "mlp" and m.name == "down_proj"]
        if last:
            unneeded = float(lora_r * last[-1].out_features)
    return _Products(
        dense=base * dense + extra,
        dense_again=again * (2.0 * (dense - unneeded) + extra_again),
        routed=base * routed,
        routed_again=again * 2.0 * routed,
    )


def _multiplied(kind: LayerKind) -> tuple[float, float]:
    """(weights of dense linears and routers, weights of routed experts) that one token multiplies with."""
    dense = sum(m.num_weights for m in kind.linears if m.tokens_share == 1.0)
    routed = sum(m.num_weights * m.tokens_share for m in kind.linears if m.tokens_share < 1.0)
    if kind.experts is not None:
        routed += kind.experts.num_parameters * kind.experts.experts_per_token / kind.experts.num_experts
        dense += kind.experts.num_experts * kind.experts.hidden
    return float(dense), float(routed)


def _last_linear(kind: LayerKind) -> float:
    """Weights of the layer's last product, the MLP's down projection."""
    mlp = [m for m in kind.linears if m.role == "mlp" and m.tokens_share == 1.0]
    return float(mlp[-1].num_weights) if mlp else 0.0


def _elementwise(
    architecture: Architecture,
    kind: LayerKind,
    adapters: tuple[Linear, ...] | None,
    fp32_residual: bool,
    fp32_adapters: bool,
) -> tuple[float, float]:
    """(bytes per token, kernels per micro-batch) of one layer outside its matmuls, with recompute."""
    hidden, extra_norms = architecture.hidden, max(0, kind.num_norms - 2)
    normed = kind.qk_norm != "none"
    moved = BYTES_PER_HIDDEN * hidden + BYTES_PER_INTERMEDIATE * kind.intermediate
    moved += (BYTES_PER_QK_NORMED if normed else BYTES_PER_QK) * (kind.heads + kind.kv_heads) * kind.head_dim
    moved += BYTES_PER_EXTRA_NORM * extra_norms * hidden
    kernels = LAUNCHES_PER_LAYER + LAUNCHES_EXTRA_NORM * extra_norms + (LAUNCHES_QK_NORM if normed else 0.0)
    if kind.experts is not None:
        e = kind.experts
        moved += e.experts_per_token * (BYTES_PER_ROUTED_HIDDEN * hidden + BYTES_PER_INTERMEDIATE * e.intermediate)
        kernels += LAUNCHES_EXPERTS
    if fp32_residual:
        fp32_norms = architecture.model_type.startswith(FP32_NORM_FAMILIES)
        moved *= FP32_RESIDUAL_FACTOR_FP32_NORMS if fp32_norms else FP32_RESIDUAL_FACTOR
        kernels += LAUNCHES_FP32_RESIDUAL_FP32_NORMS if fp32_norms else LAUNCHES_FP32_RESIDUAL
    if adapters is not None:
        width = sum(m.count * m.tokens_share * (m.in_features + m.out_features) for m in adapters)
        moved += (ADAPTER_FP32_BYTES if fp32_adapters else ADAPTER_BYTES) * width - FROZEN_BYTES_PER_HIDDEN * hidden
        # Stacked experts share one adapter's kernels.
        kernels += LAUNCHES_FROZEN + LAUNCHES_PER_ADAPTER * sum(m.count if m.role != "experts" else 1 for m in adapters)
    return moved, kernels


def _attention_passes(choice: Choice, again: float) -> float:
    """Products over the square of one layer: two forward, five backward, two again where outputs were not kept."""
    return 7.0 + 2.0 * again * (0.0 if choice.recompute == "selective" else 1.0)


def _attention_flops(kind: LayerKind, choice: Choice, sequence: int, again: float, masked: bool) -> tuple[float, float]:
    """(FLOPs in the fused causal kernel, FLOPs over the whole masked square) of one token in one layer."""
    width = kind.heads * kind.head_dim
    passes = _attention_passes(choice, again)
    if kind.attention == "linear":
        # Linear attention: work grows with tokens, over chunks of 64.
        return passes * 2.0 * 64 * width, 0.0
    if kind.attention in ("sliding", "chunked"):
        if choice.attention == "flash_attention_2":
            return passes * 2.0 * min(kind.window or sequence, sequence) * width, 0.0
        return 0.0, passes * 2.0 * sequence * width
    if masked or choice.attention == "eager":
        return 0.0, passes * 2.0 * sequence * width
    return passes * sequence * width, 0.0
