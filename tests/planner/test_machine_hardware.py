"""From cards and hosts to the hardware that the models read."""

from __future__ import annotations

from typing import Any

import pytest

from planner.hardware import Hardware
from planner.machine import Card, Host, Machine
from planner.machine_hardware import CPU_BANDWIDTH, CPU_CORE_FLOPS, cpu_hardware, gpu_hardware
from profiles.cards import find_card
from tests.planner.replay import named_machine

GIB = 2**30
H100 = find_card("H100-80GB")
RTX4090 = find_card("RTX4090")


def card(index: int, **changes: Any) -> Card:
    values: dict[str, Any] = {
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "card_id": "H100-80GB",
        "total_bytes": 80 * GIB,
        "compute_capability": "9.0",
        **changes,
    }
    return Card(**values)


def machine(*cards: Card, **changes: Any) -> Machine:
    return Machine(origin="nvml", spec="local", cards=list(cards), **changes)


def test_a_named_node() -> None:
    found = gpu_hardware(named_machine("8xH100-80GB", nodes=2), H100)
    assert (found.gpus_per_node, found.nodes, found.num_gpus) == (8, 2, 16)
    assert found.capacity_bytes == 81_559 * 2**20
    assert found.matmul_flops == pytest.approx(989.4e12, rel=0.001)
    assert found.bandwidth == pytest.approx(3.35e12)
    # 900 GB/s of NVLink are both directions.
    assert found.link == 450e9
    assert found.host_link == H100.host_link_gb_s * 1e9
    assert (found.power_w, found.host_available_bytes) == (700, None)
    assert found.cards_for(3) == [0, 1, 2]
    assert found.has_bf16


def test_cards_without_nvlink_talk_over_pcie() -> None:
    found = gpu_hardware(named_machine("4xRTX4090"), RTX4090)
    assert found.link == found.host_link == RTX4090.host_link_gb_s * 1e9


@pytest.mark.parametrize(
    ("peers", "link"),
    [
        (([1, 2], [0, 2], [0, 1]), 450e9),
        # A bridge between two of three: PCIe.
        (([1], [0], list[int]()), H100.host_link_gb_s * 1e9),
    ],
)
def test_nvlink_counts_when_all_are_linked(peers: tuple[list[int], ...], link: float) -> None:
    cards = [card(i, nvlink_peers=p) for i, p in enumerate(peers)]
    assert gpu_hardware(machine(*cards), H100).link == link


def test_only_usable_cards_need_to_be_linked() -> None:
    cards = [card(0, nvlink_peers=[1]), card(1, nvlink_peers=[0]), card(2, usable=False)]
    found = gpu_hardware(machine(*cards), H100)
    assert (found.link, found.gpus_per_node) == (450e9, 2)


def test_the_emptiest_cards_come_first() -> None:
    cards = [card(0, used_bytes=9 * GIB), card(1, reserved_bytes=GIB), card(2, used_bytes=GIB), card(3)]
    found = gpu_hardware(machine(*cards), H100)
    assert found.card_indices == (3, 1, 2, 0)
    assert found.taken_bytes == (0, GIB, GIB, 9 * GIB)
    assert [found.others_bytes(n) for n in (1, 2, 3, 4)] == [0, GIB, GIB, 9 * GIB]
    assert found.cards_for(2) == [1, 3]
    # More ranks than cards of a node: every node's fullest counts.
    assert found.others_bytes(8) == 9 * GIB


def test_a_mixed_machine_is_its_weakest_card() -> None:
    cards = [card(0), card(1, total_bytes=40 * GIB, compute_capability="8.0", power_limit_w=400.0)]
    found = gpu_hardware(machine(*cards), find_card("A100-40GB"))
    assert (found.capacity_bytes, found.compute_capability, found.name) == (40 * GIB, "8.0", "A100-40GB")
    assert found.power_w == 400


def test_capabilities_are_numbers() -> None:
    cards = [card(0, compute_capability="12.0"), card(1, compute_capability="8.9")]
    assert gpu_hardware(machine(*cards), H100).compute_capability == "8.9"
    assert gpu_hardware(machine(card(0, compute_capability=None)), H100).compute_capability == "9.0"


def test_a_mig_slice_has_its_share_and_works_alone() -> None:
    slices = [
        card(0, total_bytes=40 * GIB, used_bytes=GIB, mig_mode="slice", compute_share=3 / 7, memory_share=0.5),
        card(1, total_bytes=40 * GIB, mig_mode="slice", compute_share=3 / 7, memory_share=0.5),
    ]
    found = gpu_hardware(machine(*slices), H100)
    assert (found.gpus_per_node, found.card_indices) == (1, (1,))
    assert found.matmul_flops == pytest.approx(989.4e12 * 3 / 7, rel=0.001)
    assert found.fp32_flops == pytest.approx(66.9e12 * 3 / 7, rel=0.001)
    assert found.bandwidth == pytest.approx(3.35e12 / 2)


@pytest.mark.parametrize(
    ("generation", "width", "rate"), [(5, 16, 16 * 3.94e9), (4, 8, 8 * 1.97e9), (3, 16, 16 * 0.985e9)]
)
def test_the_host_link_as_it_was_read(generation: int, width: int, rate: float) -> None:
    found = gpu_hardware(machine(card(0, pcie_generation=generation, pcie_width=width)), H100)
    assert found.host_link == pytest.approx(rate)


def test_the_slowest_link_decides_and_unknown_ones_do_not() -> None:
    cards = [card(0, pcie_generation=5, pcie_width=16), card(1, pcie_generation=3, pcie_width=4), card(2)]
    assert gpu_hardware(machine(*cards), H100).host_link == pytest.approx(4 * 0.985e9)
    assert gpu_hardware(machine(card(0, pcie_generation=9, pcie_width=16)), H100).host_link == H100.host_link_gb_s * 1e9


def test_an_unknown_card_has_no_rates() -> None:
    found = gpu_hardware(machine(card(0, card_id=None, name="NVIDIA Somethingelse")), None)
    assert found.name == "NVIDIA Somethingelse"
    assert (found.matmul_flops, found.fp32_flops, found.bandwidth, found.host_link, found.power_w) == (None,) * 5
    assert found.link is None


def test_a_card_before_ampere_multiplies_in_fp16() -> None:
    t4 = find_card("T4")
    found = gpu_hardware(named_machine("1xT4"), t4)
    assert t4.bf16_tflops is None
    assert t4.fp16_tflops is not None
    assert found.matmul_flops == t4.fp16_tflops * 1e12
    assert not found.has_bf16


def test_the_hosts_free_memory() -> None:
    host = Host(total_bytes=64 * GIB, available_bytes=48 * GIB, cores=16)
    assert gpu_hardware(machine(card(0), host=host), H100).host_available_bytes == 48 * GIB


def test_a_cpu_by_its_cores() -> None:
    host = Host(total_bytes=64 * GIB, available_bytes=48 * GIB, cores=16)
    one = cpu_hardware(Machine(origin="cpu", spec="cpu", host=host))
    assert (one.device, one.gpus_per_node, one.capacity_bytes) == ("cpu", 1, 48 * GIB)
    assert (one.matmul_flops, one.bandwidth) == (16 * CPU_CORE_FLOPS, CPU_BANDWIDTH)
    assert one.has_bf16
    two = cpu_hardware(Machine(origin="cpu", spec="cpu", host=host, nodes=3), processes=2)
    assert (two.gpus_per_node, two.num_gpus, two.capacity_bytes) == (2, 6, 24 * GIB)
    assert (two.matmul_flops, two.bandwidth) == (8 * CPU_CORE_FLOPS, CPU_BANDWIDTH / 2)


def test_a_cpu_without_bf16_kernels() -> None:
    """A core of a Zen 3 took 2.35 s for 1024 x 1024 x 1024 in bf16 and 0.026 s in fp32 (torch 2.13)."""
    hosts = {known: Host(total_bytes=GIB, available_bytes=GIB, cores=4, bf16=known) for known in (True, False, None)}
    found = {known: cpu_hardware(Machine(origin="cpu", spec="cpu", host=host)) for known, host in hosts.items()}
    assert {known: h.fp32_flops for known, h in found.items()} == dict.fromkeys(found, 4 * CPU_CORE_FLOPS)
    rates = {known: h.matmul_flops for known, h in found.items()}
    assert rates[True] == rates[None] == 4 * CPU_CORE_FLOPS
    assert rates[False] == pytest.approx(4 * CPU_CORE_FLOPS * 0.026 / 2.35, rel=0.2)


def test_a_cpu_that_nobody_looked_at() -> None:
    found = cpu_hardware(Machine(origin="cpu", spec="cpu"))
    assert (found.capacity_bytes, found.matmul_flops) == (None, CPU_CORE_FLOPS)
    assert found.others_bytes(1) == 0
    assert found.cards_for(1) == []


def test_bf16_of_an_unknown_capability_is_assumed() -> None:
    values: dict[str, Any] = dict.fromkeys(
        ("capacity_bytes", "matmul_flops", "fp32_flops", "bandwidth", "link", "host_link")
    )
    assert Hardware(device="cuda", name="card", gpus_per_node=1, **values).has_bf16
