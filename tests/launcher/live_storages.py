"""Bytes of all live storages: what independent witnesses of memory count with. Shares nothing with launcher.

Runs in the Python that has torch, for scripts of this folder and of benchmarks/.
"""

from __future__ import annotations

import weakref
from typing import Any

BLOCK_BYTES = 512
"""The CUDA caching allocator hands out multiples of this."""


class LiveStorages:
    """A storage counts from the operator that returns it until nothing holds it, in whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        """By the address of what lives."""
        self.live = self.highest = 0

    def see(self, tensor: Any) -> None:
        """Count the storage under a tensor, anew where it has grown or shrunk."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        before = self.sizes.get(key)
        if size == before:
            return
        self.sizes[key] = size
        self.live += size - (before or 0)
        self.highest = max(self.highest, self.live)
        if before is None:
            weakref.finalize(storage, self.drop, key).atexit = False

    def drop(self, key: int) -> None:
        """It is gone."""
        self.live -= self.sizes.pop(key)
