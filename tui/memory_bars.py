"""Stacked bars of what fills a card: a line a phase, a letter and a pattern a part, the card's edge, the total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from planner.units import GIB, format_gib

Json = Mapping[str, Any]


class Part(NamedTuple):
    """How one kind of bytes is drawn."""

    letter: str
    fill: str
    ascii_fill: str
    label: str
    colour: str
    names: tuple[str, ...]


PARTS = (
    Part("W", "█", "#", "weights", "blue", ("weights", "casts")),
    Part("G", "▓", "%", "gradients", "cyan", ("gradients",)),
    Part("M", "▒", "m", "master", "magenta", ("master",)),
    Part("O", "░", "o", "moments", "green", ("moment1", "moment2")),
    Part("A", "\u2571", "/", "saved activations", "yellow", ("saved_activations",)),
    Part("R", "╲", "\\", "working activations", "bright_yellow", ("recompute",)),
    Part("L", "≡", "=", "loss", "red", ("loss",)),
    Part("B", "=", "-", "buffers", "bright_blue", ("gather", "buckets", "offload_buffers")),
    Part("X", "·", ".", "context, slack", "white", ("context", "slack")),
)
"""Every part of the memory document belongs to one of these; tests hold that."""
TAKEN = Part("T", "▚", "x", "taken by others", "white", ())
"""Of the card, by processes that are not the run."""
PHASE_CELLS = 10
GAP_CELLS = 2
BETWEEN = "   "
"""Entries of the legend."""
TOTAL_CELLS = 8
"""Least cells of the total and its mark."""


SMALL = 6
"""Where the highest phase is below this part of the card, the bars have a scale of their own."""


def letters() -> str:
    """``W weights, G gradients, ...``."""
    return ", ".join(f"{part.letter} {part.label}" for part in (*PARTS, TAKEN))


def sizes_of(phase: Json) -> list[tuple[Part, int]]:
    """Bytes of each drawn part of a phase that has any."""
    parts = phase["parts"]
    sized = [(part, sum(parts.get(name, 0) for name in part.names)) for part in PARTS]
    return [(part, size) for part, size in sized if size]


def cells_of(sizes: Sequence[int], cells: int) -> list[int]:
    """``cells`` divided by ``sizes``: none loses more than one cell, and they add up (largest remainders)."""
    total = sum(sizes)
    if not total:
        return [0] * len(sizes)
    exact = [size * cells / total for size in sizes]
    given = [int(value) for value in exact]
    order = sorted(range(len(sizes)), key=lambda i: exact[i] - given[i], reverse=True)
    for index in order[: cells - sum(given)]:
        given[index] += 1
    return given


def phase_bar(
    phase: Json, *, capacity: int | None, scale: int, width: int, taken: int = 0, unicode: bool = True
) -> Text:
    """One phase as a line of ``width`` cells.

    Args:
        phase: of the memory document.
        capacity: bytes of the card, marked on the line; None where there is no card.
        scale: bytes that the whole bar stands for.
        width: cells of the line.
        taken: bytes of the card that others hold, drawn from its end.
        unicode: whether the terminal has more than ASCII.
    """
    total_cells = max(TOTAL_CELLS, len(format_gib(scale)) + 2)
    room = max(1, width - PHASE_CELLS - total_cells)
    sizes = sizes_of(phase)
    total = sum(size for _, size in sizes)
    filled = min(room, round(total * room / max(1, scale)))
    bar = Text()
    for (part, size), cells in zip(sizes, cells_of([size for _, size in sizes], filled), strict=True):
        bar.append(_filled(part, size, cells, unicode), part.colour)
    drawn = len(bar)
    bar.append(" " * (room - drawn))
    over = capacity is not None and total > capacity - taken
    if capacity is not None:
        edge, stroke = min(room - 1, round(capacity * room / max(1, scale))), "┃" if unicode else "|"
        if capacity > scale and room - drawn > GAP_CELLS:  # the line is not drawn to its end
            bar = bar[: room - 1 - GAP_CELLS] + Text(("╌" if unicode else "~") * GAP_CELLS + stroke)
        else:
            begins = max(drawn, min(edge, round((capacity - taken) * room / max(1, scale))))
            if capacity <= scale and taken and begins < edge:
                bar = bar[:begins] + Text(_filled(TAKEN, taken, edge - begins, unicode), TAKEN.colour) + bar[edge:]
            if edge >= drawn or total > capacity:
                bar = bar[:edge] + Text(stroke, "bold red" if edge < drawn else "") + bar[edge + 1 :]
    line = Text(f"{phase['name']:<{PHASE_CELLS}}") + bar
    line.append(f"{format_gib(total):>{total_cells - 2}}")
    line.append(" !" if over else "  ", "bold red" if over else "")
    return line


def _filled(part: Part, size: int, cells: int, unicode: bool) -> str:
    """``O15░░░``: letter and GiB where they fit, the pattern over the rest."""
    if not cells:
        return ""
    label = part.letter if cells < 2 else f"{part.letter}{size / GIB:.0f}"
    if len(label) > cells or size < GIB:
        label = part.letter
    return label + (part.fill if unicode else part.ascii_fill) * (cells - len(label))


def memory_bars(memory: Json, *, width: int, taken: int = 0, unicode: bool = True) -> Text:
    """All phases of a memory document, one line each, to the same scale; ``taken`` bytes of the card are others'."""
    totals = [sum(size for _, size in sizes_of(phase)) for phase in memory["phases"]]
    capacity = memory["capacity_bytes"]
    highest = max(totals)
    is_small = capacity is not None and not taken and highest * SMALL < capacity
    scale = int(highest * 1.25 if is_small else max(highest, capacity or 0) * 1.02) or 1
    lines = [
        phase_bar(phase, capacity=capacity, scale=scale, width=width, taken=taken, unicode=unicode)
        for phase in memory["phases"]
    ]
    return Text("\n").join(lines)


def legend(memory: Json, *, width: int, taken: int = 0, unicode: bool = True) -> Text:
    """The parts of the highest phase with their GiB, and what others hold; no entry is broken between lines."""
    peak = next(phase for phase in memory["phases"] if phase["name"] == memory["peak_phase"])
    found, room = Text(), width
    for part, size in [*sizes_of(peak), *([(TAKEN, taken)] if taken else [])]:
        entry = Text(f"{part.letter}{part.fill if unicode else part.ascii_fill} ", part.colour)
        entry.append(f"{part.label} {format_gib(size)}", "default")
        if found:
            fits = len(entry) + len(BETWEEN) <= room
            found.append(BETWEEN if fits else "\n")
            room = room - len(BETWEEN) if fits else width
        found.append_text(entry)
        room -= len(entry)
    return found


def short_legend(memory: Json, *, width: int, taken: int = 0) -> str:
    """What the letters of the highest phase are, for a line of ``width`` cells: the smallest go where need be."""
    peak = next(phase for phase in memory["phases"] if phase["name"] == memory["peak_phase"])
    words = {
        f"{part.letter} {part.label.removesuffix(' activations').split(',')[0]}": size
        for part, size in [*sizes_of(peak), *([(TAKEN, taken)] if taken else [])]
    }
    while words and len("  ".join(words)) > width:
        del words[min(words, key=lambda word: words[word])]
    return "  ".join(words)
