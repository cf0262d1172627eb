"""Hardware: the machine as the models read it: one card's capacity and rates, how many, and how they are linked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NODE_LINK = 25e9
"""Bytes per second one way of a port of 200 Gb/s for each GPU (the eight ConnectX-6 of a DGX A100's data sheet); a DGX
H100 has 400 Gb/s. Nothing reads a machine's own."""
GIGA = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node type, all cards alike; mixed machines are described by their weakest card."""

    device: Literal["cuda", "cpu"]
    name: str
    gpus_per_node: int
    """Cards that a run may use on one node; processes on CPU."""
    nodes: int = 1
    capacity_bytes: int | None
    """Memory of the smallest card in use (the host's on CPU); None when it is not known."""
    taken_bytes: tuple[int, ...] = ()
    """Already taken on each card by other processes, emptiest card first; a run of n cards takes the first n."""
    card_indices: tuple[int, ...] = ()
    """Indices of the same cards in the same order."""
    compute_capability: str | None = None
    matmul_flops: float | None
    """Dense bf16 (fp16 before Ampere) multiply-adds x 2 per second, fp32 accumulation; None when not known."""
    matmul_ceiling: float | None = None
    """Best product measured on such a card, as a share of ``matmul_flops``; None where nobody published one."""
    fp32_flops: float | None
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    """The same below 16 bits; None where the card has no such units, or the rate is not known."""
    bandwidth: float | None
    """Device memory, bytes per second."""
    link: float | None
    """Between two cards of a node, bytes per second one way."""
    node_link: float = NODE_LINK
    """Between nodes, bytes per second per GPU, one way."""
    host_link: float | None
    """Host to device, bytes per second one way."""
    power_w: float | None = None
    host_available_bytes: int | None = None
    context_bytes: int | None = None
    """Taken on a card by a process without tensors, None where nobody measured it."""
    measured: bool = False
    """Rates are those that a probe saw on this machine."""

    @property
    def num_gpus(self) -> int:
        """Cards over all nodes."""
        return self.gpus_per_node * self.nodes

    def others_bytes(self, num_gpus: int) -> int:
        """Taken by others on the fullest of the cards that a run of ``num_gpus`` would use."""
        used = self.taken_bytes[: min(num_gpus, self.gpus_per_node)]
        return max(used, default=0)

    def cards_for(self, num_gpus: int) -> list[int]:
        """Indices of the cards of one node that a run of ``num_gpus`` would use."""
        return sorted(self.card_indices[: min(num_gpus, self.gpus_per_node)])

    @property
    def has_bf16(self) -> bool:
        """bf16 matmul units: compute capability 8.0 and newer; a CPU emulates them."""
        if self.device == "cpu" or self.compute_capability is None:
            return True
        return int(self.compute_capability.split(".")[0]) >= 8
