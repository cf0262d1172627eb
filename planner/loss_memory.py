"""What each loss path allocates, by its own release's code, at its two worst moments.

N scored tokens on the rank, V vocabulary, H hidden. b_h, b_w, b_c are bytes per element of the hidden states, the head
and the compute dtype. Sources: trl/trainer/sft_trainer.py and trl/kernels/chunked_logprob.py of the releases named,
transformers/loss/loss_utils.py; peaks checked with the CPU allocator of each release.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_TOKENS = 256
"""Valid tokens per chunk of chunked_nll, TRL 1.4 to 1.14 (sft_trainer.py)."""
TILE_TOKENS = 4096
TILE_VOCAB = 32768
"""Tile of the fused head, TRL >= 1.15 (kernels/chunked_logprob.py)."""


@dataclass(frozen=True, slots=True)
class LossBytes:
    """Allocations above the hidden states, at the worst moment of forward and of backward."""

    forward: int
    backward: int
    formula: str
    source: str


def loss_bytes(
    path: str,
    *,
    tokens: int,
    vocab: int,
    hidden: int,
    hidden_bytes: int,
    head_bytes: int,
    compute_bytes: int,
    head_trains: bool,
    bytes_per_logit: float = 12.0,
    autocast: bool = True,
    softcap: bool = False,
) -> LossBytes:
    """Bytes of one micro-batch's loss on one rank, the head's own gradient included while it forms.

    Args:
        path: one of the loss paths of ``planner.choice.LOSS_PATHS``.
        tokens: N, scored tokens on this rank per micro-batch.
        vocab: V.
        hidden: H.
        hidden_bytes: b_h.
        head_bytes: b_w, as the head is seen by the loss (2 when FSDP2 gathers it in bf16).
        compute_bytes: b_c.
        head_trains: the output head needs a gradient.
        bytes_per_logit: full logits only: 12, or 16 where TRL's metrics hold two copies (1.3 to 1.5, batches above 1).
        autocast: the loss runs under autocast (one GPU and DDP).
        softcap: logits are soft-capped, which keeps one more copy of them.

    Raises:
        ValueError: the path is not known.
    """
    n, v, h = tokens, vocab, hidden
    if path == "full_logits":
        logit = bytes_per_logit + (4.0 if softcap else 0.0)
        upcast = 4 * n * h if head_trains and hidden_bytes != compute_bytes else 0
        head_grad = v * h * head_bytes if head_trains else 0
        forward = (10.0 + (4.0 if softcap else 0.0)) * n * v
        # The head's gradient comes after the widest moment, when only the logits' gradient is left.
        backward = max(logit * n * v, (6.0 * n * v) + head_grad) + upcast
        return LossBytes(
            int(forward),
            int(backward),
            f"{logit:g} B x {n:,} tokens x {v:,} vocabulary",
            "transformers ForCausalLMLoss: fp32 logits, log-softmax and its gradient",
        )
    if path in ("chunked", "chunked_fp32"):
        return _chunked(path, n, v, h, head_bytes, head_trains, autocast, softcap)
    if path == "fused":
        return _fused(n, v, h, hidden_bytes, head_bytes, compute_bytes, head_trains)
    if path == "liger":
        # Rows are chunked so that a chunk's logits are about as large as the hidden states: ceil(V / H) chunks.
        rows = -(-n // max(1, -(-v // h)))
        work = 8 * rows * v + hidden_bytes * n * h + (v * h * head_bytes if head_trains else 0)
        return LossBytes(
            work,
            work,
            f"8 B x {rows:,} rows x {v:,} + gradients of hidden and head",
            "liger-kernel fused_linear_cross_entropy: gradients made in forward, in row chunks",
        )
    raise ValueError(f"unknown loss path {path!r}")


def _chunked(
    path: str, n: int, v: int, h: int, head_bytes: int, trains: bool, autocast: bool, softcap: bool
) -> LossBytes:
    c = min(n, CHUNK_TOKENS)
    fp32_head = head_bytes == 4
    # head_grad: a chunk's gradient, the sum over the chunks before it and the sum of both, out of place.
    sums = trains and n > CHUNK_TOKENS
    if fp32_head and autocast:
        in_chunk = (12 if path == "chunked_fp32" else 16) * c * v + (6 if trains else 2) * v * h + 8 * n * h
        head_grad = 14 * v * h + 6 * n * h if sums else 0
    elif path == "chunked_fp32":
        in_chunk = 16 * c * v + (8 if trains else 4) * v * h + 4 * n * h
        head_grad = 14 * v * h + 4 * n * h if sums else 0
    else:
        in_chunk = 16 * c * v + (2 if trains else 0) * v * h + 4 * n * h
        head_grad = 6 * v * h + 4 * n * h if sums else 0
    if softcap:
        in_chunk += 8 * c * v
    forward = in_chunk - (2 * v * h if trains else 0)
    return LossBytes(
        forward,
        max(in_chunk, head_grad),
        f"256-token chunks: {in_chunk / 2**20:,.0f} MiB in one, {head_grad / 2**20:,.0f} MiB at the head's gradient",
        "trl sft_trainer.py chunked_nll, 1.4 to 1.12"
        if path == "chunked_fp32"
        else "trl sft_trainer.py chunked_nll, 1.13 and 1.14",
    )


def _fused(n: int, v: int, h: int, b_h: int, b_w: int, b_c: int, trains: bool) -> LossBytes:
    rows = min(n, TILE_TOKENS)
    tile = rows * TILE_VOCAB * b_c
    saved = n * h * b_h
    casts = (rows * h * b_c if b_c != b_h else 0) + (min(v, TILE_VOCAB) * h * b_c if b_c != b_w else 0)
    returned = (n * h * b_h if b_h != 4 else 0) + (v * h * b_w if trains and b_w != 4 else 0)
    backward = tile + saved + 4 * n * h + (4 * v * h if trains else 0) + casts + returned
    return LossBytes(
        tile + saved + 40 * n + casts,
        backward,
        f"tile {rows:,} x {TILE_VOCAB:,} x {b_c} B + fp32 gradients of {n:,} x {h:,} hidden"
        + (f" and {v:,} x {h:,} head" if trains else ""),
        "trl kernels/chunked_logprob.py, 1.15 and later",
    )
