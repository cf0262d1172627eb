"""What each loss path allocates, by its own release's code: the moments of forward and backward, and the worst of each.

N scored tokens on the rank, V vocabulary, H hidden. b_h, b_w, b_c are bytes per element of the hidden states, the head
and the compute dtype. Every moment is the sum of what is alive in it; the hidden states that the head reads, b_h N H,
are counted with the saved activations, so they are taken off once. Sources: trl/trainer/sft_trainer.py and
trl/kernels/chunked_logprob.py of the releases named, transformers/loss/loss_utils.py, liger-kernel's
ops/fused_linear_cross_entropy.py. tests/launcher/test_loss_of_releases.py runs that code and holds these sums to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from profiles.releases import LogitMetrics

CHUNK_TOKENS = 256
"""Valid tokens per chunk of chunked_nll, TRL 1.4 to 1.14 (sft_trainer.py)."""
TILE_TOKENS = 4096
TILE_VOCAB = 32768
"""Tile of the fused head, TRL >= 1.15 (kernels/chunked_logprob.py)."""
NO_METRICS = LogitMetrics(entropy_rows=128, entropy_copies=0, accuracy_copies=0)
"""The trainer looks at the returned logits and copies none of them, as with one row in a batch since TRL 0.23."""


@dataclass(frozen=True, slots=True)
class LossBytes:
    """Allocations beside the hidden states, at the worst moment of forward and of backward."""

    forward: int
    backward: int
    formula: str
    source: str
    at_head: int = 0
    """Full logits: the part of backward that follows their gradient's arrival at the head."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The output head and what enters it."""

    n: int
    v: int
    h: int
    b_h: int
    b_w: int
    b_c: int
    trains: bool
    autocast: bool
    softcap: bool

    @property
    def hidden(self) -> int:
        """b_h N H: the hidden states, or their gradient."""
        return self.b_h * self.n * self.h

    @property
    def weights(self) -> int:
        """V H, in elements."""
        return self.v * self.h

    @property
    def casts(self) -> bool:
        """Autocast multiplies copies of the head in the compute dtype."""
        return self.b_c != self.b_w


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
    autocast: bool = True,
    softcap: bool = False,
    rows: int = 1,
    metrics: LogitMetrics = NO_METRICS,
    liger_in_place: bool = True,
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
        autocast: the loss runs under autocast (one GPU and DDP).
        softcap: logits are soft-capped, which keeps their tanh.
        rows: sequences in the micro-batch on this rank.
        metrics: full logits only: what the trainer's metrics hold beside the logits that the model returned.
        liger_in_place: Liger only: liger-kernel >= 0.8.3, which adds to the head's gradient in place.

    Raises:
        ValueError: the path is not known.
    """
    head = _Head(tokens, vocab, hidden, hidden_bytes, head_bytes, compute_bytes, head_trains, autocast, softcap)
    if path == "full_logits":
        return _full_logits(head, rows, metrics)
    if path in ("chunked", "chunked_fp32"):
        return _chunked(head, fp32_copy=path == "chunked_fp32")
    if path == "fused":
        return _fused(head)
    if path == "liger":
        return _liger(head, liger_in_place)
    raise ValueError(f"unknown loss path {path!r}")


def _full_logits(head: _Head, rows: int, metrics: LogitMetrics) -> LossBytes:
    """The model's own head and ForCausalLMLoss, then the trainer's metrics on the logits it returned."""
    logits, fp32_logits = head.b_c * head.n * head.v, 4 * head.n * head.v
    # Kept for backward: the head's input if its weights train, autocast's copies of both, and the soft cap's tanh.
    operands = head.b_c * head.n * head.h if head.trains else 0
    operands += head.b_c * head.weights if head.casts else 0
    kept = operands + (logits if head.softcap else 0)
    upcast = fp32_logits if head.b_c != 4 else 0
    in_loss = kept + logits + upcast + fp32_logits
    # The hidden states are alive until the model returns; where they train without a copy, they are what is kept.
    in_loss += 0 if head.trains and head.b_c == head.b_h else head.hidden
    # accelerate returns fp32 logits from autocast; the loss keeps its log-softmax.
    returned = fp32_logits if head.autocast else logits
    copies = metrics.entropy_copies, metrics.accuracy_copies
    entropy_copies, accuracy_copies = copies if rows > 1 else (0, 0)
    entropy_rows = metrics.entropy_rows or head.n // rows
    softmax = 3 * returned // head.n * min(entropy_rows, head.n)
    in_metrics = kept + fp32_logits + returned
    in_metrics += max(entropy_copies * returned + softmax, accuracy_copies * returned)
    # Log-softmax, its gradient and the gradient of the logits, all in fp32.
    in_softmax = kept + 3 * fp32_logits
    gradients = head.b_c * ((head.weights if head.trains else 0) + head.n * head.h)
    at_head = operands + logits + gradients
    if head.trains and head.casts:
        at_head = max(at_head, gradients + head.b_w * head.weights)
    widest = max(in_softmax, at_head)
    return LossBytes(
        max(0, max(in_loss, in_metrics) - head.hidden),
        max(0, widest - head.hidden),
        f"12 B x {head.n:,} tokens x {head.v:,} vocabulary"
        + (f" + {head.b_c} B for the soft cap" if head.softcap else ""),
        "transformers ForCausalLMLoss: fp32 log-softmax, its gradient and the logits'; trl sft_trainer.py's metrics",
        max(1, at_head - head.hidden),
    )


def _chunked(head: _Head, *, fp32_copy: bool) -> LossBytes:
    """Chunks of 256 tokens, each checkpointed: what one chunk makes, the head's gradient over chunks, the hidden's."""
    rows = min(head.n, CHUNK_TOKENS)
    several = head.n > CHUNK_TOKENS
    cells, weights = rows * head.v, head.weights
    if fp32_copy:
        up = 4 * weights if head.b_w != 4 else 0
        low = 2 * weights if head.autocast else 0
        product = 2 * cells if head.autocast else 4 * cells
    else:
        up, low, product = 0, head.b_c * weights if head.casts else 0, head.b_c * cells
    # fp32 logits, log-probabilities, their exponentials and the product of the two. Autocast turns the fp32 copies'
    # product to bf16, of which log_softmax alone makes an fp32 copy that is soon gone.
    softmax = 14 * cells if fp32_copy and head.autocast else 16 * cells
    cap = (2 if fp32_copy and head.autocast else 4) * cells if head.softcap else 0
    held = low or up
    # The chunk's rows are copied to the dtypes that the head is, and get a gradient of their own.
    cells_h = rows * head.h
    up, low = up + (4 * cells_h if up else 0), low + (2 * cells_h if low else 0)
    wide = 4 if fp32_copy and not head.autocast else head.b_c
    row_bytes = wide * cells_h * (2 if held and head.trains else 1)
    # head.hidden twice over: the rows in the order of the chunks, and the unsorted states, later the rows' gradient.
    forward = 2 * head.hidden + max(up + low + product, softmax)
    summed = head.b_w * weights if head.trains and several else 0
    # A chunk's gradient of the head comes in the dtype of its product, then turns into the head's own.
    own = wide * weights if head.trains else 0
    in_chunk = summed + max(held + softmax + cap, up + low + product, held + product + own + row_bytes)
    cast = summed + own + head.b_w * weights if own and own != head.b_w * weights else 0
    if fp32_copy and head.autocast and own and head.b_w == 2:
        cast = summed + own + 4 * weights
    backward = (2 if several else 1) * head.hidden + max(in_chunk, cast, 3 * summed)
    # Every chunk's slice makes a gradient as long as all rows, and the sum is a fourth one.
    in_slices = (4 if several else 3) * head.hidden + summed + (head.b_h * cells_h if head.trains else 0)
    return LossBytes(
        forward - head.hidden,
        max(backward, in_slices) - head.hidden,
        f"256-token chunks: {in_chunk / 2**20:,.0f} MiB in one, {3 * summed / 2**20:,.0f} MiB at the head's gradient",
        "trl sft_trainer.py chunked_nll, 1.4 to 1.12" if fp32_copy else "trl sft_trainer.py chunked_nll, 1.13 and 1.14",
    )


def _fused(head: _Head) -> LossBytes:
    """Tiles of tokens and vocabulary; gradients of hidden states and head are summed in fp32."""
    n, v, h, b_c = head.n, head.v, head.h, head.b_c
    rows = min(n, TILE_TOKENS)
    tile = rows * TILE_VOCAB * b_c
    row_cast = rows * h * b_c if b_c != head.b_h else 0
    head_cast = min(v, TILE_VOCAB) * h * b_c if head.casts else 0
    # The scored rows are copied out of the hidden states; beside them statistics of each token and its int64 target.
    forward = head.hidden + tile + row_cast + head_cast + 60 * n
    returned = (head.hidden if head.b_h != 4 else 0) + (v * h * head.b_w if head.trains and head.b_w != 4 else 0)
    gradients = 4 * n * h + (4 * v * h if head.trains else 0)
    in_tiles = head.hidden + tile + row_cast + head_cast + gradients + 28 * n
    # Backward names its cast of the head, so the next tile's is made while the last one's is there.
    again = min(v - TILE_VOCAB, TILE_VOCAB) * h * b_c if v > TILE_VOCAB else head_cast if n > TILE_TOKENS else 0
    in_tiles += max(returned, again if head.casts else 0)
    # The rows' gradient is put back in its place: zeros, and the result.
    in_place = 3 * head.hidden + (v * h * head.b_w if head.trains else 0)
    return LossBytes(
        forward,
        max(in_tiles, in_place) - head.hidden,
        f"tile {rows:,} x {TILE_VOCAB:,} x {b_c} B + fp32 gradients of {n:,} x {h:,} hidden"
        + (f" and {v:,} x {h:,} head" if head.trains else ""),
        "trl kernels/chunked_logprob.py, 1.15 and later",
    )


def _liger(head: _Head, in_place: bool) -> LossBytes:
    """liger-kernel makes both gradients in forward, in chunks whose logits are about as large as the hidden states."""
    n, v, h, b_c = head.n, head.v, head.h, head.b_c
    wanted = -(-n // -(-v // h))
    rows = min(n, 1 << (wanted - 1).bit_length())
    logits, several = rows * v * b_c, rows < n
    grad_weight = head.b_w * v * h if head.trains else 0
    cast = b_c * v * h if head.casts else 0
    row_cast = b_c * rows * h if head.casts else 0
    # Before 0.8.3 a chunk's logits were made while the last chunk's were there.
    work = cast + logits
    if not in_place:
        work += max(logits if several else 0, b_c * rows * h)
    if head.trains and head.casts and in_place:
        work = max(work, 2 * cast + logits)
    elif head.trains and (head.b_w == 4 or not in_place):
        # The chunk's gradient of the head is a product of its own, in fp32 before it is added.
        work = max(work, cast + (b_c + (4 if b_c != 4 else 0)) * v * h + logits)
    forward = grad_weight + head.hidden + row_cast + work
    return LossBytes(
        forward,
        grad_weight,
        f"{rows:,} rows x {v:,} x {b_c} B + gradients of hidden and head, made in forward",
        "liger-kernel ops/fused_linear_cross_entropy.py, "
        + ("0.8.3 and later" if in_place else "before 0.8.3: the head's gradient is added out of place"),
    )
