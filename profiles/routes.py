"""Precision routes as data: how each operand of each product is quantised, on what it runs, and what was published."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

_TABLE = Path(__file__).with_name("routes.toml")

Status = Literal["here", "with", "reference"]
Launch = Literal["none", "accelerate", "torchao-float8", "torchao-mx", "te"]
PRODUCTS = ("input", "igrad", "wgrad")
"""Forward Y = X W^T, input gradient dX = dY W, weight gradient dW = dY^T X; operands in that order."""
EMULATED = ":emulated"
"""Behind a route's id: its numerics by the reference layer, on any machine and slower than bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiser:
    """What one operand of a product becomes."""

    values: Literal["bf16", "e4m3", "e5m2", "e2m1"] = "bf16"
    """The grid that values are rounded to."""
    scale: Literal["none", "fp32", "e8m0", "e4m3"] = "none"
    """What one group of values shares."""
    block: int = 0
    """Values along the contraction that share a scale; 0 is all of them."""
    rows: int = 1
    """Rows that share it as well; 0 is all of them."""
    rule: Literal["exact", "power-of-two", "ceiling", "enclosing", "finer", "history"] = "exact"
    """How the scale follows from the group's maximum."""
    second: Literal["none", "tensor", "tile"] = "none"
    """Who shares a further float32 scale."""
    stochastic: bool = False
    hadamard: int = 0
    """Width of the Hadamard transform along the contraction; 0 is none."""

    @property
    def is_low(self) -> bool:
        """Fewer than 16 bits."""
        return self.values != "bf16"

    def to_json(self) -> dict[str, object]:
        """Plain JSON, as the training side's reference reads it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What somebody measured with a route, and what to hold against it."""

    model: str
    gpu: str
    tokens_per_s: float | None
    """Per GPU; None where only a ratio is given."""
    bf16_tokens_per_s: float | None
    """The same source's bf16 run."""
    speedup: float | None
    loss_percent: float | None
    """Final training loss above bf16's."""
    held_out_nll: float | None
    tasks: Mapping[str, float]
    """Downstream accuracy in percent."""
    memory_gib: float | None
    caveat: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteMemory:
    """What a route adds to, or saves of, the memory of bf16."""

    weight_copy_bytes: float
    """Per weight of a converted layer while it computes, both layouts."""
    input_bytes: float
    """Per element of a converted layer's input that is kept for backward; 2 keeps bf16's."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTime:
    """What a route's products and its quantising cost."""

    peak: Literal["bf16", "fp8", "fp4"]
    """The rate of the card's table that products reach a share of."""
    share: float
    quantise_bytes: float
    """Moved outside the product per value of an operand, for both layouts."""
    passes_bytes: float = 0.0
    """Moved by passes of their own before that: a maximum over the whole tensor."""
    bandwidth: float
    """Share of the card's bandwidth that this traffic reaches."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One whole recipe; nothing of it may be exchanged without another validation."""

    id: str
    name: str
    status: Status
    launch: Launch
    recipe: str
    """Name of the recipe in the package that converts; empty where there is none to name."""
    operands: Mapping[str, tuple[Quantiser, Quantiser]]
    """Product -> its two operands."""
    resolved: str
    """Which values share a scale."""
    waits: str
    """What must be finished before the first value is rounded."""
    rounding: str
    keeps: tuple[str, ...]
    """What stays in bf16."""
    keep_last: int
    """Decoder blocks at the end that stay in bf16."""
    layouts: str
    """What one quantisation produces for products that read an operand in two orientations."""
    capability_from: tuple[int, int] | None
    capability_to: tuple[int, int] | None
    """Compute capabilities, both ends included; None is open."""
    why_capability: str
    on_cpu: bool
    """Its package runs it on a CPU too."""
    packages: Mapping[str, str]
    """Package -> oldest version."""
    cuda: str | None
    """Oldest CUDA."""
    features: int
    """Widths of converted layers are multiples of it."""
    tokens: int
    """And tokens of a micro-batch of this."""
    needs_half_weights: bool
    needs_no_recompute: bool
    unties_head: bool
    """The converter makes a copy of a head that is tied to the embedding."""
    memory: RouteMemory
    time: RouteTime
    loss: str
    """The price: what is known of the loss against bf16."""
    source: str
    published: tuple[Published, ...]

    @property
    def low_products(self) -> int:
        """Products of three that run below 16 bits."""
        return sum(all(operand.is_low for operand in self.operands[product]) for product in PRODUCTS)


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


@cache
def load_routes() -> tuple[Route, ...]:
    """Every route, bf16 first, then from eight bits to four."""
    document = _document()
    quantisers = {"bf16": Quantiser(rows=1)}
    quantisers |= {name: Quantiser(**entry) for name, entry in document["quantiser"].items()}
    return tuple(_route(entry, quantisers) for entry in document["route"])


def spelled_out(text: str) -> str:
    """A source with its abbreviations, ``[te]``, written out."""
    for name, source in _document()["sources"].items():
        text = text.replace(f"[{name}]", source)
    return text


def find_route(text: str) -> Route:
    """The route that ``text`` names, ``:emulated`` behind it or not.

    Raises:
        LookupError: there is none; the message lists what there is.
    """
    wanted = text.removesuffix(EMULATED)
    for route in load_routes():
        if route.id == wanted:
            return route
    raise LookupError(f"no precision route {text!r}; known: {', '.join(route.id for route in load_routes())}")


def operand(text: str, quantisers: Mapping[str, Quantiser]) -> Quantiser:
    """A quantiser's name with what is put before it: ``nvfp4+sr+h16``."""
    name, *more = text.split("+")
    found = quantisers[name]
    for word in more:
        found = (
            replace(found, stochastic=True) if word == "sr" else replace(found, hadamard=int(word.removeprefix("h")))
        )
    return found


def _route(entry: dict[str, Any], quantisers: Mapping[str, Quantiser]) -> Route:
    operands = {p: (operand(entry[p][0], quantisers), operand(entry[p][1], quantisers)) for p in PRODUCTS}
    low, high = (_capability(text) for text in entry["capability"])
    packages = dict(text.split(">=") for text in entry["packages"])
    return Route(
        id=entry["id"],
        name=entry["name"],
        status=entry["status"],
        launch=entry["launch"],
        recipe=entry.get("recipe", ""),
        operands=MappingProxyType(operands),
        resolved=entry["resolved"],
        waits=entry["waits"],
        rounding=entry["rounding"],
        keeps=tuple(entry["keeps"]),
        keep_last=entry.get("keep_last", 0),
        layouts=entry["layouts"],
        capability_from=low,
        capability_to=high,
        why_capability=entry["why_capability"],
        on_cpu=entry.get("on_cpu", entry["id"] == "bf16"),
        packages=MappingProxyType(packages),
        cuda=entry.get("cuda"),
        features=entry["features"],
        tokens=entry["tokens"],
        needs_half_weights=entry.get("needs_half_weights", False),
        needs_no_recompute=entry.get("needs_no_recompute", False),
        unties_head=entry.get("unties_head", False),
        memory=RouteMemory(**entry["memory"]),
        time=RouteTime(**entry["time"]),
        loss=entry["loss"],
        source=entry["source"],
        published=tuple(_published(row) for row in entry.get("published", ())),
    )


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if text else None


def _published(row: dict[str, Any]) -> Published:
    optional = ("tokens_per_s", "bf16_tokens_per_s", "speedup", "loss_percent", "held_out_nll", "memory_gib")
    return Published(
        model=row["model"],
        gpu=row["gpu"],
        tasks=MappingProxyType(row.get("tasks", {})),
        caveat=row["caveat"],
        source=row["source"],
        **{name: row.get(name) for name in optional},
    )
