"""Waits: which resource of the machine a step waits for, asked of the time model by taking each limit away."""

from __future__ import annotations

from dataclasses import replace

from planner.choice import Choice
from planner.hardware import Hardware
from planner.time.step import TimeEstimate, TimeModel

RESOURCES = ("compute", "memory", "link", "host_link", "launches", "host")
"""The card's arithmetic; its memory's bandwidth; the link between cards; the one to the host; starting kernels that no
work hides; work on the host."""
LIFTED = ("link", "host_link", "memory", "compute")
"""In this order: for the links only what computation does not hide then counts."""
FREE = 1e9
"""A rate this many times as high costs nothing."""


def waits(model: TimeModel, choice: Choice) -> dict[str, float] | None:
    """Share of a step spent waiting for each resource, which add up to 1; None where the card's rates are not known.

    Limits are lifted one after the other. What a lifted limit saves is what the step waited for it.
    """
    whole = model.estimate(choice)
    if whole is None or whole.step_s <= 0:
        return None
    hardware, last = model.hardware, _without_launches(whole)
    seconds = dict.fromkeys(RESOURCES, 0.0)
    for resource in LIFTED:
        hardware = _without_limit(hardware, resource)
        found = replace(model, hardware=hardware).estimate(choice)
        assert found is not None, "rates that are known stay known"
        left = _without_launches(found)
        seconds[resource], last = max(0.0, last - left), left
    seconds["launches"], seconds["host"] = whole.parts["other"], last
    total = sum(seconds.values())
    return {resource: spent / total for resource, spent in seconds.items()}


def _without_launches(time: TimeEstimate) -> float:
    """Work that shrinks uncovers launches that were hidden behind it; they are not what it waited for."""
    return time.step_s - time.parts["other"]


def _without_limit(hardware: Hardware, resource: str) -> Hardware:
    def lifted(rate: float | None) -> float | None:
        return None if rate is None else rate * FREE

    if resource == "link":
        return replace(hardware, link=lifted(hardware.link or 1.0), node_link=hardware.node_link * FREE)
    if resource == "host_link":
        return replace(hardware, host_link=lifted(hardware.host_link))
    if resource == "memory":
        return replace(hardware, bandwidth=lifted(hardware.bandwidth))
    return replace(hardware, matmul_flops=lifted(hardware.matmul_flops), fp32_flops=lifted(hardware.fp32_flops))
