"""Kernels that change what a layer moves: Liger's fused ones, and what a 4-bit base is unpacked with."""

from __future__ import annotations

from typing import NamedTuple

from planner.architecture import LayerKind
from planner.memory.states import QUANTISED_BYTES

EAGER_NORM = (36.0, 96.0)
EAGER_ROPE = (20.8, 28.8)
EAGER_SWIGLU = (10.0, 18.0)
"""Bytes per token and element that transformers' own operators move in forward and backward, bf16 with an fp32
RMSNorm: per hidden element of a norm, per element of queries and keys, per element of the MLP's width. Counted with a
dispatch mode over LlamaRMSNorm, apply_rotary_pos_emb and silu(gate) x up."""
FUSED_NORM = (4.0, 6.0)
FUSED_ROPE = (4.0, 4.0)
FUSED_SWIGLU = (6.0, 10.0)
"""The same by liger-kernel's kernels (ops/rms_norm.py, rope.py, swiglu.py): every operand read and written once in 2
bytes; backward reads what forward read and the gradient."""
EAGER_LAUNCHES = {"norm": (8, 16), "rope": (10, 14), "swiglu": (2, 3)}
FUSED_LAUNCHES = {"norm": (1, 2), "rope": (1, 1), "swiglu": (1, 1)}


class Saved(NamedTuple):
    """What fused kernels spare one layer in one forward and in the backward."""

    forward_bytes: float
    backward_bytes: float
    forward_launches: float
    backward_launches: float


def liger_saves(kind: LayerKind, hidden: int) -> Saved:
    """Per token, and kernels per micro-batch: RMSNorm, rotary embedding and SwiGLU of a dense MLP.

    ``use_liger_kernel`` patches the three beside the loss (transformers/integrations/liger.py).
    """
    heads = (kind.heads + kind.kv_heads) * kind.head_dim if kind.attention != "linear" else 0
    normed = kind.num_norms * hidden + (heads if kind.qk_norm != "none" else 0)
    norms = kind.num_norms + (2 if kind.qk_norm != "none" else 0)
    dense = kind.intermediate if kind.gated and kind.experts is None else 0
    counts = {"norm": norms, "rope": 1 if heads else 0, "swiglu": 1 if dense else 0}
    forward, backward = (
        normed * (EAGER_NORM[i] - FUSED_NORM[i])
        + heads * (EAGER_ROPE[i] - FUSED_ROPE[i])
        + dense * (EAGER_SWIGLU[i] - FUSED_SWIGLU[i])
        for i in (0, 1)
    )
    spared = [
        sum(counts[name] * (EAGER_LAUNCHES[name][i] - FUSED_LAUNCHES[name][i]) for name in counts) for i in (0, 1)
    ]
    return Saved(forward, backward, *spared)


def unpacked_bytes(kind: LayerKind, quantization: str, forwards: float) -> float:
    """Bytes of one layer per micro-batch to unpack its linears: in every forward, and for gradients of inputs.

    bitsandbytes makes a whole weight of it before each product (bitsandbytes/autograd/_functions.py, MatMul4Bit): codes
    and scales are read, 2 bytes written.
    """
    weights = sum(linear.num_weights for linear in kind.linears)
    return (QUANTISED_BYTES[quantization] + 2.0) * weights * (forwards + 1.0)
