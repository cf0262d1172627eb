"""Memory of a precision route: copies of the weights it quantises, and inputs that it keeps in fewer bits.

Not "half of bf16": weights, gradients and optimizer states stay as they are, and what a layer keeps is a copy of its
own of what three layers share in bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.architecture import Architecture, LayerKind
from planner.memory.activations import ActivationsAt, LayerAt, ModeAt
from planner.precision.route_time import covered_linears

if TYPE_CHECKING:
    from profiles.routes import Route

BF16_BYTES = 2.0
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",))
"""Linears that read one tensor which nothing but them keeps for backward: bf16 holds it once, and a route that keeps
its own copies lets it go. The input of ``o_proj`` stays with attention."""
EMULATED_COPIES_BYTES = 16.0
"""Per element of the operands of one layer: padded, divided, rounded and decoded in float32. By hand."""


def with_route(
    at: ActivationsAt, architecture: Architecture, route: Route, tokens: int, *, emulated: bool
) -> ActivationsAt:
    """``at`` under ``route``: what layers keep, and their working sets.

    Args:
        at: in bf16, at one token count.
        architecture: shapes.
        route: the route.
        tokens: of the micro-batch on this rank.
        emulated: by the reference layer, which keeps what bf16 keeps.
    """
    # Blocks at the end that stay in bf16 are of the same kinds: each layer is charged their share less.
    share = max(0.0, 1.0 - route.keep_last / max(1, architecture.num_layers))
    kinds = [
        _emulated(layer, kind, route, tokens) if emulated else _quantised(layer, kind, route, tokens, share)
        for layer, kind in zip(at.kinds, architecture.kinds, strict=True)
    ]
    return ActivationsAt(tuple(kinds), at.model_saved, at.final_norm, at.model_saved_none)


def kept_bytes(kind: LayerKind, route: Route) -> float:
    """Change of what one layer keeps of its inputs per token, against bf16."""
    per_element = route.memory.input_bytes
    if per_element >= BF16_BYTES:
        return 0.0
    linears = {m.name: m for m in covered_linears(kind, route.features)}
    kept = per_element * sum(m.count * m.in_features for m in linears.values())
    let_go = 0.0
    for names in SHARED_INPUTS:
        readers = [linears[name] for name in names if name in linears]
        # One that is not converted keeps the tensor for all.
        if readers and all(name in linears for name in names if any(m.name == name for m in kind.linears)):
            let_go += BF16_BYTES * readers[0].in_features
    return kept - let_go


def copied_bytes(kind: LayerKind, route: Route) -> float:
    """Quantised copies of one layer's weights, whole on every rank, both layouts."""
    return route.memory.weight_copy_bytes * sum(m.num_weights for m in covered_linears(kind, route.features))


def _quantised(layer: LayerAt, kind: LayerKind, route: Route, tokens: int, share: float) -> LayerAt:
    copies = copied_bytes(kind, route)
    # Backward needs the other layout of the weight, and the input as it was kept.
    kept = int(share * (kept_bytes(kind, route) * tokens + copies / 2.0))
    more = int(copies)
    return LayerAt(
        ModeAt(
            max(0, layer.none.kept + kept),
            layer.none.forward + more,
            layer.none.backward + more,
            layer.none.attention_backward + more,
        ),
        *(
            ModeAt(mode.kept, mode.forward + more, mode.backward + max(0, kept) + more, mode.attention_backward + more)
            for mode in (layer.full, layer.selective)
        ),
    )


def _emulated(layer: LayerAt, kind: LayerKind, route: Route, tokens: int) -> LayerAt:
    linears = covered_linears(kind, route.features)
    operands = max(
        (tokens * (m.in_features + m.out_features) + m.in_features * m.out_features for m in linears), default=0
    )
    more = int(EMULATED_COPIES_BYTES * operands)
    return LayerAt(
        *(
            ModeAt(mode.kept, mode.forward + more, mode.backward + more, mode.attention_backward + more)
            for mode in (layer.none, layer.full, layer.selective)
        )
    )
