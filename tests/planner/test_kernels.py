"""What fused kernels spare, what a packed base costs, and linear attention by its kernels, by hand."""

from __future__ import annotations

import pytest

from planner.time.fused_kernels import liger_saves, unpacked_bytes
from planner.time.linear_attention import kernel_work, operator_work
from tests.planner.replay import bundled

LLAMA = bundled("meta-llama/Llama-3.1-8B").kinds[0]


def test_liger_spares_norms_rotary_embedding_and_swiglu() -> None:
    """Two norms of 4,096, queries and keys of 5,120, an MLP of 14,336."""
    saved = liger_saves(LLAMA, 4096)
    assert saved.forward_bytes == pytest.approx(2 * 4096 * 32 + 5120 * 16.8 + 14_336 * 4)
    assert saved.backward_bytes == pytest.approx(2 * 4096 * 90 + 5120 * 24.8 + 14_336 * 8)
    assert saved.forward_launches == 2 * 7 + 9 + 1
    assert saved.backward_launches == 2 * 14 + 13 + 2


def test_liger_norms_every_head_of_qwen3() -> None:
    qwen = bundled("Qwen/Qwen3-8B").kinds[0]
    saved = liger_saves(qwen, 4096)
    assert saved.forward_bytes == pytest.approx((2 * 4096 + 5120) * 32 + 5120 * 16.8 + 12_288 * 4)


def test_a_mixture_keeps_its_experts_kernels() -> None:
    moe = bundled("Qwen/Qwen3-30B-A3B").kinds[0]
    assert liger_saves(moe, 2048).forward_bytes == pytest.approx((2 * 2048 + 4608) * 32 + 4608 * 16.8)


@pytest.mark.parametrize(
    ("packing", "read"),
    [
        # 32 bytes of codes and a scale of 4 for 64 weights; scales of one byte, and a scale of 4 for 256 of them, so
        # 8,192 + 256 + 4 bytes for 16,384 weights; a byte.
        ("nf4", 36 / 64),
        ("nf4-double", 8452 / 16_384),
        ("int8", 1),
    ],
)
def test_a_packed_base_is_unpacked_before_every_product(packing: str, read: float) -> None:
    """218 million weights of a layer to 2 bytes each: forward, recompute, and once for gradients of inputs."""
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    assert unpacked_bytes(LLAMA, packing, 2.0) == pytest.approx(3 * (read + 2) * weights)


def test_gated_delta_rule_by_kernels() -> None:
    """32 heads of 128 x 128 in chunks of 64: three products with the state, five within the chunk."""
    kind = bundled("Qwen/Qwen3.6-35B-A3B").kinds[0]
    assert (kind.attention, kind.heads, kind.head_dim) == ("linear", 32, 128)
    found = kernel_work(kind)
    state, inside = 3 * 2 * 128 * 128, 2 * 64 * (3 * 128 + 2 * 128)
    assert found.forward_flops == 32 * (state + inside)
    # Queries, keys and values of 256 bytes: 7 reads and writes of key width, 6 of value width, A, and the states.
    assert found.forward_bytes == 32 * (13 * 256 + 12 * 64 + 4 * 128 * 128 / 64)
    assert 2 < found.backward_flops / found.forward_flops < 3


def test_torch_operators_move_as_much_as_the_sequence_is_long() -> None:
    """The trace of Qwen3.6-35B-A3B has 5,376 bytes per token and position; Qwen3.5-0.8B half the heads."""
    assert operator_work(bundled("Qwen/Qwen3.6-35B-A3B").kinds[0], 1).backward_bytes == pytest.approx(
        32 * 128 * 613 + 5376
    )
    small = bundled("Qwen/Qwen3.5-0.8B").kinds[0]
    grown = operator_work(small, 8192).backward_bytes - operator_work(small, 4096).backward_bytes
    assert grown == pytest.approx(4096 * 5376 / 2)
