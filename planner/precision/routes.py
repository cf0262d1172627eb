"""Precision routes of one machine and stack: which of them can run, and what the others lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from profiles.releases import within
from profiles.routes import EMULATED, Route, find_route, load_routes
from profiles.stacks import load_packages

Lacks = Literal["", "kernels", "card", "package"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The route that a job pins."""

    route: Route
    emulated: bool
    """By the reference layer, on any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """What a route needs that is not there; ``kind`` is empty where nothing is missing."""

    kind: Lacks = ""
    reason: str = ""


def asked_route(pins: Mapping[str, Any]) -> Asked | None:
    """The route of a job's pins; None for bf16.

    Raises:
        LookupError: there is no such route.
    """
    pin = pins.get("precision")
    text = "bf16" if pin is None else str(pin).strip()
    if text == "bf16":
        return None
    route = find_route(text)
    emulated = text.endswith(EMULATED)
    if route.id == "bf16":
        raise LookupError("bf16 needs no emulation: pin precision=bf16")
    return Asked(route=route, emulated=emulated)


def lack_of(
    route: Route,
    *,
    on_cpu: bool,
    capability: tuple[int, int] | None,
    versions: Mapping[str, str],
    cuda: str | None = None,
) -> Lack:
    """The first thing that keeps ``route`` from running there.

    Args:
        route: the route.
        on_cpu: there is no GPU.
        capability: compute capability of the cards, None where it is not known.
        versions: package -> version of the training Python.
        cuda: what its torch was built for, None where that is not known.
    """
    if route.status == "reference":
        text = f"nobody ships kernels that TRL could call; {EMULATED} behind the id trains with its numerics"
        return Lack(kind="kernels", reason=text)
    card = _card_lack(route, on_cpu=on_cpu, capability=capability)
    if card:
        return Lack(kind="card", reason=card)
    for package, oldest in route.packages.items():
        if package not in versions or not within(versions[package], (f">={oldest}",)):
            have = f"{package} {versions[package]} is there" if package in versions else f"{package} is not there"
            newest = load_packages()[package].newest
            text = f"needs {package} >= {oldest}, {have}: install it, or plan with --stack {package}={newest}"
            return Lack(kind="package", reason=text)
    if route.cuda and cuda and not within(cuda, (f">={route.cuda}",)):
        return Lack(kind="package", reason=f"needs CUDA {route.cuda}, torch was built for {cuda}")
    return Lack()


def _card_lack(route: Route, *, on_cpu: bool, capability: tuple[int, int] | None) -> str:
    if on_cpu:
        return "" if route.on_cpu else "needs a GPU"
    low, high = route.capability_from, route.capability_to
    if capability is None:
        return "the card's compute capability is not known"
    if (low is None or capability >= low) and (high is None or capability <= high):
        return ""
    return f"needs {capability_words(route)}, the card has {_dotted(capability)}: {route.why_capability}"


def capability_of(text: str | None) -> tuple[int, int] | None:
    """``9.0`` as two numbers; None where it is not known."""
    if not text:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def capability_words(route: Route) -> str:
    """``compute capability 10.0 to 10.3``."""
    low, high = route.capability_from, route.capability_to
    if low is None:
        return "any card"
    if low == high:
        return f"compute capability {_dotted(low)}"
    return f"compute capability {_dotted(low)} " + (f"to {_dotted(high)}" if high else "or newer")


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def low_routes() -> tuple[Route, ...]:
    """Every route but bf16."""
    return tuple(route for route in load_routes() if route.id != "bf16")
