"""Loss paths against peaks read off the allocator of each release, by hand arithmetic."""

from __future__ import annotations

import pytest

from planner.loss_memory import loss_bytes

QWEN3_8B = {"vocab": 151_936, "hidden": 4096}
BF16 = {"hidden_bytes": 2, "head_bytes": 2, "compute_bytes": 2, "autocast": False}
FP32_AUTOCAST = {"hidden_bytes": 4, "head_bytes": 4, "compute_bytes": 2, "autocast": True}


def test_fused_head_of_qwen3_8b() -> None:
    loss = loss_bytes("fused", tokens=8192, head_trains=True, **QWEN3_8B, **BF16)
    tile = 4096 * 32768 * 2
    assert tile == 268_435_456
    assert loss.backward == tile + 8 * 8192 * 4096 + 6 * 151_936 * 4096
    # 6VH alone is 3.73 GB and does not depend on the tokens.
    assert 6 * 151_936 * 4096 == 3_733_979_136
    frozen = loss_bytes("fused", tokens=8192, head_trains=False, **QWEN3_8B, **BF16)
    assert frozen.backward == tile + 8 * 8192 * 4096


def test_fused_head_with_fp32_weights_casts_tiles() -> None:
    loss = loss_bytes("fused", tokens=8192, head_trains=True, **QWEN3_8B, **FP32_AUTOCAST)
    v, h, n = 151_936, 4096, 8192
    assert loss.backward == 268_435_456 + 8 * n * h + 4 * v * h + 2 * 4096 * h + 2 * 32768 * h


def test_short_batches_allocate_a_short_tile() -> None:
    loss = loss_bytes("fused", tokens=100, head_trains=False, vocab=512, hidden=64, **BF16)
    assert loss.backward == 100 * 32768 * 2 + 8 * 100 * 64


def test_full_logits_twelve_bytes_each() -> None:
    n, v = 16_384, 248_320
    loss = loss_bytes("full_logits", tokens=n, vocab=v, hidden=2048, head_trains=False, **BF16)
    assert loss.backward == 12 * n * v
    # The fp32 logits of such a batch alone are over 16 GB.
    assert 4 * n * v > 16e9
    doubled = loss_bytes("full_logits", tokens=n, vocab=v, hidden=2048, head_trains=False, bytes_per_logit=16, **BF16)
    assert doubled.backward == 16 * n * v


@pytest.mark.parametrize(("path", "measured_gb"), [("chunked_fp32", 5.99), ("chunked", 3.03)])
def test_one_chunk_as_trl_measured_it(path: str, measured_gb: float) -> None:
    """TRL's own figure for one chunk of 256 tokens, the 1.02 GB head included."""
    v, h = 248_320, 2048
    loss = loss_bytes(path, tokens=256, vocab=v, hidden=h, head_trains=True, **BF16)
    assert (loss.backward + 2 * v * h) / 1e9 == pytest.approx(measured_gb, rel=0.025)
    assert loss.forward < loss.backward


def test_fp32_copy_is_what_the_release_without_it_saves() -> None:
    v, h = 248_320, 2048
    old = loss_bytes("chunked_fp32", tokens=4096, vocab=v, hidden=h, head_trains=False, **BF16)
    new = loss_bytes("chunked", tokens=4096, vocab=v, hidden=h, head_trains=False, **BF16)
    assert old.backward - new.backward == v * h * 4 == 2_034_237_440


def test_summed_head_gradients_match_the_cpu_allocator() -> None:
    """torch 2.13 on CPU, four chunks, V 16,384, H 2,048, N 1,024: the profiler saw 206,579,600 bytes."""
    loss = loss_bytes("chunked", tokens=1024, vocab=16_384, hidden=2048, head_trains=True, **BF16)
    assert loss.backward == pytest.approx(206_579_600, rel=0.02)


def test_unknown_path() -> None:
    with pytest.raises(ValueError, match="unknown loss path"):
        loss_bytes("cut", tokens=1, vocab=1, hidden=1, head_trains=True, **BF16)
