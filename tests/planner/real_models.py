"""Builds the transformers classes that the reader counts, on the meta device: no weights, no download."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.initialization import no_init_weights

transformers.logging.set_verbosity_error()


def real_config(config: Mapping[str, Any]) -> Any:
    values = copy.deepcopy(dict(config))
    # Unpacking quantised weights is the loader's business; the class is built in full.
    values.pop("quantization_config", None)
    return CONFIG_MAPPING[values.pop("model_type")](**values)


def build(config: Mapping[str, Any]) -> Any:
    """The model that TRL's create_model_from_path would load, with meta tensors."""
    wanted = real_config(config)
    with torch.device("meta"), no_init_weights():
        if not config.get("architectures"):
            model = AutoModelForCausalLM.from_config(wanted)
        else:
            model_class = getattr(transformers, config["architectures"][0])
            if not isinstance(wanted, model_class.config_class):
                wanted = wanted.get_text_config()
            model = model_class._from_config(wanted)
    # Skipping initialisation, which is slow, skips this as well.
    model.tie_weights()
    return model


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def decoder_layers(model: Any) -> list[Any]:
    """The decoder's layer modules, in order."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    decoder = getattr(decoder, "language_model", decoder)
    return list(decoder.layers)


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The same model with fewer layers."""
    values = copy.deepcopy(dict(config))
    text = values.get("text_config", values)
    text["num_hidden_layers"] = layers
    for key in ("layer_types", "no_rope_layers"):
        if text.get(key):
            text[key] = text[key][:layers]
    if values.get("vision_config"):
        depth = "depth" if "depth" in values["vision_config"] else "num_hidden_layers"
        values["vision_config"][depth] = 2
    return values
