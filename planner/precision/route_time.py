"""Time of a precision route: products of the layers it covers at its own rate, and the traffic of its quantising.

Nothing else of the step changes: attention, norms, loss, optimizer and links stay what they are in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from planner.architecture import Architecture, LayerKind, Linear
from planner.hardware import Hardware
from planner.time.rates import MATMUL, Rates

if TYPE_CHECKING:
    from profiles.routes import Route

EMULATION_BYTES = 96.0
"""Moved per value of an operand by the reference layer: a dozen eager kernels that read and write float32. By hand."""
SEPARATE_NAMES = ("gate", "router", "shared_expert_gate")
"""Linears of a layer that no route converts."""


class RouteWork(NamedTuple):
    """What a route covers of the work of one token on one rank, all layers together."""

    flops: float
    """Of products below 16 bits, forward and backward."""
    flops_again: float
    """Of those of recomputed forwards."""
    values: float
    """Elements of inputs and output gradients that are quantised."""
    values_again: float
    weights: float
    """Elements of weights, which each micro-batch quantises."""


class RouteSeconds(NamedTuple):
    """What a route changes, in seconds per token and per micro-batch; negative is faster."""

    matmul: float
    recompute: float
    quantising: float
    quantising_per_batch: float


def covered_linears(kind: LayerKind, features: int) -> tuple[Linear, ...]:
    """The linears of one layer that a route with such groups converts: dense ones of fitting widths."""
    return tuple(
        [
            m
            for m in kind.linears
            if m.name not in SEPARATE_NAMES
            and m.tokens_share == 1.0
            and not (m.in_features % features or m.out_features % features)
        ]
    )


def covered_kinds(architecture: Architecture, route: Route) -> Iterator[tuple[int, LayerKind, tuple[Linear, ...]]]:
    """Of each kind how many layers the route converts, and its linears there."""
    converted = architecture.order[: max(0, architecture.num_layers - route.keep_last)]
    for index, kind in enumerate(architecture.kinds):
        yield converted.count(index), kind, covered_linears(kind, route.features)


def route_work(architecture: Architecture, route: Route, again: float) -> RouteWork:
    """Work that ``route`` covers; ``again`` is the share of layers whose forward runs twice."""
    products = 2.0 * route.low_products
    flops = flops_again = values = values_again = every_weight = 0.0
    for layers, kind, linears in covered_kinds(architecture, route):
        weights = sum([m.num_weights for m in linears])
        # A recompute stops before the layer's last product unless a norm follows it (planner.time.work).
        last = linears[-1] if linears and linears[-1].role == "mlp" and kind.num_norms <= 2 else None
        needed = [m for m in linears if m is not last]
        # Each layer quantises its own input, also where three read the same one.
        flops += layers * products * weights
        flops_again += layers * again * 2.0 * sum([m.num_weights for m in needed])
        values += layers * sum([m.count * (m.in_features + m.out_features) for m in linears])
        values_again += layers * again * sum([m.count * m.in_features for m in needed])
        every_weight += layers * weights * (1.0 + again)
    return RouteWork(flops, flops_again, values, values_again, every_weight)


def low_peak(hardware: Hardware, route: Route) -> float | None:
    """The card's rate for the route's products, FLOP/s; None where it is not known."""
    return {"bf16": hardware.matmul_flops, "fp8": hardware.fp8_flops, "fp4": hardware.fp4_flops}[route.time.peak]


def route_seconds(
    work: RouteWork, route: Route, hardware: Hardware, rates: Rates, *, instead_of: float, emulated: bool
) -> RouteSeconds:
    """What the route changes on this card.

    Args:
        work: what it covers.
        route: its rates.
        hardware: the card.
        rates: the card's in bf16.
        instead_of: FLOP/s of the same products without the route.
        emulated: the reference layer multiplies decoded operands in fp32.
    """
    bandwidth, peak = rates.elementwise, low_peak(hardware, route)
    if emulated or peak is None:
        # Nobody gives a rate for FP8 products on a CPU, and torch's are no faster there than fp32's.
        rate, per_value = rates.fp32_matmul, EMULATION_BYTES
    else:
        # What the card's best product reaches of its data sheet scales all products alike.
        rate = route.time.share * peak * rates.matmul / (MATMUL * rates.peak)
        per_value = route.time.quantise_bytes + route.time.passes_bytes
        bandwidth = route.time.bandwidth * (hardware.bandwidth or 0.0)
    per_flop = 1.0 / rate - 1.0 / instead_of
    return RouteSeconds(
        matmul=work.flops * per_flop,
        recompute=work.flops_again * per_flop,
        quantising=(work.values + work.values_again / 2.0) * per_value / bandwidth,
        quantising_per_batch=work.weights * per_value / bandwidth,
    )
