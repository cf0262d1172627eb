"""Stage 3's prefetches and what it never divides, matrix by matrix by hand."""

from __future__ import annotations

from planner.memory.zero3_gathers import zero3_gathers
from tests.planner.replay import bundled


def test_a_prefetch_ends_with_the_matrix_that_fills_it() -> None:
    """Qwen3-8B: q and o of 4,096 x 4,096, k and v of 4,096 x 1,024, three of 4,096 x 12,288, which is 50.3 million.

    q, k, v and o are 41.9 million and take the gate along. Up and down fill a bucket alone, which needs no buffer.
    """
    square, narrow, wide = 4096 * 4096, 4096 * 1024, 4096 * 12_288
    # The head, 151,936 x 4,096, comes last: alone, for every layer ends with a full bucket.
    found = zero3_gathers(bundled("Qwen/Qwen3-8B"))
    assert found.prefetched == 2 * square + 2 * narrow + wide
    # Two norms of 4,096 and two of 128 a layer.
    assert found.persistent == 36 * (2 * 4096 + 2 * 128)


def test_prefetches_go_on_over_layers() -> None:
    """Qwen3-0.6B: 15,728,640 a layer: q and o of 1,024 x 2,048, k and v of 1,024 x 1,024, three of 1,024 x 3,072."""
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    assert layer == 15_728_640
    # Three layers are 47.2 million; the q and k of the next make 50.3.
    first = 3 * layer + 1024 * 2048 + 1024 * 1024
    assert first == 50_331_648
    # All matrices are multiples of k, 1,048,576. Of 15 k a layer every bucket ends at 48, worked out one by one.
    assert zero3_gathers(bundled("Qwen/Qwen3-0.6B")).prefetched == first


def test_matrices_that_fill_a_bucket_each_need_no_buffer_but_small_ones_do() -> None:
    """Llama 70B: q of 8,192 x 8,192 alone, k and v of 8,192 x 1,024 with o, and three of 8,192 x 28,672 alone."""
    found = zero3_gathers(bundled("meta-llama/Llama-3.1-70B"))
    assert found.prefetched == 2 * 8192 * 1024 + 8192 * 8192


def test_four_bits_are_a_quarter_of_an_element() -> None:
    """Qwen3-8B: q and o are 4.2 million elements, k and v 1.0, the others 12.6; the head is not packed.

    A bucket takes several of them wherever it begins, and what layers leave over comes with the head.
    """
    unit, head = 4096 * 1024 // 4, 151_936 * 4096
    left_over = zero3_gathers(bundled("Qwen/Qwen3-8B"), packed=True).prefetched - head
    assert left_over % unit == 0
    assert 0 < left_over < 50_000_000
    # Whole linears leave nothing over: a head alone needs no buffer.
    assert zero3_gathers(bundled("Qwen/Qwen3-8B")).prefetched < head


def test_stacked_experts_are_two_matrices() -> None:
    """128 experts of 3 x 2,048 x 768: 403 and 201 million. q, k, v, o and the router of 2,048 x 128 come before."""
    found = zero3_gathers(bundled("Qwen/Qwen3-30B-A3B"))
    experts = 128 * 2 * 2048 * 768
    assert experts < found.prefetched < experts + 50_000_000
