"""Activations: what layers keep and need at one token count, which the walk through a step reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from planner.memory.coefficients import Coefficients, ModeBytes


class ModeAt(NamedTuple):
    """``ModeBytes`` at one token count."""

    kept: int
    forward: int
    backward: int
    attention_backward: int


class LayerAt(NamedTuple):
    """``LayerBytes`` at one token count."""

    none: ModeAt
    full: ModeAt
    selective: ModeAt


@dataclass(frozen=True, slots=True)
class ActivationsAt:
    """All coefficients at one token count; layers in the order of ``Architecture.kinds``."""

    kinds: tuple[LayerAt, ...]
    model_saved: int
    final_norm: int
    model_saved_none: int | None = None
    """``model_saved`` where no layer is recomputed, None when it is the same."""


def outside_layers(at: ActivationsAt, recomputes: Iterable[str]) -> int:
    """Bytes that the whole model keeps before its layers, whose ways of recomputing are ``recomputes``."""
    if at.model_saved_none is not None and all(recompute == "none" for recompute in recomputes):
        return at.model_saved_none
    return at.model_saved


def mode_of(at: ActivationsAt, kind: int, recompute: str) -> ModeAt:
    """What one layer of a kind holds as it is recomputed."""
    layer = at.kinds[kind]
    if recompute == "none":
        return layer.none
    return layer.selective if recompute == "selective" else layer.full


def activations_at(coefficients: Coefficients, tokens: int, sequence: int) -> ActivationsAt:
    """Evaluate ``coefficients`` for one rank's ``tokens`` in sequences of ``sequence`` tokens."""

    def mode(b: ModeBytes) -> ModeAt:
        return ModeAt(*(a.at(tokens, sequence) for a in (b.kept, b.forward, b.backward, b.attention_backward)))

    return ActivationsAt(
        tuple(LayerAt(mode(b.none), mode(b.full), mode(b.selective)) for b in coefficients.layers),
        coefficients.model_saved.at(tokens, sequence),
        coefficients.final_norm_saved.at(tokens, sequence),
        coefficients.model_saved_none.at(tokens, sequence) if coefficients.model_saved_none else None,
    )
