"""Work of one layer by closed forms: FLOPs of products and attention, bytes moved outside them, kernel launches.

Fitted to counts of the real classes (a dispatch mode over transformers 5.24 on the meta device): for 14 counts of seven
models from 0.27 to 32 B parameters FLOPs agree to the digit, bytes and launches within 2 %. A trace of the model gives
the same values with better evidence (``planner.time.traced_work``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from planner.architecture import Architecture, LayerKind, Linear
from planner.choice import Choice, Recompute
from planner.memory.formula import FP32_NORM_FAMILIES
from planner.memory.states import adapter_bytes
from planner.time.linear_attention import LinearWork

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
"""Of the bytes that a layer moves outside matmuls with recompute, those that it moves without (Llama-3-8B: 61.6 of 79.7
MB per token); the rest is what a recompute moves again."""
EAGER_FORWARD_BYTES = 28.0
EAGER_BACKWARD_BYTES = 30.0
"""Bytes per head, token and position that attention by operators moves outside its two products: scale, mask, softmax
in fp32 and casts, every operand of 2 or 4 bytes read and written. By hand; with a recompute they are 86, and traces of
gpt-oss-20b (sinks) and gemma-2-2b (a soft cap) say 76 and 122."""
FP32_RESIDUAL_FACTOR = 1.37
"""How many times the bytes of bf16 throughout a layer moves under fp32 weights with autocast (Qwen3-0.6B: 47.4 for 34.7
MB per token)."""
FP32_RESIDUAL_FACTOR_FP32_NORMS = 1.145
"""The same where norms compute in fp32 anyway (gemma-3-270m: 18.8 of 16.4 MB per token)."""
ADAPTER_BYTES = 15.5
ADAPTER_FP32_BYTES = 32.2
ADAPTER_QUANTISED_BYTES = 19.8
"""Per element of an adapted module's input and output, with recompute: adapters in bf16, in fp32, and in bf16 on a
4-bit base. Medians of the bundled traces of 48 dense layers, which lie within a fifth of them."""
DROPOUT_BYTES = 8.5
"""Times the width of an adapter's dtype: what dropout before it moves per element of the module's input, with
recompute. By hand it is 27 bytes in fp32, a value and its mask read and written three times; a trace of Llama-3-8B says
34."""
ADAPTER_ONCE_SHARE = 0.69
"""Of the bytes that adapters add with recompute, those that they add without: 0.70, 0.68 and 0.66 of the three kinds in
the same traces."""
RECOMPUTES_NONE_AND_ALL: tuple[Recompute, Recompute] = ("none", "full")
POST_NORM_FAMILIES = ("olmo2", "olmo3")
"""Families that normalise what an MLP gives instead of what it gets."""
LAUNCHES_PER_LAYER = 148
LAUNCHES_QK_NORM = 64
LAUNCHES_EXPERTS = 60
LAUNCHES_EXTRA_NORM = 50
LAUNCHES_FROZEN = -14
LAUNCHES_PER_ADAPTER = 13.7
LAUNCHES_PER_FP32_ADAPTER = 25.7
LAUNCHES_PER_QUANTISED_ADAPTER = 15.9
LAUNCHES_FP32_RESIDUAL = 38
LAUNCHES_FP32_RESIDUAL_FP32_NORMS = 15
NO_RECOMPUTE_LAUNCHES = 0.757
"""Kernels per layer, forward and backward with recompute (Llama-3-8B 4,740 / 32; Qwen3 7,632 / 36; MoE 13,044 / 48;
gemma-3-270m 5,613 / 18 with four norms; adapters 8,097 and 10,545 / 36; fp32 residual 7,002 / 28 and 5,890 / 18)."""


class Work(NamedTuple):
    """One token of one rank through one or more layers: everything but the loss and the optimizer step."""

    matmul_flops: float = 0.0
    expert_flops: float = 0.0
    """Matmuls of routed experts, which run at a lower rate."""
    attention_flops: float = 0.0
    masked_attention_flops: float = 0.0
    """Attention that reads a mask: the whole square, no causal kernel."""
    linear_flops: float = 0.0
    """Products inside linear attention."""
    elementwise_bytes: float = 0.0
    recompute_flops: float = 0.0
    """Of recomputed forwards, contained in ``matmul_flops``; the two below in experts' FLOPs and elementwise bytes."""
    recompute_expert_flops: float = 0.0
    recompute_bytes: float = 0.0
    useful_flops: float = 0.0
    """What the textbook counts, for model FLOPs utilisation: nothing recomputed, half of a masked square."""
    launches: float = 0.0
    """Kernels per token: loops over chunks of the sequence."""
    launches_per_batch: float = 0.0
    matmul_flops_per_batch: float = 0.0
    elementwise_bytes_per_batch: float = 0.0
    """These three of a whole micro-batch, however many tokens it has: most kernels, and casts of weights."""


def mixed_work(first: Work, first_share: float, second: Work, second_share: float) -> Work:
    """A sum of two, each so many times."""
    return Work(*[a * first_share + b * second_share for a, b in zip(first, second, strict=True)])


def recomputed_share(recompute: str, num_layers: int) -> float:
    """Share of the layers whose forward runs twice."""
    if recompute.startswith("every_"):
        n = int(recompute.removeprefix("every_"))
        return -(-num_layers // n) / num_layers
    return 1.0 if recompute in ("full", "selective") else 0.0


def closed_work(
    architecture: Architecture,
    index: int,
    choice: Choice,
    *,
    sequence: int,
    lora_r: int,
    adapters: tuple[Linear, ...] | None,
    lora_dropout: bool,
    masked: bool,
    fp32_residual: bool,
    linear: LinearWork | None,
) -> Work:
    """One token in one layer of kind ``architecture.kinds[index]`` on one rank.

    Args:
        architecture: shapes.
        index: of the kind.
        choice: the knobs.
        sequence: tokens that a query may look back on: the whole sequence, also under context parallelism.
        lora_r: adapter rank.
        adapters: adapted modules of the kind, None when the base trains.
        lora_dropout: adapters have dropout before them.
        masked: a mask is materialised, so full-attention layers lose the causal kernel.
        fp32_residual: the residual stream is fp32.
        linear: what stands in attention's place in a layer of linear attention.
    """
    kind, again = architecture.kinds[index], recomputed_share(choice.recompute, architecture.num_layers)
    post_norm = architecture.model_type.startswith(POST_NORM_FAMILIES)
    products = _products(kind, adapters, lora_r, again, post_norm)
    scores = _linear(linear) if linear is not None else _scores(kind, choice, sequence, again, masked)
    moved, launches = _elementwise(architecture, kind, fp32_residual)
    adapted, more = _adapters(architecture, adapters, choice, lora_dropout) if adapters is not None else (0.0, 0.0)
    moved_again = again * (moved * (1 - NO_RECOMPUTE_SHARE) + adapted * (1 - ADAPTER_ONCE_SHARE) + scores.moved_again)
    return Work(
        matmul_flops=products.dense + products.dense_again + scores.products,
        expert_flops=products.routed + products.routed_again,
        attention_flops=scores.causal,
        masked_attention_flops=scores.square,
        linear_flops=scores.linear_once + again * scores.linear_again,
        elementwise_bytes=moved * NO_RECOMPUTE_SHARE + adapted * ADAPTER_ONCE_SHARE + scores.moved_once + moved_again,
        recompute_flops=products.dense_again,
        recompute_expert_flops=products.routed_again,
        recompute_bytes=moved_again,
        useful_flops=products.dense + products.routed + scores.useful,
        launches=scores.launches_once + again * scores.launches_again,
        launches_per_batch=(launches + more) * (NO_RECOMPUTE_LAUNCHES + again * (1 - NO_RECOMPUTE_LAUNCHES)),
    )


def forward_work(
    architecture: Architecture,
    index: int,
    choice: Choice,
    *,
    sequence: int,
    lora_r: int,
    adapters: tuple[Linear, ...] | None,
    lora_dropout: bool,
    masked: bool,
    fp32_residual: bool,
    linear: LinearWork | None,
) -> Work:
    """One token in one layer in a forward without gradient: a recompute, and the product that it stops before.

    Args are those of ``closed_work``; ``adapters`` is None where they are disabled as well.
    """
    kind = architecture.kinds[index]
    once, twice = (
        closed_work(
            architecture,
            index,
            replace(choice, recompute=recompute),
            sequence=sequence,
            lora_r=lora_r,
            adapters=adapters,
            lora_dropout=lora_dropout,
            masked=masked,
            fp32_residual=fp32_residual,
            linear=linear,
        )
        for recompute in RECOMPUTES_NONE_AND_ALL
    )
    post_norm = architecture.model_type.startswith(POST_NORM_FAMILIES)
    forward = mixed_work(twice, 1.0, once, -1.0)
    dense, routed = _multiplied(kind)
    # Two of seven products of attention are forward's, and one of three passes of linear attention.
    attention = (
        linear.forward_flops if linear is not None else _scores(kind, choice, sequence, 0.0, masked).useful * 2 / 7
    )
    return forward._replace(
        matmul_flops=forward.matmul_flops + 2.0 * _unneeded(kind, adapters, lora_r, post_norm),
        recompute_flops=0.0,
        recompute_expert_flops=0.0,
        recompute_bytes=0.0,
        useful_flops=2.0 * (dense + routed + _adapter_weights(adapters, lora_r)) + attention,
    )


class _Products(NamedTuple):
    """FLOPs of one layer's matmuls for one token: forward and backward, and those of the recompute."""

    dense: float
    dense_again: float
    routed: float
    routed_again: float


def _products(
    kind: LayerKind, adapters: tuple[Linear, ...] | None, lora_r: int, again: float, post_norm: bool
) -> _Products:
    dense, routed = _multiplied(kind)
    # Forward 2, input gradients 2, weight gradients 2 where the base trains.
    base = 6.0 if adapters is None else 4.0
    adapted = _adapter_weights(adapters, lora_r)
    return _Products(
        dense=base * dense + 6.0 * adapted,
        dense_again=again * 2.0 * (dense + adapted - _unneeded(kind, adapters, lora_r, post_norm)),
        routed=base * routed,
        routed_again=again * 2.0 * routed,
    )


def _adapter_weights(adapters: tuple[Linear, ...] | None, lora_r: int) -> float:
    """Weights of adapters that one token multiplies with."""
    return lora_r * sum(m.count * m.tokens_share * (m.in_features + m.out_features) for m in adapters or ())


def _unneeded(kind: LayerKind, adapters: tuple[Linear, ...] | None, lora_r: int, post_norm: bool) -> float:
    """Weights of the layer's last product, before which a recompute stops, for nothing needs its output.

    The down projection, unless a norm behind it or an adapter beside it does; then the adapter's own second factor.
    """
    last = [m for m in adapters or () if m.role == "mlp" and m.name == "down_proj"]
    if last:
        return float(lora_r * last[-1].out_features)
    return 0.0 if kind.num_norms > 2 or post_norm else _last_linear(kind)


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


def _elementwise(architecture: Architecture, kind: LayerKind, fp32_residual: bool) -> tuple[float, float]:
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
    return moved, kernels


def _adapters(
    architecture: Architecture, adapters: tuple[Linear, ...], choice: Choice, dropout: bool
) -> tuple[float, float]:
    """The same that adapters add, and a frozen base spares."""
    if adapter_bytes(choice) == 4:
        per_element, per_module = ADAPTER_FP32_BYTES, LAUNCHES_PER_FP32_ADAPTER
    elif choice.method == "qlora":
        per_element, per_module = ADAPTER_QUANTISED_BYTES, LAUNCHES_PER_QUANTISED_ADAPTER
    else:
        per_element, per_module = ADAPTER_BYTES, LAUNCHES_PER_ADAPTER
    width = sum(m.count * m.tokens_share * (m.in_features + m.out_features) for m in adapters)
    moved = per_element * width - FROZEN_BYTES_PER_HIDDEN * architecture.hidden
    if dropout:
        inputs = sum(m.count * m.tokens_share * m.in_features for m in adapters)
        moved += DROPOUT_BYTES * adapter_bytes(choice) * inputs
    # Stacked experts share one adapter's kernels.
    kernels = LAUNCHES_FROZEN + per_module * sum(m.count if m.role != "experts" else 1 for m in adapters)
    return moved, kernels


class _Scores(NamedTuple):
    """Attention of one layer for one token, projections left out."""

    causal: float = 0.0
    """FLOPs in a causal kernel."""
    square: float = 0.0
    """FLOPs over the whole square in a kernel that reads a mask."""
    products: float = 0.0
    """FLOPs over the whole square in plain matmuls."""
    useful: float = 0.0
    moved_once: float = 0.0
    moved_again: float = 0.0
    """Bytes outside products: of forward and backward, and of one more forward."""
    linear_once: float = 0.0
    linear_again: float = 0.0
    launches_once: float = 0.0
    launches_again: float = 0.0


def _scores(kind: LayerKind, choice: Choice, sequence: int, again: float, masked: bool) -> _Scores:
    width = kind.heads * (kind.head_dim + (kind.value_head_dim or kind.head_dim)) / 2.0
    # Products over the square: two forward, five backward (two of them a forward again), two more where outputs were
    # not kept.
    passes = 7.0 + 2.0 * again * (0.0 if choice.recompute == "selective" else 1.0)
    windowed = kind.attention in ("sliding", "chunked")
    window = min(kind.window or sequence, sequence) if windowed else sequence
    seen = (2.0 * sequence - window) * window / sequence
    if choice.attention == "eager":
        scores = float(kind.heads * sequence)
        return _Scores(
            # Operators kept the scores, so their backward has four products.
            products=(passes - 1.0) * 2.0 * sequence * width,
            useful=7.0 * seen * width,
            moved_once=(EAGER_FORWARD_BYTES + EAGER_BACKWARD_BYTES) * scores,
            moved_again=EAGER_FORWARD_BYTES * scores,
        )
    if choice.attention == "flash_attention_2":
        return _Scores(causal=passes * seen * width, useful=7.0 * seen * width)
    if masked or windowed:
        return _Scores(square=passes * 2.0 * sequence * width, useful=7.0 * seen * width)
    return _Scores(causal=passes * sequence * width, useful=7.0 * sequence * width)


def _linear(one: LinearWork) -> _Scores:
    return _Scores(
        useful=3.0 * one.forward_flops,
        moved_once=one.forward_bytes + one.backward_bytes,
        moved_again=one.forward_bytes,
        linear_once=one.forward_flops + one.backward_flops,
        linear_again=one.forward_flops,
        launches_once=one.launches_per_token,
        launches_again=one.launches_per_token_again,
    )
