"""How long the sequences of the data are, drawn: bars over tokens, where the length of the job cuts, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from rich.text import Text

BLOCKS, ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:#"


def cut_count(lengths: Sequence[int], seq_len: int) -> int:
    """How many are longer than the job keeps."""
    return sum(length > seq_len for length in lengths)


def words(lengths: Sequence[int], seq_len: int) -> str:
    """``p50 312  p95 488  max 583 tokens; 3 of 200 are cut at 512``.

    Args:
        lengths: tokens of each sequence, shortest first, at least one.
        seq_len: what the job keeps of each.
    """
    cut, many = cut_count(lengths, seq_len), len(lengths)
    share = f"{cut:,} of {many:,} ({cut / many:.0%}) are cut" if cut else f"none of {many:,} is cut"
    places = "  ".join(f"{name} {percentile(lengths, of):,}" for name, of in (("p50", 50), ("p95", 95)))
    return f"{places}  max {lengths[-1]:,} tokens; {share} at {seq_len:,}"


def percentile(lengths: Sequence[int], percent: int) -> int:
    """Smallest of the ordered ``lengths`` with at least ``percent`` of them at or below it."""
    return lengths[max(0, -(-percent * len(lengths) // 100) - 1)]


def histogram(lengths: Sequence[int], seq_len: int, *, width: int, height: int, unicode: bool = True) -> Text:
    """Bars of counts over tokens from 0 to the longest, an axis that says what is cut, and its numbers.

    Args:
        lengths: tokens of each sequence, shortest first, at least one.
        seq_len: marked on the axis where it lies among the lengths; behind it sequences are cut.
        width: cells of each line, at least 20.
        height: lines of bars, at least 1.
        unicode: whether the terminal has more than ASCII.

    Returns:
        ``height`` lines of bars and two of the axis.
    """
    longest = max(1, lengths[-1])
    bins = min(width, max(8, 3 * isqrt(len(lengths))))  # more of them than rows would be noise
    counts = [0] * bins
    for length in lengths:
        counts[length * bins // (longest + 1)] += 1
    counts = [counts[cell * bins // width] for cell in range(width)]
    blocks = BLOCKS if unicode else ASCII_BLOCKS
    edge = seq_len * width // (longest + 1) if seq_len < longest else None
    found = Text(no_wrap=True)
    for row in reversed(range(height)):
        line = "".join(_block(count / max(counts) * height - row, blocks, row == 0 and count > 0) for count in counts)
        kept = width if edge is None else edge + 1
        found.append(line[:kept])
        found.append(line[kept:] + "\n", "red")
    line, mark = ("─", "┴") if unicode else ("-", "+")
    axis = line * width if edge is None else line * edge + mark + "x" * (width - edge - 1)
    return found.append(axis + "\n").append(_numbers(edge, seq_len, longest, width))


def _block(filled: float, blocks: str, least: bool) -> str:
    """One cell of a bar; a single sequence is still seen in the lowest row."""
    levels = len(blocks) - 1
    return blocks[max(int(least), min(levels, round(filled * levels)))]


def _numbers(edge: int | None, seq_len: int, longest: int, width: int) -> str:
    """Under the axis: 0, the cut where there is one, the longest."""
    last = f"{longest:,}"
    line = list("0" + " " * (width - 1 - len(last)) + last)
    if edge is not None:
        label = f"cut at {seq_len:,}"
        start = min(max(2, edge - len(label) // 2), width - len(last) - len(label) - 1)
        if start >= 2:
            line[start : start + len(label)] = label
    return "".join(line)
