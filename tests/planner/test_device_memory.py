"""From tensors to what the card shows."""

from __future__ import annotations

from typing import Any

import pytest

from planner.choice import Choice
from planner.hardware import Hardware
from planner.memory.device import device_model

MIB = 2**20
ALONE = Choice(method="full", loss_path="fused", recompute="full")
PAIR = Choice(method="full", loss_path="fused", recompute="full", sharding="ddp", dp_replicate=2)


def hardware(**changes: Any) -> Hardware:
    values: dict[str, Any] = {
        "device": "cuda",
        "name": "card",
        "gpus_per_node": 2,
        "capacity_bytes": None,
        "matmul_flops": None,
        "fp32_flops": None,
        "bandwidth": None,
        "link": None,
        "host_link": None,
        "compute_capability": "9.0",
        **changes,
    }
    return Hardware(**values)


@pytest.mark.parametrize(
    ("capability", "workspace"),
    [
        ("9.0", 32 * MIB + 64 * 1024),
        ("10.0", 32 * MIB + 64 * 1024),
        # :4096:2:16:8 is 2 x 4,096 KiB and 8 x 16 KiB.
        ("8.0", 8 * MIB + 128 * 1024),
        ("12.0", 8 * MIB + 128 * 1024),
        (None, 8 * MIB + 128 * 1024),
    ],
)
def test_cublas_workspace(capability: str | None, workspace: int) -> None:
    # One for forward's thread, one for autograd's.
    found = device_model(ALONE, hardware(compute_capability=capability)).at(10_000 * MIB)
    assert found.allocated_bytes == 10_000 * MIB + 2 * workspace


def test_three_metrics() -> None:
    found = device_model(ALONE, hardware()).at(10_000 * MIB)
    assert found.slack_bytes == int(0.03 * found.allocated_bytes)
    assert found.total_bytes == found.allocated_bytes + found.slack_bytes + 500 * MIB
    assert found.reserved_bytes - found.allocated_bytes == found.slack_bytes


def test_segments_that_must_be_whole_cost_more() -> None:
    found = device_model(ALONE, hardware(), expandable_segments=False).at(10_000 * MIB)
    assert found.slack_bytes == int(0.12 * found.allocated_bytes)
    assert device_model(ALONE, hardware(device="cpu"), expandable_segments=False).at(1000).slack_bytes == 0


def test_communicators_of_several_ranks() -> None:
    alone, pair = (device_model(choice, hardware()).at(0).context_bytes for choice in (ALONE, PAIR))
    assert pair - alone == 800 * MIB


def test_a_cpu_has_tensors_alone() -> None:
    found = device_model(PAIR, hardware(device="cpu")).at(12_345)
    assert (found.allocated_bytes, found.reserved_bytes, found.total_bytes, found.slack_bytes) == (
        12_345,
        12_345,
        12_345,
        0,
    )


@pytest.mark.parametrize("size", [0, 1, 999, 123_456_789_012])
def test_the_short_way_is_the_long_one(size: int) -> None:
    for choice in (ALONE, PAIR):
        for kind in (hardware(), hardware(device="cpu")):
            model = device_model(choice, kind)
            assert model.device_bytes(size) == model.at(size).total_bytes
