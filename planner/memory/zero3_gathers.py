"""What DeepSpeed's stage 3 keeps whole beside the live parameters that are counted one by one.

Sources: deepspeed/runtime/zero 0.19.8, partitioned_param_coordinator.py (the prefetcher), partition_parameters.py (what
is gathered together), parameter_offload.py (what is never divided). tests/launcher/test_phases_measured.py holds every
phase of two processes to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from planner.architecture import Architecture, LayerKind

ZERO3_PREFETCH_ELEMENTS = 50_000_000
"""stage3_prefetch_bucket_size (deepspeed/runtime/zero/config.py)."""
ZERO3_PERSISTENT_ELEMENTS = 100_000
"""stage3_param_persistence_threshold (deepspeed/runtime/zero/config.py)."""


class Zero3Gathers(NamedTuple):
    """Elements of one rank."""

    prefetched: int
    """The largest buffer of several matrices that are gathered ahead of their use."""
    persistent: int
    """Small parameters of layers, which are whole from the end of one step to the next; no adapters among them."""


@lru_cache(maxsize=64)
def zero3_gathers(architecture: Architecture, *, packed: bool = False) -> Zero3Gathers:
    """What stage 3 prefetches at once, and what it never lets go.

    The prefetcher takes matrices of layers and an untied head in the order of their use until a prefetch bucket is
    full, the last one whole (partitioned_param_coordinator.py:453-476). What is taken at a time is gathered into one
    flat buffer (partition_parameters.py:1343), and all of it copied out when the first matrix is used (:761-795). The
    buffer goes when the last one is used: until then what is in flight refers to it
    (partitioned_param_coordinator.py:406). So one buffer at a time stands beside its copies; others are still in
    flight. One matrix alone is gathered in place (partition_parameters.py:1598).

    Small parameters are gathered again when the optimizer is done (parameter_offload.py:317, stage3.py:2840).

    Args:
        architecture: shapes.
        packed: linears rest in 4 bits, four to an element of two bytes.
    """
    kinds = [tuple(_matrices(kind, 4 if packed else 1)) for kind in architecture.kinds]
    used = [size for kind in architecture.order for size in kinds[kind]]
    if not architecture.tied:
        used.append(architecture.vocab * architecture.hidden)
    prefetched = taken = matrices = 0
    for size in (size for size in used if size > ZERO3_PERSISTENT_ELEMENTS):
        taken, matrices = taken + size, matrices + 1
        if matrices > 1:
            prefetched = max(prefetched, taken)
        if taken >= ZERO3_PREFETCH_ELEMENTS:
            taken = matrices = 0
    loose = [
        kind.num_parameters - sum(_matrices(kind, 1)) + sum(size for size in sizes if size <= ZERO3_PERSISTENT_ELEMENTS)
        for kind, sizes in zip(architecture.kinds, kinds, strict=True)
    ]
    return Zero3Gathers(prefetched, sum(loose[kind] for kind in architecture.order))


def _matrices(kind: LayerKind, packing: int) -> Iterator[int]:
    """Elements of a layer's matrices in the order of use, ``packing`` weights of a linear to one."""
    for linear in kind.linears:
        yield from (linear.in_features * linear.out_features // packing,) * linear.count
    if kind.experts is not None:
        # Stacked: gate and up in one parameter, down in another.
        down = kind.experts.num_parameters // (3 if kind.experts.gated else 2)
        yield from (kind.experts.num_parameters - down, down)
