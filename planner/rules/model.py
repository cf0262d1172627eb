"""What the rules read of a model: yes-or-no facts that decide which libraries can train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from planner.architecture import Architecture
from profiles.releases import context_parallel_blocker, families


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Head counts of the attention layers of one kind."""

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One architecture, boiled down."""

    model_type: str
    vocab: int
    hidden: int
    tied: bool
    vision: bool
    """It holds a vision tower."""
    stacked_experts: bool
    """Experts are 3-D parameters that grouped_mm multiplies."""
    not_full_attention: tuple[str, ...]
    """Layer types that context parallelism cannot express."""
    linear_attention: bool
    heads: tuple[Heads, ...]
    """Distinct head counts of the layers that attend."""
    softcap: bool
    """Attention scores are soft-capped."""
    sinks: bool
    """The softmax carries a learned sink."""
    sdpa: bool
    flash: bool
    """The class accepts a FlashAttention implementation."""
    recomputes: bool
    """The class supports gradient checkpointing."""
    max_positions: int
    rope_type: str
    nested_rope: bool


def read_model(architecture: Architecture, *, stacks_experts: bool) -> ModelFacts:
    """Boil an architecture down; ``stacks_experts``: this transformers stacks a layer's experts."""
    kinds = architecture.kinds
    # A composite model is loaded as its outer class, whose own limits count too.
    types = {
        architecture.model_type,
        str(architecture.config.get("model_type", architecture.model_type)),
    }
    return ModelFacts(
        model_type=architecture.model_type,
        vocab=architecture.vocab,
        hidden=architecture.hidden,
        tied=architecture.tied,
        vision=architecture.vision_parameters > 0,
        stacked_experts=stacks_experts and any(kind.experts is not None for kind in kinds),
        not_full_attention=_not_full_attention(architecture),
        linear_attention="linear" in architecture.attention_kinds,
        heads=_heads(architecture),
        softcap=any(kind.attention_softcap for kind in kinds),
        sinks=any(kind.attention_sinks for kind in kinds) or not types.isdisjoint(families("flash_sinks")),
        sdpa=types.isdisjoint(families("no_sdpa")),
        flash=types.isdisjoint(families("no_flash")),
        recomputes=types.isdisjoint(families("no_recompute")),
        max_positions=architecture.max_positions,
        rope_type=architecture.rope_type,
        nested_rope=architecture.nested_rope,
    )


def _heads(architecture: Architecture) -> tuple[Heads, ...]:
    return tuple(
        dict.fromkeys(
            Heads(
                heads=kind.heads,
                kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
                value_head_dim=kind.value_head_dim or kind.head_dim,
            )
            for kind in architecture.kinds
            if kind.heads and kind.attention in ("full", "sliding", "chunked")
        )
    )


def _not_full_attention(architecture: Architecture) -> tuple[str, ...]:
    """Layer types other than full attention: the config's own words, else shapes, else family."""
    config = architecture.config
    inner = config.get("text_config") if architecture.is_composite else None
    text = cast("dict[str, object]", inner) if isinstance(inner, dict) else config
    named = text.get("layer_types")
    if isinstance(named, list) and named:
        words = [str(word) for word in cast("list[object]", named)]
        return tuple(dict.fromkeys(word for word in words if word != "full_attention"))
    shapes = tuple(f"{kind}_attention" for kind in architecture.attention_kinds if kind not in ("full", "none"))
    if shapes:
        return shapes
    blocker = context_parallel_blocker(architecture.model_type)
    return (blocker,) if blocker else ()
