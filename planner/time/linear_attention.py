"""Linear attention's own work: gated delta rules, chunk by chunk, by the kernels of a package or by torch operators.

The layer's projections, norms and gates are counted where every layer's are; this is what stands in attention's place.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.architecture import LayerKind

CHUNK = 64
"""Tokens of a chunk (flash-linear-attention's kernels and transformers' torch_chunk_gated_delta_rule alike)."""
OPERATOR_FORWARD_BYTES = 304.0
OPERATOR_BACKWARD_BYTES = 613.0
"""Per token, head and value element that transformers' torch operators move more than an attention layer's do: traces
of Qwen3.6-35B-A3B, 1.24 and 2.51 MB a layer and token over 32 heads of 128."""
OPERATOR_PAIR_BYTES = 1.3125
"""Per token, position of its sequence, head and value element: the gradient of every chunk's slice is as long as the
sequence (5,376 bytes over 32 heads of 128 in the same traces)."""
OPERATOR_LAUNCHES_PER_TOKEN = 0.62
OPERATOR_LAUNCHES_AGAIN = 0.15
"""Kernels a layer and token: a loop over the chunks (the same traces)."""


class LinearWork(NamedTuple):
    """Of one token in one layer."""

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    launches_per_token: float = 0.0
    launches_per_token_again: float = 0.0


def kernel_work(kind: LayerKind) -> LinearWork:
    """By flash-linear-attention's chunk kernels (fla/ops/gated_delta_rule/chunk.py), counted by hand.

    Forward: K K', A K, A V, W H, K' V, Q H, Q K' and A V over chunks of 64 tokens with a state of key x value per head.
    Every product reads and writes bf16 operands; A is 4 bytes before its inversion and 2 after. Backward runs W, U
    and H again and twice the forward's products.
    """
    key, value = kind.head_dim, kind.value_head_dim or kind.head_dim
    states = key * value
    flops = 6.0 * states + CHUNK * (6.0 * key + 4.0 * value)
    moved = 2.0 * (7 * key + 6 * value) + 12.0 * CHUNK + 4.0 * states / CHUNK
    again_flops = 4.0 * states + CHUNK * (4.0 * key + 2.0 * value)
    again_bytes = 2.0 * (5 * key + 4 * value) + 12.0 * CHUNK + 2.0 * states / CHUNK
    return LinearWork(
        forward_flops=kind.heads * flops,
        backward_flops=kind.heads * (2.0 * flops + again_flops),
        forward_bytes=kind.heads * moved,
        backward_bytes=kind.heads * (2.0 * moved + again_bytes),
    )


def operator_work(kind: LayerKind, sequence: int) -> LinearWork:
    """By transformers' torch operators, fitted to a trace; their products are small beside what they move."""
    width = kind.heads * (kind.value_head_dim or kind.head_dim)
    kernels = kernel_work(kind)
    return LinearWork(
        forward_flops=kernels.forward_flops,
        backward_flops=kernels.backward_flops,
        forward_bytes=OPERATOR_FORWARD_BYTES * width,
        backward_bytes=(OPERATOR_BACKWARD_BYTES + OPERATOR_PAIR_BYTES * sequence) * width,
        launches_per_token=OPERATOR_LAUNCHES_PER_TOKEN,
        launches_per_token_again=OPERATOR_LAUNCHES_AGAIN,
    )
