"""Work of one token: matmul and attention FLOPs, bytes moved outside matmuls, kernel launches.

Closed forms fitted to counts of the real classes (a dispatch mode over transformers 5.24 on the meta device): for six
dense models from 0.6 to 32 B parameters the bytes agree within 0.1 %. A trace of the user's model gives the same
values with better evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.adapters import lora_modules
from planner.architecture import Architecture, LayerKind
from planner.choice import Choice

BYTES_PER_HIDDEN = 386.0
BYTES_PER_INTERMEDIATE = 36.0
BYTES_PER_QK = 77.0
BYTES_PER_QK_NORMED = 239.0
BYTES_PER_EXTRA_NORM = 220.0
BYTES_PER_ROUTED_HIDDEN = 51.0
"""Bytes that one layer moves outside matmuls per token and element of each width, with recompute, bf16 throughout:
386 H + 36 F + 77 (Q + K), 239 (Q + K) with per-head norms, 51 H per routed expert copy. Counts: Qwen3 0.6B, 4B, 8B,
32B, 30B-A3B, Llama-3-8B, gemma-3-270m at 4 x 4,096 tokens."""
NO_RECOMPUTE_SHARE = 0.773
"""The same without recompute (Llama-3-8B: 61.6 of 79.7 MB per token)."""
FP32_RESIDUAL_FACTOR = 1.37
"""The same under fp32 weights with autocast (Qwen3-0.6B: 47.4 of 34.7 MB per token)."""
ADAPTER_BYTES = 13.2
"""Per element of an adapted module's input and output (Qwen3-8B, all linears: +36 MB per token)."""
ADAPTER_FP32_BYTES = 44.0
"""The same with fp32 adapters under autocast (+119 MB per token)."""
LAUNCHES_PER_LAYER = 148
LAUNCHES_QK_NORM = 64
LAUNCHES_EXPERTS = 60
LAUNCHES_PER_ADAPTER = 11.6
NO_RECOMPUTE_LAUNCHES = 0.757
"""Kernels per layer, forward and backward with recompute (Llama-3-8B 4,740 / 32; Qwen3 7,632 / 36; MoE 13,044 / 48)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One micro-batch on one rank, everything but the loss and the optimizer step."""

    matmul_flops: float
    expert_flops: float
    """Matmuls of routed experts, which run at a lower rate."""
    attention_flops: float
    masked_attention_flops: float
    """Attention with a materialised mask or scores: the whole square, no fused causal kernel."""
    elementwise_bytes: float
    launches: float
    recompute_flops: float
    """Matmul FLOPs of the recomputed forwards, contained in ``matmul_flops`` and ``expert_flops``."""


def recomputed_share(recompute: str, num_layers: int) -> float:
    """Share of the layers whose forward runs twice."""
    if recompute.startswith("every_"):
        n = int(recompute.removeprefix("every_"))
        return -(-num_layers // n) / num_layers
    return 1.0 if recompute in ("full", "selective") else 0.0


def micro_batch_work(
    architecture: Architecture,
    choice: Choice,
    *,
    tokens: int,
    sequence: int,
    lora_r: int,
    lora_targets: str | tuple[str, ...],
    masked: bool,
    fp32_residual: bool,
) -> Work:
    """Work of one micro-batch on one rank.

    Args:
        architecture: shapes.
        choice: the knobs.
        tokens: tokens on this rank.
        sequence: tokens that a query may look back on: the whole sequence, also under context parallelism.
        lora_r: adapter rank.
        lora_targets: adapted modules.
        masked: a mask is materialised, so full-attention layers lose the causal kernel.
        fp32_residual: the residual stream is fp32.
    """
    again = recomputed_share(choice.recompute, architecture.num_layers)
    full = choice.method == "full"
    adapters = lora_modules(architecture, lora_targets) if not full else None
    matmul = experts = attention = masked_attention = moved = launches = recompute = 0.0
    counts = [architecture.order.count(index) for index in range(len(architecture.kinds))]
    for index, (kind, count) in enumerate(zip(architecture.kinds, counts, strict=True)):
        dense, routed = _multiplied(kind)
        down = _last_linear(kind)
        # Forward 2, input gradients 2, weight gradients 2 where the base trains; the recompute stops before the
        # layer's last product, whose output nothing needs.
        base = 4.0 + (2.0 if full else 0.0)
        matmul += count * tokens * (base * dense + again * 2.0 * (dense - down))
        experts += count * tokens * (base + again * 2.0) * routed
        recompute += count * tokens * again * 2.0 * (dense - down + routed)
        if adapters is not None:
            width = sum(m.count * m.tokens_share * (m.in_features + m.out_features) for m in adapters[index])
            num_adapters = sum(m.count for m in adapters[index])
            matmul += count * tokens * (6.0 + 2.0 * again) * lora_r * width
            moved += count * tokens * (ADAPTER_FP32_BYTES if choice.method == "lora" else ADAPTER_BYTES) * width
            launches += count * LAUNCHES_PER_ADAPTER * num_adapters
        kernel, square = _attention_flops(kind, choice, tokens, sequence, again, masked)
        attention += count * kernel
        masked_attention += count * square
        moved += (
            count * tokens * _elementwise(kind, architecture.hidden) * (FP32_RESIDUAL_FACTOR if fp32_residual else 1.0)
        )
        launches += count * (
            LAUNCHES_PER_LAYER
            + (LAUNCHES_QK_NORM if kind.qk_norm != "none" else 0)
            + (LAUNCHES_EXPERTS if routed else 0)
        )
    moved *= NO_RECOMPUTE_SHARE + again * (1 - NO_RECOMPUTE_SHARE)
    launches *= NO_RECOMPUTE_LAUNCHES + again * (1 - NO_RECOMPUTE_LAUNCHES)
    return Work(
        matmul_flops=matmul,
        expert_flops=experts,
        attention_flops=attention,
        masked_attention_flops=masked_attention,
        elementwise_bytes=moved,
        launches=launches,
        recompute_flops=recompute,
    )


def _multiplied(kind: LayerKind) -> tuple[float, float]:
    """(weights of dense linears, weights of routed experts) that one token multiplies with."""
    dense = sum(m.num_weights for m in kind.linears if m.tokens_share == 1.0)
    routed = sum(m.num_weights * m.tokens_share for m in kind.linears if m.tokens_share < 1.0)
    if kind.experts is not None:
        routed += kind.experts.num_parameters * kind.experts.experts_per_token / kind.experts.num_experts
    return float(dense), float(routed)


def _last_linear(kind: LayerKind) -> float:
    """Weights of the layer's last product, the MLP's down projection."""
    mlp = [m for m in kind.linears if m.role == "mlp" and m.tokens_share == 1.0]
    return float(mlp[-1].num_weights) if mlp else 0.0


def _elementwise(kind: LayerKind, hidden: int) -> float:
    qk = (kind.heads + kind.kv_heads) * kind.head_dim
    moved = BYTES_PER_HIDDEN * hidden + BYTES_PER_INTERMEDIATE * kind.intermediate
    moved += (BYTES_PER_QK_NORMED if kind.qk_norm != "none" else BYTES_PER_QK) * qk
    moved += BYTES_PER_EXTRA_NORM * max(0, kind.num_norms - 2) * hidden
    if kind.experts is not None:
        e = kind.experts
        moved += e.experts_per_token * (BYTES_PER_ROUTED_HIDDEN * hidden + BYTES_PER_INTERMEDIATE * e.intermediate)
    return moved


def _attention_flops(
    kind: LayerKind, choice: Choice, tokens: int, sequence: int, again: float, masked: bool
) -> tuple[float, float]:
    """(FLOPs in the fused causal kernel, FLOPs over the whole masked square) of one layer."""
    width = kind.heads * kind.head_dim
    passes = 7.0 + 2.0 * again * (0.0 if choice.recompute == "selective" else 1.0)
    if kind.attention == "linear":
        # Linear attention: work grows with tokens, over chunks of 64.
        return passes * 2.0 * tokens * 64 * width, 0.0
    if kind.attention in ("sliding", "chunked"):
        if choice.attention == "flash_attention_2":
            return passes * 2.0 * tokens * min(kind.window or sequence, sequence) * width, 0.0
        return 0.0, passes * 2.0 * tokens * sequence * width
    if masked or choice.attention == "eager":
        return 0.0, passes * 2.0 * tokens * sequence * width
    return passes * tokens * sequence * width, 0.0
