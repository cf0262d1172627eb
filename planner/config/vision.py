"""Vision: parameters of the towers and projectors of composite models, and their linear modules.

They are not walked as decoder layers, but they lie in memory, train under full fine-tuning, and
take adapters wherever a target name matches. The layouts are those of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.architecture import Linear
from planner.config.fields import MAX_LAYERS, Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Everything of a composite model outside its text decoder."""

    linears: tuple[Linear, ...]
    other_parameters: int
    """Parameters in no ``nn.Linear``: patch and position embeddings, norms, projection matrices."""

    @property
    def num_parameters(self) -> int:
        """All parameters of tower and projector."""
        return sum(m.num_parameters for m in self.linears) + self.other_parameters


def siglip(root: Fields, text: Fields) -> Tower:
    """Gemma 3: a SigLIP encoder and a projection matrix that is a bare parameter."""
    vision = _section(root, _SIGLIP)
    hidden, width, layers = (
        vision.size("hidden_size"),
        vision.size("intermediate_size"),
        _depth(vision),
    )
    patch, image = vision.size("patch_size"), vision.size("image_size")
    linears = [
        *_named(("q_proj", "k_proj", "v_proj", "out_proj"), hidden, hidden, layers, bias=True),
        *_named(("fc1",), hidden, width, layers, bias=True),
        *_named(("fc2",), width, hidden, layers, bias=True),
    ]
    other = vision.size("num_channels") * hidden * patch**2 + hidden + (image // patch) ** 2 * hidden
    other += layers * 4 * hidden + 2 * hidden
    if vision.flag("vision_use_head"):
        # The pooling head's packed in_proj and probe are bare parameters, its out_proj a Linear.
        linears += _named(("out_proj",), hidden, hidden, 1, bias=True)
        linears += [
            *_named(("fc1",), hidden, width, 1, bias=True),
            *_named(("fc2",), width, hidden, 1, bias=True),
        ]
        other += hidden + 3 * hidden * (hidden + 1) + 2 * hidden
    other += hidden * text.size("hidden_size") + hidden
    return Tower(linears=tuple(linears), other_parameters=other)


def pixtral(root: Fields, text: Fields) -> Tower:
    """Mistral 3: a Pixtral encoder, a patch merger and a two-layer projector."""
    vision = _section(root, _PIXTRAL)
    hidden, width, layers = (
        vision.size("hidden_size"),
        vision.size("intermediate_size"),
        _depth(vision),
    )
    bias = root.flag("multimodal_projector_bias")
    merged = hidden * (root.optional_size("spatial_merge_size", maximum=64) or 2) ** 2
    features = len(root.items("vision_feature_layer")) if isinstance(root.get("vision_feature_layer"), list) else 1
    out = text.size("hidden_size")
    linears = (
        *_named(("q_proj", "k_proj", "v_proj", "o_proj"), hidden, hidden, layers),
        *_named(("gate_proj", "up_proj"), hidden, width, layers),
        *_named(("down_proj",), width, hidden, layers),
        *_named(("merging_layer",), merged, hidden, 1),
        *_named(("linear_1",), hidden * features, out, 1, bias=bias),
        *_named(("linear_2",), out, out, 1, bias=bias),
    )
    patches = vision.size("num_channels") * hidden * vision.size("patch_size") ** 2
    return Tower(linears=linears, other_parameters=patches + hidden + layers * 2 * hidden + hidden)


def qwen3_5(root: Fields, text: Fields) -> Tower:
    """Qwen3.5: a ViT with learned positions and one patch merger."""
    del text
    return _qwen(_section(root, _QWEN), 0)


def qwen3_vl(root: Fields, text: Fields) -> Tower:
    """Qwen3-VL: the same, with one more merger for each layer that feeds the decoder directly."""
    del text
    vision = _section(root, _QWEN)
    levels = vision.integers("deepstack_visual_indexes")
    return _qwen(vision, 3 if levels is None else len(levels))


def _qwen(vision: Fields, levels: int) -> Tower:
    hidden, width = vision.size("hidden_size"), vision.size("intermediate_size")
    layers = vision.size("depth", maximum=MAX_LAYERS)
    merged = hidden * vision.size("spatial_merge_size", maximum=64) ** 2
    linears = (
        *_named(("qkv",), hidden, 3 * hidden, layers, bias=True),
        *_named(("proj",), hidden, hidden, layers, bias=True),
        *_named(("linear_fc1",), hidden, width, layers, bias=True),
        *_named(("linear_fc2",), width, hidden, layers, bias=True),
        *_named(("linear_fc1",), merged, merged, 1 + levels, bias=True),
        *_named(("linear_fc2",), merged, vision.size("out_hidden_size"), 1 + levels, bias=True),
    )
    patch = vision.size("in_channels") * vision.size("temporal_patch_size") * vision.size("patch_size") ** 2
    other = patch * hidden + hidden + vision.size("num_position_embeddings") * hidden
    other += layers * 4 * hidden + 2 * hidden + levels * 2 * merged
    return Tower(linears=linears, other_parameters=other)


TowerReader = Callable[[Fields, Fields], Tower]

_SIGLIP: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3_072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}
_PIXTRAL: dict[str, object] = {
    "hidden_size": 1_024,
    "intermediate_size": 4_096,
    "num_hidden_layers": 24,
    "num_channels": 3,
    "patch_size": 16,
}
_QWEN: dict[str, object] = {
    "hidden_size": 1_152,
    "intermediate_size": 4_304,
    "depth": 27,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 3_584,
    "num_position_embeddings": 2_304,
}


def _section(root: Fields, defaults: dict[str, object]) -> Fields:
    section = root.section("vision_config", defaults)
    if section is None:
        raise root.refuse("vision_config is missing")
    return section


def _depth(vision: Fields) -> int:
    return vision.size("num_hidden_layers", maximum=MAX_LAYERS)


def _named(names: tuple[str, ...], width_in: int, width_out: int, count: int, *, bias: bool = False) -> list[Linear]:
    return [
        Linear(
            name=name,
            in_features=width_in,
            out_features=width_out,
            bias=bias,
            role="other",
            count=count,
        )
        for name in names
    ]
