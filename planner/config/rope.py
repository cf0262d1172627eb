"""Rope: the rotary position settings of a config, as transformers 4 and transformers 5 spell them.

Version 4 writes ``rope_theta`` beside an optional ``rope_scaling``; version 5 one
``rope_parameters``, which some families nest by layer type. The precedence is that of transformers
5.24 (``convert_rope_params_to_dict``).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.config.family import Family
from planner.config.fields import Fields

LAYER_TYPES: frozenset[str] = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
)
"""The keys under which transformers nests ``rope_parameters``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """What ``Architecture`` keeps of it; of nested settings those of the full-attention layers."""

    theta: float | None
    type: str
    nested: bool
    partial_factor: float


def read_rope(fields: Fields, family: Family) -> Rope:
    """The rotary settings of a text config, with the family's own where the config is silent.

    Raises:
        UnreadableConfig: a setting has the wrong type.
    """
    legacy = _stated(fields, "rope_scaling")
    stated = legacy or _stated(fields, "rope_parameters")
    scaling = stated or Fields({}, "rope_parameters")
    nested = family.nested_rope
    # Merged into nested settings that already hold a ``rope_type``, the older spelling goes unread.
    unread = nested and legacy is not None
    if not LAYER_TYPES.isdisjoint(scaling.values):
        nested = True
        scaling = _stated(scaling, "full_attention") or Fields({}, "full_attention")
    base = scaling.number("rope_theta")
    if base is None:
        base = fields.number("rope_theta")
    kind = scaling.text("rope_type") or (None if unread else scaling.text("type"))
    if kind is None:
        kind = "default" if stated else family.rope_type
    share = scaling.number("partial_rotary_factor")
    if share is None:
        share = fields.number("partial_rotary_factor")
    return Rope(
        theta=family.theta if base is None else base,
        type=family.rope_types.get(kind, kind),
        nested=nested,
        partial_factor=family.partial_rotary_factor if share is None else share,
    )


def _stated(fields: Fields, key: str) -> Fields | None:
    """The section, or None when it is absent or empty: transformers treats both alike here."""
    section = fields.section(key)
    return section if section is not None and section.values else None
