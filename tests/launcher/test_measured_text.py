"""Measurements as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.text.measured import measurement_text, shown_text


def rates(flops_per_s: float) -> dict[str, Any]:
    product = {"dtype": "bfloat16", "m": 64, "n": 2048, "k": 1024, "flops_per_s": flops_per_s}
    return {
        "kind": "rates",
        "name": "AMD EPYC",
        "threads": 1,
        "versions": {"torch": "2.13.0"},
        "taken": "2026-11-30T19:29:44",
        "rates": {"products": [product], "streaming_bytes_per_s": 6.2e9},
    }


@pytest.mark.parametrize(
    ("flops_per_s", "full", "short"),
    [(6.124e14, "612.40 TFLOP/s", "612.4 TFLOP/s"), (1.94e9, "1.94 GFLOP/s", "1.9 GFLOP/s")],
)
def test_a_slow_product_does_not_read_as_none(flops_per_s: float, full: str, short: str) -> None:
    document = rates(flops_per_s)
    assert full in measurement_text(document)
    assert short in shown_text([("a.json", document)])
