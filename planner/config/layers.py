"""Layers: from a checked text config and its family to the kinds of layer and their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.architecture import AttentionKind, FusedExperts, LayerKind, Linear
from planner.config.family import Family, Mixture, Rule
from planner.config.fields import MAX_LAYERS, Fields, shown

_KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
"""Entries of ``layer_types`` that the families here can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that every layer shares."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int


def read_shape(fields: Fields, family: Family) -> Shape:
    """Hidden width, depth and heads.

    Raises:
        UnreadableConfig: a size is missing or absurd, or heads do not divide what they must.
    """
    hidden = fields.size("hidden_size")
    layers = fields.size("num_hidden_layers", maximum=MAX_LAYERS)
    heads = fields.size("num_attention_heads")
    kv_heads = heads
    if family.attention != "neox":
        kv_heads = fields.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.refuse(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if family.attention == "latent":
        rope, nope = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
        head_dim, value_head_dim, kv_heads = rope + nope, fields.size("v_head_dim"), heads
    else:
        stated = None if family.ignores_head_dim else fields.optional_size("head_dim")
        if stated is None and hidden % heads:
            raise fields.refuse(f"num_attention_heads {heads} does not divide hidden_size {hidden}")
        head_dim = value_head_dim = stated or hidden // heads
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
    )


def read_layers(fields: Fields, family: Family, shape: Shape) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The distinct kinds in the order of first use, and the index of its kind for every layer."""
    attention, window = _attention_kinds(fields, family, shape)
    routed = _routed_layers(fields, family, shape)
    kinds: dict[tuple[AttentionKind, bool], LayerKind] = {}
    for key in zip(attention, routed, strict=True):
        if key not in kinds:
            kinds[key] = _layer(fields, family, shape, *key, window=window)
    position = {key: i for i, key in enumerate(kinds)}
    return tuple(kinds.values()), tuple(position[key] for key in zip(attention, routed, strict=True))


def _attention_kinds(fields: Fields, family: Family, shape: Shape) -> tuple[list[AttentionKind], int | None]:
    window = _window(fields, family)
    stated = fields.strings("layer_types")
    if stated is not None and len(stated) != shape.layers:
        raise fields.refuse(f"layer_types has {len(stated)} entries for {shape.layers} layers")
    kinds: list[AttentionKind]
    if stated is not None and family.obeys_layer_types:
        unknown = next((name for name in stated if name not in _KINDS), None)
        if unknown is not None:
            raise fields.refuse(f"layer_types holds {shown(unknown)}, which {family.class_name} does not have")
        kinds = [_KINDS[name] for name in stated]
        if "linear" in kinds and family.pattern != "hybrid":
            raise fields.refuse(f"layer_types holds linear_attention, which {family.class_name} does not have")
    else:
        kinds = [_default_kind(fields, family, i, window) for i in range(shape.layers)]
    # Without a window transformers lets a sliding layer see everything.
    full: AttentionKind = "full"
    return [full if kind == "sliding" and window is None else kind for kind in kinds], window


def _window(fields: Fields, family: Family) -> int | None:
    if family.pattern in ("full", "hybrid"):
        return None
    if family.pattern in ("qwen", "qwen2_moe", "window_if_used", "nope") and not fields.flag("use_sliding_window"):
        return None
    return fields.optional_size("sliding_window", minimum=0) or None


def _default_kind(fields: Fields, family: Family, i: int, window: int | None) -> AttentionKind:
    """What transformers makes of layer ``i`` when the config lists no ``layer_types``."""
    if family.pattern == "hybrid":
        return "linear" if (i + 1) % _period(fields, family) else "full"
    if window is None:
        return "full"
    sliding = True
    match family.pattern:
        case "qwen":
            sliding = i >= fields.size("max_window_layers", minimum=0)
        case "qwen2_moe":
            sliding = i % 2 == 0 and i < fields.size("max_window_layers", minimum=0)
        case "alternating":
            sliding = i % 2 == 0
        case "every_nth_full":
            sliding = (i + 1) % _period(fields, family) != 0
        case "nope":
            rotated = fields.integers("no_rope_layers")
            interval = fields.size("no_rope_layer_interval")
            sliding = not rotated[i] if rotated and i < len(rotated) else (i + 1) % interval == 0
        case _:
            pass  # "window" and "window_if_used": every layer looks back as far as the window
    return "sliding" if sliding else "full"


def _period(fields: Fields, family: Family) -> int:
    stated = fields.optional_size(family.period_key) if family.period_key else None
    return stated or family.period


def _routed_layers(fields: Fields, family: Family, shape: Shape) -> list[bool]:
    mixture = family.mixture
    if mixture is None:
        return [False] * shape.layers
    if fields.size(mixture.experts, minimum=0) == 0:
        return [False] * shape.layers
    if mixture.placed == "sparse_step":
        dense = set(fields.integers("mlp_only_layers") or ())
        step = fields.size("decoder_sparse_step")
        return [i not in dense and (i + 1) % step == 0 for i in range(shape.layers)]
    first = fields.size("first_k_dense_replace", minimum=0) if mixture.placed == "after_first" else 0
    return [i >= first for i in range(shape.layers)]


def _layer(
    fields: Fields,
    family: Family,
    shape: Shape,
    attention: AttentionKind,
    routed: bool,
    *,
    window: int | None,
) -> LayerKind:
    base = LayerKind(
        name=attention + ("+moe" if routed else ""),
        attention=attention,
        linears=(),
        norm_parameters=family.norms * family.norm_tensors * shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_head_dim=shape.value_head_dim,
        window=window if attention == "sliding" else None,
        gated=family.mlp != "plain",
        num_norms=family.norms,
        attention_softcap=family.softcaps and fields.number("attn_logit_softcapping") is not None,
        attention_sinks=family.sinks,
        other_parameters=shape.heads if family.sinks else 0,
    )
    mixed = _deltanet(base, fields, family, shape) if attention == "linear" else _attention(base, fields, family, shape)
    if routed and family.mixture is not None:
        return _mixture(mixed, fields, family, family.mixture, shape)
    width = fields.size("intermediate_size")
    return replace(
        mixed,
        linears=(*mixed.linears, *_mlp(fields, family, shape.hidden, width)),
        intermediate=width,
    )


def _attention(kind: LayerKind, fields: Fields, family: Family, shape: Shape) -> LayerKind:
    qkv_bias, out_bias = _rule(fields, family.qkv_bias), _rule(fields, family.out_bias)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms: Literal["none", "head", "full"] = family.qk_norm
    if family.qk_norm_if is not None and not fields.flag(family.qk_norm_if):
        norms = "none"
    extra = {"none": 0, "head": 2 * shape.head_dim, "full": queries + keys}[norms] * family.qk_norm_tensors
    out = Linear(
        name=family.out_name,
        in_features=shape.heads * shape.value_head_dim,
        out_features=shape.hidden,
        bias=out_bias,
    )
    inputs: tuple[Linear, ...]
    if family.attention == "latent":
        inputs, latent_norms = _latent(fields, shape, qkv_bias)
        extra += latent_norms
    elif family.attention == "split":
        widths = {
            "q_proj": queries * (2 if family.gated_attention else 1),
            "k_proj": keys,
            "v_proj": keys,
        }
        inputs = tuple(
            Linear(name=name, in_features=shape.hidden, out_features=width, bias=qkv_bias)
            for name, width in widths.items()
        )
    else:
        name = "qkv_proj" if family.attention == "fused" else "query_key_value"
        inputs = (Linear(name=name, in_features=shape.hidden, out_features=queries + 2 * keys, bias=qkv_bias),)
    return replace(
        kind,
        linears=(*inputs, out),
        norm_parameters=kind.norm_parameters + extra,
        qk_norm=norms,
        attention_gate=family.gated_attention,
    )


def _latent(fields: Fields, shape: Shape, bias: bool) -> tuple[tuple[Linear, ...], int]:
    """Projections of multi-head latent attention, and the size of the norms over its bottlenecks."""
    hidden, heads = shape.hidden, shape.heads
    kv_rank, q_rank = fields.size("kv_lora_rank"), fields.optional_size("q_lora_rank")
    rope, nope = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    down = Linear(name="kv_a_proj_with_mqa", in_features=hidden, out_features=kv_rank + rope, bias=bias)
    up = Linear(name="kv_b_proj", in_features=kv_rank, out_features=heads * (nope + shape.value_head_dim))
    if q_rank is None:
        queries = Linear(name="q_proj", in_features=hidden, out_features=heads * shape.head_dim)
        return (queries, down, up), kv_rank
    q_down = Linear(name="q_a_proj", in_features=hidden, out_features=q_rank, bias=bias)
    q_up = Linear(name="q_b_proj", in_features=q_rank, out_features=heads * shape.head_dim)
    return (q_down, q_up, down, up), q_rank + kv_rank


def _deltanet(kind: LayerKind, fields: Fields, family: Family, shape: Shape) -> LayerKind:
    """Gated DeltaNet: projections, a depthwise convolution over q, k and v, decays per value head."""
    key_heads, value_heads = (
        fields.size("linear_num_key_heads"),
        fields.size("linear_num_value_heads"),
    )
    if value_heads % key_heads:
        raise fields.refuse(f"linear_num_key_heads {key_heads} does not divide linear_num_value_heads {value_heads}")
    key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels, kernel = 2 * keys + values, fields.size("linear_conv_kernel_dim")
    widths = (
        {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * value_heads}
        if family.fused_deltanet
        else {
            "in_proj_qkv": channels,
            "in_proj_z": values,
            "in_proj_b": value_heads,
            "in_proj_a": value_heads,
        }
    )
    inputs = (Linear(name=name, in_features=shape.hidden, out_features=width) for name, width in widths.items())
    return replace(
        kind,
        linears=(*inputs, Linear(name="out_proj", in_features=values, out_features=shape.hidden)),
        norm_parameters=kind.norm_parameters + value_dim,
        other_parameters=channels * kernel + 2 * value_heads,
        heads=value_heads,
        kv_heads=key_heads,
        head_dim=key_dim,
        value_head_dim=value_dim,
        conv_channels=channels,
        conv_kernel=kernel,
    )


def _mlp(fields: Fields, family: Family, hidden: int, width: int) -> tuple[Linear, ...]:
    bias = _rule(fields, family.mlp_bias)
    up_name, down_name = family.mlp_names
    down = Linear(name=down_name, in_features=width, out_features=hidden, bias=bias, role="mlp")
    if family.mlp == "gated_fused":
        return (
            Linear(
                name="gate_up_proj",
                in_features=hidden,
                out_features=2 * width,
                bias=bias,
                role="mlp",
            ),
            down,
        )
    up = Linear(name=up_name, in_features=hidden, out_features=width, bias=bias, role="mlp")
    if family.mlp == "plain":
        return (up, down)
    return (replace(up, name="gate_proj"), up, down)


def _mixture(kind: LayerKind, fields: Fields, family: Family, mixture: Mixture, shape: Shape) -> LayerKind:
    """Stacked experts and router, which are no ``nn.Linear``, and the shared expert, which is."""
    hidden = shape.hidden
    count, width = fields.size(mixture.experts), fields.size(mixture.width)
    per_token = fields.size("num_experts_per_tok")
    if per_token > count:
        raise fields.refuse(f"num_experts_per_tok {per_token} is more than the {count} experts there are")
    biases = 2 * width + hidden if mixture.biases else 0
    experts = FusedExperts(
        num_experts=count,
        experts_per_token=per_token,
        hidden=hidden,
        intermediate=width,
        num_parameters=count * (3 * hidden * width + biases),
    )
    shared, linears = 0, kind.linears
    if mixture.shared_width is not None:
        shared = fields.size(mixture.shared_width, minimum=0)
        gate = Linear(name="shared_expert_gate", in_features=hidden, out_features=1, role="mlp")
        linears = (*linears, *_mlp(fields, family, hidden, shared), gate)
    elif mixture.shared_count is not None:
        shared = width * fields.size(mixture.shared_count, minimum=0)
        linears = (*linears, *_mlp(fields, family, hidden, shared))
    return replace(
        kind,
        linears=linears,
        experts=experts,
        intermediate=shared,
        other_parameters=kind.other_parameters + count * (hidden + (1 if mixture.biases else 0)),
    )


def _rule(fields: Fields, rule: Rule) -> bool:
    return rule if isinstance(rule, bool) else fields.flag(rule)
