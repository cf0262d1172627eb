"""From bytes at a few lengths to functions of tokens: a line with a square term, or the highest of several.

Every moment of a layer is affine in the tokens, the highest moment is not: at short lengths weight gradients decide,
at long ones activations. So each moment is fitted on its own and those that are ever the highest are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Line = tuple[float, float, float]
"""Bytes per token, constant bytes, bytes per (token, position of its sequence)."""

NEGLIGIBLE = 1e-4
"""Share of a value below which a term is noise (allocation rounding)."""
_LENGTHS = [2**power * half // 2 for power in range(7, 19) for half in (2, 3)]
_SAMPLES = tuple((length * rows, length) for length in _LENGTHS for rows in (1, 8))


def at(line: Line, tokens: float, sequence: float) -> float:
    """Value of one line."""
    return line[0] * tokens + line[1] + line[2] * tokens * sequence


def fit(lengths: Sequence[int], values: Sequence[float], noise: float = 4096.0) -> Line:
    """The line through all but the last length, one sequence each: straight through two, with a square through three.

    Args:
        lengths: tokens; the last is for the check.
        values: what was seen at them.
        noise: a constant up to this is none.
    """
    s1, s3, v1, v3 = lengths[0], lengths[-2], values[0], values[-2]
    square = 0.0
    if len(lengths) == 4:
        s2, v2 = lengths[1], values[1]
        square = ((v3 - v1) / (s3 - s1) - (v2 - v1) / (s2 - s1)) / (s3 - s2)
    if abs(square) * s3 * s3 <= NEGLIGIBLE * max(abs(v3), 1.0):
        square = 0.0
    slope = (v3 - v1) / (s3 - s1) - square * (s1 + s3)
    constant = v1 - slope * s1 - square * s1 * s1
    if abs(slope) * s3 <= NEGLIGIBLE * max(abs(v3), 1.0):
        slope = 0.0
    if abs(constant) <= max(NEGLIGIBLE * abs(v1), noise):
        constant = 0.0
    return (slope, constant, square)


def fit_work(lengths: Sequence[int], values: Sequence[float]) -> Line:
    """``fit`` for counts: what grows with the square alone, as attention's products do, is known from two lengths."""
    pairs = [value / length**2 for length, value in zip(lengths, values, strict=True)]
    if pairs[0] and max(pairs) - min(pairs) <= 1e-9 * pairs[0]:
        return (0.0, 0.0, pairs[0])
    return fit(lengths, values, 0.5)


def chords(lengths: Sequence[int], values: Sequence[float]) -> list[Line]:
    """Straight lines between neighbouring lengths, the last one left for the check: a highest moment is convex."""
    points = sorted(zip(lengths[:-1], values[:-1], strict=True))
    lines: list[Line] = []
    for (s1, v1), (s2, v2) in itertools.pairwise(points):
        slope = (v2 - v1) / (s2 - s1)
        lines.append((slope, v1 - slope * s1, 0.0))
    return lines


def slope_in_r(lengths: Sequence[int], low: Sequence[float], high: Sequence[float], step: int) -> tuple[float, float]:
    """(bytes per token and rank, constant bytes per rank) from the first two lengths at two ranks."""
    s1, s2 = lengths[:2]
    d1, d2 = ((h - v) / step for v, h in zip(low[:2], high[:2], strict=False))
    slope = (d2 - d1) / (s2 - s1)
    return (slope, d1 - slope * s1)


def partners(runs: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(operators at the start, operators at the end) that all runs share; a loop in between runs more often in some."""
    shortest = min(len(run) for run in runs)
    first = 0
    while first < shortest and len({run[first] for run in runs}) == 1:
        first += 1
    last = 0
    while last < shortest - first and len({run[-1 - last] for run in runs}) == 1:
        last += 1
    return first, last


def envelope(lines: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The fewest of ``lines`` whose highest is within a thousandth of the highest of all.

    Looked at from 128 to 393,216 tokens in steps of a half, in one sequence and in a batch of eight.
    """
    different = list(dict.fromkeys(lines))
    tops: list[tuple[float, tuple[float, ...], tuple[int, int]]] = []
    for tokens, sequence in _SAMPLES:
        pairs = tokens * sequence
        values = [line[0] * tokens + line[1] + line[2] * pairs for line in different]
        highest = max(values)
        tops.append((highest, different[values.index(highest)], (tokens, sequence)))
    kept: list[tuple[float, ...]] = []
    while True:
        worst, missing = 0.001, None
        for highest, top, sample in tops:
            reached = max((at(line[:3], *sample) for line in kept), default=float("-inf"))
            short = (highest - reached) / max(abs(highest), 1.0)
            if short > worst:
                worst, missing = short, top
        if missing is None:
            return kept
        kept.append(missing)
