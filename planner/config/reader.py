"""Reader: ``config.json`` -> ``Architecture``, with the counts of the class that TRL would load.

TRL's trainers load ``config.architectures[0]``; without one the class is what
``AutoModelForCausalLM`` would pick. Counts are those of that class built from the same config by
transformers 5.24, tied weights once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from planner.architecture import Architecture
from planner.config.families import FAMILIES, LLAMA
from planner.config.family import Family
from planner.config.fields import MAX_POSITIONS, Fields, UnreadableConfig, shown
from planner.config.layers import read_layers, read_shape
from planner.config.refusals import refuse_other_layouts, refuse_what_is_no_decoder
from planner.config.rope import read_rope
from planner.config.vision import Tower, TowerReader, pixtral, qwen3_5, qwen3_vl, siglip

__all__ = ["UnreadableConfig", "read_architecture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composite:
    """A model class that wraps a text decoder and a vision tower."""

    class_name: str
    text_type: str
    """``model_type`` of a ``text_config`` that does not state one."""
    tower: TowerReader
    tied: bool
    """``tie_word_embeddings`` of the wrapping config class: it decides, not the text config's."""
    auto_class: str | None = None
    """What ``AutoModelForCausalLM`` builds when that is the text decoder alone."""


_COMPOSITES: dict[str, _Composite] = {
    "gemma3": _Composite(
        class_name="Gemma3ForConditionalGeneration",
        text_type="gemma3_text",
        tower=siglip,
        tied=True,
    ),
    "mistral3": _Composite(
        class_name="Mistral3ForConditionalGeneration", text_type="mistral", tower=pixtral, tied=True
    ),
    "qwen3_vl": _Composite(
        class_name="Qwen3VLForConditionalGeneration",
        text_type="qwen3_vl_text",
        tower=qwen3_vl,
        tied=False,
    ),
    "qwen3_vl_moe": _Composite(
        class_name="Qwen3VLMoeForConditionalGeneration",
        text_type="qwen3_vl_moe_text",
        tower=qwen3_vl,
        tied=False,
    ),
    "qwen3_5": _Composite(
        class_name="Qwen3_5ForConditionalGeneration",
        text_type="qwen3_5_text",
        tower=qwen3_5,
        tied=False,
        auto_class="Qwen3_5ForCausalLM",
    ),
    "qwen3_5_moe": _Composite(
        class_name="Qwen3_5MoeForConditionalGeneration",
        text_type="qwen3_5_moe_text",
        tower=qwen3_5,
        tied=False,
        auto_class="Qwen3_5MoeForCausalLM",
    ),
}
_GENERIC_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


def read_architecture(config: Mapping[str, object], *, model: str, origin: str) -> Architecture:
    """Shapes and exact parameter counts from the content of a ``config.json``.

    Args:
        config: the parsed file, whole and unchanged.
        model: hub id, or the name of the folder it was read from.
        origin: ``bundled``, ``folder``, ``config.json``, ``hub cache`` or ``hub``.

    Raises:
        UnreadableConfig: the shapes cannot be established; the message is one line.
    """
    if not isinstance(cast("object", config), Mapping):
        raise UnreadableConfig(f"config.json: holds {shown(config)}, not an object")
    root = Fields(config, "config.json")
    refuse_what_is_no_decoder(root)
    model_type = root.text("model_type")
    if model_type is None:
        raise root.refuse("model_type is missing, so transformers would not know the model either")
    composite = _COMPOSITES.get(model_type)
    if composite is not None:
        return _wrapped(root, composite, _Named(model, origin))
    notes: list[str] = []
    family = FAMILIES.get(model_type) or _generic_family(root, model_type, notes)
    text = Fields(config, "config.json", family.defaults, family.names)
    stated = _stated_class(root)
    if stated is not None and stated != family.class_name and model_type in FAMILIES:
        notes.append(f"the config names the class {stated}; counted as {family.class_name}")
    tied = text.flag("tie_word_embeddings")
    return _architecture(root, text, family, model_type, _Named(model, origin), tied=tied, notes=notes)


@dataclass(frozen=True, slots=True)
class _Named:
    model: str
    origin: str


def _wrapped(root: Fields, composite: _Composite, named: _Named) -> Architecture:
    """A composite model: with its tower, unless the loaded class is the text decoder alone."""
    section = root.section("text_config")
    if section is None:
        raise root.refuse("text_config is missing")
    text_type = section.text("model_type") or composite.text_type
    family = FAMILIES.get(text_type)
    if family is None:
        raise section.refuse(f"model_type {shown(text_type)} is not a decoder that trlfit can count")
    text = Fields(section.values, "text_config", family.defaults, family.names)
    notes: list[str] = []
    class_name = _stated_class(root) or composite.auto_class or composite.class_name
    if class_name not in (composite.class_name, family.class_name):
        notes.append(f"the config names the class {class_name}; counted as {composite.class_name}")
        class_name = composite.class_name
    if class_name != composite.class_name:
        tied = text.flag("tie_word_embeddings")
        return _architecture(root, text, family, text_type, named, tied=tied, notes=notes)
    tied = root.flag("tie_word_embeddings") if "tie_word_embeddings" in root.values else composite.tied
    if tied and "tie_word_embeddings" not in root.values:
        notes.append(
            "tie_word_embeddings is not in the config: transformers ties, unless the checkpoint holds"
            " two different matrices"
        )
    return _architecture(
        root,
        text,
        replace(family, class_name=class_name),
        text_type,
        named,
        tied=tied,
        notes=notes,
        tower=composite.tower(root, text),
    )


def _architecture(
    root: Fields,
    text: Fields,
    family: Family,
    model_type: str,
    named: _Named,
    *,
    tied: bool,
    notes: list[str],
    tower: Tower | None = None,
) -> Architecture:
    shape = read_shape(text, family)
    vocab = text.size("vocab_size")
    kinds, order = read_layers(text, family, shape)
    rope = read_rope(text, family)
    positions = text.optional_size("max_position_embeddings", minimum=0, maximum=MAX_POSITIONS) or 0
    remote, quantization = _has_remote_code(root), _stored_quantization(root)
    if remote and model_type in FAMILIES:
        notes.append(
            f"auto_map names other code; without trust_remote_code transformers uses its own {family.class_name}"
        )
    if quantization is not None:
        notes.append(f"the checkpoint is stored quantised ({quantization}); parameters are counted unpacked")
    if _stated_class(root) is None:
        notes.append("architectures names no class, and TRL's trainers load the model by that name")
    for key, value in text.assumed.items():
        notes.append(f"{key} is not in the config: {value}, transformers' default, is used")
    return Architecture(
        model=named.model,
        model_type=model_type,
        config=dict(root.values),
        origin=named.origin,
        hidden=shape.hidden,
        vocab=vocab,
        kinds=kinds,
        order=order,
        tied=tied,
        embedding_parameters=vocab * shape.hidden,
        final_norm_parameters=family.norm_tensors * shape.hidden,
        head_bias=family.head_bias,
        vision_parameters=tower.num_parameters if tower else 0,
        vision_linears=tower.linears if tower else (),
        max_positions=positions,
        rope_theta=rope.theta,
        rope_type=rope.type,
        partial_rotary_factor=rope.partial_factor,
        nested_rope=rope.nested,
        logit_softcap=text.number("final_logit_softcapping") if family.softcaps else None,
        logit_scale=family.logit_scale is not None and text.number(family.logit_scale) not in (None, 1.0),
        is_composite=text is not root and text.where == "text_config",
        class_name=family.class_name,
        stored_dtype=_stored_dtype(root, text),
        remote_code=remote,
        notes=tuple(notes),
    )


def _generic_family(root: Fields, model_type: str, notes: list[str]) -> Family:
    """Llama's layout for an unknown ``model_type``, when the standard keys are all there."""
    refuse_other_layouts(root, model_type)
    missing = next((key for key in _GENERIC_REQUIRED if not root.has(key)), None)
    if missing is not None:
        raise root.refuse(f"model_type {shown(model_type)} is not known, and {missing} is missing")
    notes.append(
        f"model_type {shown(model_type)} is not known: read as a dense Llama-like decoder, so counts may be off"
    )
    return replace(
        LLAMA,
        class_name=_stated_class(root) or "AutoModelForCausalLM",
        defaults={},
        qkv_bias="qkv_bias" if root.has("qkv_bias") else "attention_bias",
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        pattern="window_if_used" if "use_sliding_window" in root.values else "window",
        obeys_layer_types=True,
    )


def _stated_class(root: Fields) -> str | None:
    names = root.strings("architectures")
    return names[0] if names else None


def _has_remote_code(root: Fields) -> bool:
    auto_map = root.section("auto_map")
    return auto_map is not None and bool(auto_map.values)


def _stored_quantization(root: Fields) -> str | None:
    section = root.section("quantization_config")
    return None if section is None else section.text("quant_method") or "unknown method"


def _stored_dtype(root: Fields, text: Fields) -> str | None:
    for fields in (root, text):
        for key in ("dtype", "torch_dtype"):
            value = fields.get(key)
            if isinstance(value, str):
                return value
    return None
