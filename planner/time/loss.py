"""Time of the loss: products with the vocabulary head and passes over the logits, by each release's loss path."""

from __future__ import annotations

from planner.choice import Choice
from planner.memory.loss import CHUNK_TOKENS
from planner.memory.states import uses_autocast
from planner.time.rates import Rates

HEAD_BYTES_PER_LOGIT = 110.0
"""Bytes moved per logit outside the matmuls of a chunk, counted on the meta device."""
FUSED_BYTES_PER_LOGIT = 24.0
"""Bytes moved per logit by the fused tiles: two passes of reads and writes in bf16 and fp32. Not measured here."""
CAST_BYTES = 6.0
"""A weight of the head between bf16 and fp32, either way: 2 bytes on one side and 4 on the other."""
HEAD_CASTS = {False: (2, 4), True: (4, 6)}
"""Casts of the head in each chunk of ``h.float() @ w.float().t()`` (TRL 1.4 to 1.12), where it is frozen and where it
trains, without autocast and under it. Up in forward and in its recompute; a gradient that is cast down and added to the
chunk's before, as many bytes as a cast. Autocast casts back what went up, in forward, recompute and for the gradient;
adding gradients up was left out when the shares were fitted."""


def loss_s(choice: Choice, rates: Rates, *, vocab: int, hidden: int, forwards: int = 0) -> float:
    """Seconds per token.

    Args:
        choice: the knobs.
        rates: what the card reaches.
        vocab: rows of the head.
        hidden: its columns.
        forwards: without gradient, of every row beside training's; no chunked path has any.
    """
    v, h = vocab, hidden
    trains = choice.method == "full"
    path = choice.loss_path
    if path in ("chunked", "chunked_fp32"):
        flops = 2.0 * v * h * CHUNK_TOKENS
        # Each product streams the head and a chunk's logits, or their gradient, in 2 bytes.
        one = max(flops / rates.matmul, 2.0 * v * (h + CHUNK_TOKENS) / rates.streaming)
        extra = HEAD_BYTES_PER_LOGIT * CHUNK_TOKENS * v
        if path == "chunked_fp32":
            autocast = uses_autocast(choice)
            extra += CAST_BYTES * HEAD_CASTS[autocast][trains] * v * h
            if not autocast:
                one = flops / rates.fp32_matmul
        return ((4 if trains else 3) * one + extra / rates.streaming) / CHUNK_TOKENS
    # Tiles run the forward's product again in backward; Liger makes gradients in forward.
    products = (3 if trains else 2) + (1 if path == "fused" else 0) + forwards
    tiles = path in ("fused", "liger")
    per_logit = FUSED_BYTES_PER_LOGIT if tiles else HEAD_BYTES_PER_LOGIT
    # Forward is one of the fused tiles' two passes, and of the chunk's three.
    per_logit *= 1.0 + forwards / (2.0 if tiles else 3.0)
    return products * 2.0 * v * h / rates.matmul + per_logit * v / rates.streaming
