"""Depth: which decoder layers behave alike, and at which of them a peak can be.

Where layers repeat with a period, what is live at like layers is affine in depth: saved tensors, gradients and casts
change by the same amount from one period to the next. So the first and the last of them are the worst, and a walk
through 62 layers looks at a handful.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

OFFLOAD_BANDS = 4
"""Layer inputs alive on the card at once while checkpoints are offloaded (TRL's long-context profile of Qwen3-4B)."""


class Shape(NamedTuple):
    """How one layer behaves."""

    kind: int
    """Index into ``Architecture.kinds``."""
    recompute: Literal["none", "full", "selective"]
    on_card: bool
    """What it keeps from forward to backward stays on the card."""


class Station(NamedTuple):
    """One layer at which the peak can be."""

    shape: int
    """Index into ``Depth.shapes``."""
    before: tuple[int, ...]
    """Layers of each shape nearer to the embedding."""
    place: int
    """Their number."""


@dataclass(frozen=True, slots=True)
class Depth:
    """The decoder under one way of recomputing and offloading."""

    shapes: tuple[Shape, ...]
    totals: tuple[int, ...]
    """Layers of each shape."""
    forward: tuple[Station, ...]
    backward: tuple[Station, ...]


def recomputed_layers(recompute: str, num_layers: int) -> list[Literal["none", "full", "selective"]]:
    """How each layer is recomputed: every n-th means index % n == 0, as transformers applies it."""
    if recompute.startswith("every_"):
        n = int(recompute.removeprefix("every_"))
        return ["none" if index % n else "full" for index in range(num_layers)]
    if recompute == "selective":
        return ["selective"] * num_layers
    return ["full" if recompute == "full" else "none"] * num_layers


@lru_cache(maxsize=256)
def depth_of(order: tuple[int, ...], recompute: str, offloads: bool, *, neighbours: bool = False) -> Depth:
    """The decoder of ``order`` (kinds of its layers) under ``recompute``, checkpoints offloaded or not.

    With ``neighbours`` what is live at a layer depends on the one below and the one above as well, so the first and the
    last layer are like no other.
    """
    first_kept = max(0, len(order) - OFFLOAD_BANDS) if offloads else 0
    again = recomputed_layers(recompute, len(order))
    layers = [Shape(kind, again[index], index >= first_kept) for index, kind in enumerate(order)]
    shapes = tuple(dict.fromkeys(layers))
    ids = [shapes.index(layer) for layer in layers]
    stations: list[Station] = []
    before = [0] * len(shapes)
    for place, shape in enumerate(ids):
        stations.append(Station(shape, tuple(before), place))
        before[shape] += 1
    # On the way forward saved tensors and casts only grow: the last layer of each shape is its worst, and the first one
    # where what the embedding leaves behind is there.
    last = {(ids[index - 1], shape) if neighbours else shape: index for index, shape in enumerate(ids)}
    first, end = (1, len(ids) - 1) if neighbours else (0, len(ids))
    middle = max(first, min(first_kept, end))
    ends = {*_ends(ids[first:middle], first), *_ends(ids[middle:end], middle)}
    ends |= {0, len(ids) - 1} if neighbours else set()
    return Depth(
        shapes,
        tuple(before),
        tuple(stations[index] for index in sorted({*last.values(), *(ends & {0})})),
        tuple(stations[index] for index in sorted(ends, reverse=True)),
    )


def _ends(shapes: list[int], start: int) -> set[int]:
    """Indices of the first and the last period of ``shapes``, counted from ``start``."""
    count = len(shapes)
    period = next((p for p in range(1, count) if shapes[p:] == shapes[:-p]), count)
    return {start + index for index in (*range(period), *range(count - period, count))}
