"""Loss paths by hand arithmetic; tests/launcher/test_loss_of_releases.py holds them to each release's own code."""

from __future__ import annotations

import pytest

from planner.memory.loss import loss_bytes
from profiles.releases import trl_release

QWEN3_8B = {"vocab": 151_936, "hidden": 4096}
BF16 = {"hidden_bytes": 2, "head_bytes": 2, "compute_bytes": 2, "autocast": False}
FP32_AUTOCAST = {"hidden_bytes": 4, "head_bytes": 4, "compute_bytes": 2, "autocast": True}


def test_fused_head_of_qwen3_8b() -> None:
    """Tile, the scored rows in bf16 and their gradient in fp32 and bf16, the head's in fp32 and bf16; the hidden states
    that the rows were copied from are gone."""
    n = 8192
    loss = loss_bytes("fused", tokens=n, head_trains=True, **QWEN3_8B, **BF16)
    tile = 4096 * 32768 * 2
    assert tile == 268_435_456
    assert loss.backward == tile + 6 * n * 4096 + 6 * 151_936 * 4096 + 28 * n
    # 6VH alone is 3.73 GB and does not depend on the tokens.
    assert 6 * 151_936 * 4096 == 3_733_979_136
    frozen = loss_bytes("fused", tokens=n, head_trains=False, **QWEN3_8B, **BF16)
    assert frozen.backward == tile + 6 * n * 4096 + 28 * n
    assert frozen.forward == loss.forward == tile + 2 * n * 4096 + 60 * n


def test_fused_head_with_fp32_weights_casts_tiles() -> None:
    """In backward two tiles of the head are there in bf16; gradients in fp32 are returned as they are."""
    loss = loss_bytes("fused", tokens=8192, head_trains=True, **QWEN3_8B, **FP32_AUTOCAST)
    v, h, n = 151_936, 4096, 8192
    assert loss.backward == 268_435_456 + 4 * n * h + 4 * v * h + 2 * 4096 * h + 2 * 2 * 32768 * h + 28 * n
    # A head of one tile and a half: the second tile is the half.
    short = loss_bytes("fused", tokens=100, head_trains=False, vocab=49_152, hidden=64, **FP32_AUTOCAST)
    assert short.backward == 100 * 32768 * 2 + 4 * 100 * 64 + 2 * 100 * 64 + 2 * 49_152 * 64 + 28 * 100


def test_short_batches_allocate_a_short_tile() -> None:
    loss = loss_bytes("fused", tokens=100, head_trains=False, vocab=512, hidden=64, **BF16)
    assert loss.backward == 100 * 32768 * 2 + 6 * 100 * 64 + 28 * 100


def test_full_logits_twelve_bytes_each() -> None:
    """A frozen head keeps nothing of its input, so the hidden states are gone: 2 N H less than what is counted."""
    n, v, h = 16_384, 248_320, 2048
    loss = loss_bytes("full_logits", tokens=n, vocab=v, hidden=h, head_trains=False, **BF16)
    assert loss.backward == 12 * n * v - 2 * n * h
    assert loss.forward == 10 * n * v
    # The fp32 logits of such a batch alone are over 16 GB.
    assert 4 * n * v > 16e9
    trained = loss_bytes("full_logits", tokens=n, vocab=v, hidden=h, head_trains=True, **BF16)
    assert trained.backward == 12 * n * v


def test_full_logits_of_fp32_weights() -> None:
    """Autocast's copy of the head stays for backward, the fp32 hidden states give way to their copy in bf16."""
    n, v, h = 4096, 151_936, 4096
    loss = loss_bytes("full_logits", tokens=n, vocab=v, hidden=h, head_trains=True, **FP32_AUTOCAST)
    assert loss.backward == 12 * n * v + 2 * v * h + 2 * n * h - 4 * n * h
    assert loss.forward == 10 * n * v + 2 * v * h + 2 * n * h


def test_full_logits_of_few_tokens_peak_at_the_heads_gradient() -> None:
    n, v, h = 128, 151_936, 4096
    loss = loss_bytes("full_logits", tokens=n, vocab=v, hidden=h, head_trains=True, **BF16)
    assert loss.backward == 2 * n * v + 2 * v * h + 2 * n * h
    upcast = loss_bytes("full_logits", tokens=n, vocab=v, hidden=h, head_trains=True, **FP32_AUTOCAST)
    assert upcast.backward == (2 + 4) * v * h + 2 * n * h - 4 * n * h


@pytest.mark.parametrize(("path", "more"), [("full_logits", 2 * 4096), ("chunked", 4 * 256), ("chunked_fp32", 4 * 256)])
def test_a_soft_cap_keeps_its_tanh(path: str, more: int) -> None:
    """In the dtype of the logits that are capped: bf16 in the model's own forward, fp32 in chunks."""
    size = {"tokens": 4096, "vocab": 256_000, "hidden": 2304}
    plain = loss_bytes(path, head_trains=False, **size, **BF16)
    capped = loss_bytes(path, head_trains=False, softcap=True, **size, **BF16)
    assert capped.backward - plain.backward == more * 256_000
    assert loss_bytes("fused", head_trains=False, softcap=True, **size, **BF16) == loss_bytes(
        "fused", head_trains=False, **size, **BF16
    )


@pytest.mark.parametrize(
    ("trl", "rows", "per_logit"),
    [
        # Log-softmax and fp32 logits, and three softmaxes of one whole sequence; two rows: half of that, or a copy.
        ("0.22.2", 1, 20),
        ("0.22.2", 2, 14),
        ("0.28.0", 1, 10),
        ("0.28.0", 2, 12),
        ("1.3.0", 2, 16),
        ("1.6.0", 2, 12),
    ],
)
def test_what_the_metrics_of_each_release_hold(trl: str, rows: int, per_logit: int) -> None:
    n, v, h = 8192, 128_256, 2048
    loss = loss_bytes(
        "full_logits",
        tokens=n,
        vocab=v,
        hidden=h,
        head_trains=False,
        rows=rows,
        metrics=trl_release(trl).logit_metrics,
        **{**BF16, "autocast": True},
    )
    # Chunks of 128 rows, three times in fp32, stand beside the copy that the entropy reads since 1.6.
    chunk = 3 * 128 * v * 4 if trl == "1.6.0" else 0
    # In the loss itself, which is the widest moment of 0.28 with one row, the hidden states are alive.
    states = 0 if (trl, rows) == ("0.28.0", 1) else 2 * n * h
    assert loss.forward == per_logit * n * v + chunk - states


@pytest.mark.parametrize(("path", "measured_gib"), [("chunked_fp32", 5.99), ("chunked", 3.03)])
def test_one_chunk_as_trl_measured_it(path: str, measured_gib: float) -> None:
    """TRL PR 6863: weights, a gradient from before, and one cuBLAS workspace for forward's thread and autograd's."""
    v, h = 248_320, 2048
    loss = loss_bytes(path, tokens=256, vocab=v, hidden=h, head_trains=True, **BF16)
    rest = 2 * 2 * v * h + 2 * (32 * 2**20 + 65_536)
    assert (loss.backward + rest) / 2**30 == pytest.approx(measured_gib, rel=0.005)
    assert loss.forward < loss.backward


def test_fp32_copy_is_what_the_release_without_it_saves() -> None:
    v, h = 248_320, 2048
    old = loss_bytes("chunked_fp32", tokens=4096, vocab=v, hidden=h, head_trains=False, **BF16)
    new = loss_bytes("chunked", tokens=4096, vocab=v, hidden=h, head_trains=False, **BF16)
    assert old.backward - new.backward == v * h * 4 == 2_034_237_440


def test_the_heads_gradient_over_chunks() -> None:
    """A chunk's, the sum of those before and the sum of both, beside the ordered rows and their gradient."""
    n, v, h = 4096, 151_936, 4096
    loss = loss_bytes("chunked", tokens=n, vocab=v, hidden=h, head_trains=True, **BF16)
    assert loss.backward == 3 * 2 * v * h + 2 * n * h
    fp32 = loss_bytes("chunked", tokens=n, vocab=v, hidden=h, head_trains=True, **FP32_AUTOCAST)
    assert fp32.backward == 3 * 4 * v * h + 4 * n * h
    # TRL 1.12: fp32 copy, fp32 gradient of the copy, bf16 sum; 256 rows of logits and twice of hidden states in fp32.
    old = loss_bytes("chunked_fp32", tokens=n, vocab=v, hidden=h, head_trains=True, **BF16)
    assert old.backward == (4 + 4 + 2) * v * h + 4 * 256 * v + 2 * 4 * 256 * h + 2 * n * h
    # Under autocast the fp32 copy is copied back to bf16, and both are there when a chunk is recomputed.
    copied = loss_bytes("chunked_fp32", tokens=n, vocab=v, hidden=h, head_trains=True, **{**BF16, "autocast": True})
    assert copied.backward == (4 + 2 + 2) * v * h + 2 * 256 * v + (4 + 2) * 256 * h + 2 * n * h


def test_long_sequences_in_chunks_peak_at_the_rows_gradients() -> None:
    """163,840 tokens of Qwen3-4B: ordered rows and three gradients as long, where a chunk is 16 x 256 x V."""
    n, v, h = 163_840, 151_936, 2560
    loss = loss_bytes("chunked", tokens=n, vocab=v, hidden=h, head_trains=True, **BF16)
    assert 2 * n * h == 838_860_800
    assert loss.backward == 3 * 838_860_800 + 2 * v * h + 2 * 256 * h
    assert loss.forward == 838_860_800 + 16 * 256 * v


def test_liger_rounds_its_chunks_up_to_a_power_of_two() -> None:
    """8,192 x 4,096 over 38 chunks would be 216 rows: 256. Both gradients are made in forward."""
    n, v, h = 8192, 151_936, 4096
    loss = loss_bytes("liger", tokens=n, head_trains=True, **QWEN3_8B, **BF16)
    assert loss.forward == 2 * v * h + 2 * n * h + 2 * 256 * v
    assert loss.backward == 2 * v * h
    old = loss_bytes("liger", tokens=n, head_trains=True, liger_in_place=False, **QWEN3_8B, **BF16)
    # The chunk's product in bf16 and in fp32, before it is added.
    assert old.forward - loss.forward == (2 + 4) * v * h
    frozen = loss_bytes("liger", tokens=n, head_trains=False, **QWEN3_8B, **BF16)
    assert (frozen.forward, frozen.backward) == (2 * n * h + 2 * 256 * v, 0)


def test_unknown_path() -> None:
    with pytest.raises(ValueError, match="unknown loss path"):
        loss_bytes("cut", tokens=1, vocab=1, hidden=1, head_trains=True, **BF16)
