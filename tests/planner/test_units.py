"""Numbers as people read them."""

from __future__ import annotations

import pytest

from planner.units import GIB, MIB, format_bytes, format_count, format_gib, format_rate, format_seconds


def test_gib() -> None:
    assert (format_gib(62_914_560_000), format_gib(1.5 * GIB, 2), format_gib(2048 * GIB)) == ("58.6", "1.50", "2,048.0")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (MIB, "1.0 MiB"),
        (62_914_560_000, "58.6 GiB"),
        (5000 * GIB, "5,000.0 GiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(8_190_735_360, "8.19 B"), (596_049_920, "596.05 M"), (12_300, "12.30 k"), (999, "999"), (0, "0")],
)
def test_counts(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "under 1 ms"),
        (0.042, "42 ms"),
        (0.0996, "0.10 s"),
        (0.4153, "0.42 s"),
        (34.6, "34.6 s"),
        (119.96, "120.0 s"),
        (380, "6 min 20 s"),
        (7199, "119 min 59 s"),
        (7500, "2 h 05 min"),
        (90_061, "25 h 01 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(61_238.4, "61,238"), (10.0, "10"), (9.96, "10"), (9.94, "9.9"), (0.214, "0.21"), (0, "0")]
)
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text
