"""From a Machine document and a card's profile to the Hardware that the models read."""

from __future__ import annotations

from planner.hardware import GIGA, TERA, Hardware
from planner.machine import Card, Machine
from profiles.card_shares import matmul_ceiling
from profiles.cards import CardProfile

CPU_CORE_FLOPS = 30e9
"""fp32 multiply-adds x 2 per second and core that small training matmuls reach on current server cores. A guess: the
interval of CPU times is a factor of four each way."""
CPU_BANDWIDTH = 20e9
"""Host memory bytes per second for the same; a guess as well."""
CPU_LINK = CPU_BANDWIDTH / 4
"""Bytes per second one way between two processes of a host; a guess as well, for which a probe's rates stand in."""
CPU_BF16_EMULATED = 1 / 100
"""Share of fp32's rate that bf16 products reach where torch has no kernel for them: 0.2 to 0.5 against 38 to 46 GFLOP/s
(torch 2.13, one core of a Zen 3, products of `probe --rates`)."""


def cpu_hardware(machine: Machine, processes: int | None = None) -> Hardware:
    """The host itself, as one device with ``processes`` ranks (1 unless asked)."""
    host = machine.host
    cores = host.cores if host else 1
    ranks = processes or 1
    rate = cores * CPU_CORE_FLOPS / ranks
    emulated = host is not None and host.bf16 is False
    return Hardware(
        device="cpu",
        name="CPU",
        gpus_per_node=ranks,
        nodes=machine.nodes,
        capacity_bytes=host.available_bytes // ranks if host else None,
        matmul_flops=rate * CPU_BF16_EMULATED if emulated else rate,
        fp32_flops=rate,
        bandwidth=CPU_BANDWIDTH / ranks,
        link=CPU_LINK,
        host_link=None,
        host_available_bytes=None,
    )


def cards_by_room(machine: Machine) -> list[Card]:
    """The cards of one node that runs may use, emptiest first: a run of n cards takes the first n."""
    cards = sorted(machine.usable_cards, key=lambda card: (_taken(card), card.index))
    if any(card.mig_mode == "slice" for card in cards):
        # CUDA gives one process a single MIG slice, so slices never work together.
        return [max(cards, key=lambda card: (card.total_bytes - _taken(card), -card.index))]
    return cards


def gpu_hardware(machine: Machine, profile: CardProfile | None) -> Hardware:
    """The usable cards of one node, described by the weakest of them.

    Args:
        machine: with at least one usable card.
        profile: rates of that card; None leaves times unknown.
    """
    cards = cards_by_room(machine)
    compute_share = min(card.compute_share for card in cards)
    memory_share = min(card.memory_share for card in cards)
    smallest = min(card.total_bytes for card in cards)
    capability = min((c.compute_capability for c in cards if c.compute_capability), default=None, key=_capability)
    if capability is None and profile is not None:
        capability = profile.compute_capability
    nvlink = profile is not None and profile.nvlink != "none" and _all_linked(machine, profile)
    pcie = _pcie_bytes_per_s(cards, profile)
    host = machine.host
    return Hardware(
        device="cuda",
        name=profile.id if profile else cards[0].name,
        gpus_per_node=len(cards),
        nodes=machine.nodes,
        capacity_bytes=smallest,
        taken_bytes=tuple(_taken(card) for card in cards),
        card_indices=tuple(card.index for card in cards),
        compute_capability=capability,
        matmul_flops=_scaled(_flops(profile), compute_share),
        matmul_ceiling=matmul_ceiling(profile.id) if profile else None,
        fp32_flops=profile.fp32_tflops * TERA * compute_share if profile and profile.fp32_tflops else None,
        fp8_flops=profile.fp8_tflops * TERA * compute_share if profile and profile.fp8_tflops else None,
        fp4_flops=profile.fp4_tflops * TERA * compute_share if profile and profile.fp4_tflops else None,
        bandwidth=profile.hbm_gb_s * GIGA * memory_share if profile else None,
        link=profile.nvlink_total_gb_s * GIGA / 2 if nvlink and profile else pcie,
        host_link=pcie,
        power_w=max(
            (c.power_limit_w for c in cards if c.power_limit_w),
            default=profile.tdp_w if profile else None,
        ),
        host_available_bytes=host.available_bytes if host else None,
    )


def _taken(card: Card) -> int:
    """Bytes that a new process cannot have: other processes' and the driver's own."""
    return card.used_bytes + card.reserved_bytes


def _scaled(rate: float | None, share: float) -> float | None:
    return None if rate is None else rate * share


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _flops(profile: CardProfile | None) -> float | None:
    if profile is None:
        return None
    rate = profile.bf16_tflops or profile.fp16_tflops or profile.fp32_tflops
    return rate * TERA if rate else None


def _all_linked(machine: Machine, profile: CardProfile) -> bool:
    """Every usable card reaches every other over NVLink; of a named machine only what the product always has counts."""
    if machine.origin == "named":
        return profile.nvlink == "all"
    indices = {card.index for card in machine.usable_cards}
    return all(indices - {card.index} <= set(card.nvlink_peers) for card in machine.usable_cards)


PCIE_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""Bytes per second and lane, one way, after line coding (PCI-SIG base specifications)."""


def _pcie_bytes_per_s(cards: list[Card], profile: CardProfile | None) -> float | None:
    measured = [
        PCIE_LANE_BYTES[card.pcie_generation] * card.pcie_width
        for card in cards
        if card.pcie_generation in PCIE_LANE_BYTES and card.pcie_width
    ]
    if measured:
        return min(measured)
    return profile.host_link_gb_s * GIGA if profile else None
