"""Bars, charts and columns: what is drawn adds up to what is said."""

from __future__ import annotations

from typing import Any

import pytest

from planner.memory.phases import PARTS as PHASE_PARTS
from tui.columns import fit
from tui.memory_bars import PARTS, cells_of, legend, memory_bars, phase_bar
from tui.run_view import chart

GIB = 2**30


def memory(**loss: int) -> dict[str, Any]:
    phases = [
        {"name": "load", "bytes": 0, "parts": {"weights": 20 * GIB, "context": GIB}},
        {"name": "loss", "bytes": 0, "parts": {name: size * GIB for name, size in loss.items()}},
    ]
    return {"phases": phases, "peak_phase": "loss", "capacity_bytes": 80 * GIB}


def test_every_part_of_a_phase_is_drawn_as_one_thing() -> None:
    names = [name for part in PARTS for name in part.names]
    assert sorted(names) == sorted(PHASE_PARTS)
    assert len({part.letter for part in PARTS}) == len({part.fill for part in PARTS}) == len(PARTS)
    assert all(part.ascii_fill.isascii() for part in PARTS)


@pytest.mark.parametrize(
    ("sizes", "cells", "expected"),
    [
        ([1, 1], 4, [2, 2]),
        ([3, 1], 8, [6, 2]),
        ([1, 1, 1], 4, [2, 1, 1]),
        ([10, 0, 0], 3, [3, 0, 0]),
        ([0, 0], 3, [0, 0]),
        ([1, 99], 10, [0, 10]),
    ],
)
def test_cells_add_up(sizes: list[int], cells: int, expected: list[int]) -> None:
    assert cells_of(sizes, cells) == expected


def test_half_of_the_card_is_half_of_the_line() -> None:
    phase = {"name": "loss", "parts": {"weights": 20 * GIB, "loss": 20 * GIB}}
    line = phase_bar(phase, capacity=80 * GIB, scale=80 * GIB, width=98).plain
    assert len(line) == 98
    bar = line[10:90]
    # 40 of 80 GiB over 80 cells: 20 cells each, then the card's edge in the last cell.
    assert bar[:20].startswith("W20█") and bar[20:40].startswith("L20≡")
    assert set(bar[40:79]) == {" "} and bar[79] == "┃"
    assert line.rstrip().endswith("40.0")


def test_terabytes_stay_on_their_line() -> None:
    lines = memory_bars(memory(weights=1000, moment1=9000, loss=2345), width=80).plain.splitlines()
    assert [len(line) for line in lines] == [80, 80] and lines[1].endswith("12,345.0 !")


def test_over_the_card_is_marked_by_shape() -> None:
    over = memory_bars(memory(weights=60, loss=30), width=80).plain.splitlines()[1]
    assert over.rstrip().endswith("90.0 !")
    under = memory_bars(memory(weights=40, loss=30), width=80).plain.splitlines()[1]
    assert "!" not in under and "┃" in under


def test_without_unicode() -> None:
    text = memory_bars(memory(weights=30, loss=20, saved_activations=10, recompute=5), width=80, unicode=False).plain
    assert text.isascii()
    assert legend(memory(weights=30, loss=20), width=80, unicode=False).plain.isascii()


def test_the_legend_is_of_the_peak() -> None:
    assert legend(memory(weights=30, moment1=5, moment2=5), width=80).plain.split("   ")[:2] == [
        "W█ weights 30.0",
        "O░ moments 10.0",
    ]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_any_width_is_filled(width: int) -> None:
    assert {len(line) for line in memory_bars(memory(weights=30, loss=20), width=width).plain.splitlines()} == {width}


def test_columns_go_by_importance() -> None:
    widths, priorities = [5, 10, 20, 5], [0, 2, 3, 1]
    assert fit(widths, priorities, 100) == [0, 1, 2, 3]
    assert fit(widths, priorities, 30) == [0, 1, 3]
    assert fit(widths, priorities, 14) == [0, 3]
    assert fit(widths, priorities, 1) == [0]


def test_the_chart_shows_values_and_the_prediction() -> None:
    lines = chart([0, 25, 50, 100], predicted=75, width=8, height=4)
    assert [len(line) for line in lines] == [8] * 4
    columns = ["".join(line[x] for line in lines) for x in range(8)]
    assert columns[7] == "████" and columns[6] == " ─██" and columns[5] == " ─ █"
    # The prediction is three quarters up, across all that is not filled.
    assert lines[1][:7] == "─" * 7
    assert chart([1], predicted=None, width=3, height=2, unicode=False) == ["  #", "  #"]
