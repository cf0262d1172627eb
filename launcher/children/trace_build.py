"""Builds the few layers that a trace runs: the real class of the config on the meta device, cut to one layer a kind.

The stack is one layer of each kind, the same again, and the first kind once more; the second of each is looked at. So
nothing that only the first or the last layer does reaches its numbers, and what a kind shares with layers of its own
below it (a mask) is still there when it runs backward.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from trace_fake import like
from transformers import CONFIG_MAPPING, AutoModel
from transformers.initialization import no_init_weights

_ATTENTION_NAMES = ("self_attn", "linear_attn", "attention", "attn", "mixer", "self_attention")


class Refused(Exception):
    """The model cannot be traced; the message is one sentence for the user."""


@dataclasses.dataclass
class Stack:
    """A body with few layers, and what a trace needs to find in it."""

    body: torch.nn.Module
    layers: list[torch.nn.Module]
    looked_at: list[int]
    """Position of the layer of each kind."""
    kinds: list[int]
    """Kind of the layer at each position."""


def build(config: Mapping[str, Any], first_layers: Sequence[int], dtype: torch.dtype, attention: str) -> Stack:
    """The real body (no head) of ``config`` on the meta device, with few layers of each kind.

    Args:
        config: ``config.json`` as a mapping.
        first_layers: index of the first layer of each kind.
        dtype: dtype of all weights.
        attention: the attention implementation that the layers run.

    Raises:
        Refused: the installed transformers has no class for it.
    """
    parsed = _parse(config, max(first_layers) + 1)
    try:
        with torch.device("meta"), no_init_weights():
            body = AutoModel.from_config(parsed, attn_implementation="eager", dtype=dtype)
    except ValueError as error:
        raise Refused(f"the installed transformers cannot build {parsed.model_type}: {error}") from None
    body.train()
    holder, name, layers = _decoder_layers(body, parsed.num_hidden_layers)
    count = len(first_layers)
    kinds = [*range(count), *range(count), 0]
    # The config is shared by all, so that what is set on it reaches every layer.
    picked = [copy.deepcopy(layers[first_layers[kind]], {id(body.config): body.config}) for kind in kinds]
    setattr(holder, name, torch.nn.ModuleList(picked))
    _renumber(body.config, picked, [first_layers[kind] for kind in kinds])
    body.config._attn_implementation = attention
    return Stack(body=body, layers=picked, looked_at=[count + kind for kind in range(count)], kinds=kinds)


def _parse(config: Mapping[str, Any], depth: int) -> Any:
    """The text config, as deep as the last layer that is needed."""
    values = copy.deepcopy(dict(config))
    # Unpacking quantised weights is the loader's business; the class is built in full.
    values.pop("quantization_config", None)
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        remote = " but code that comes with the model" if values.get("auto_map") else ""
        raise Refused(f"model type {model_type!r} is no class of the installed transformers{remote}")
    parsed = CONFIG_MAPPING[model_type].from_dict(values).get_text_config()
    count = parsed.num_hidden_layers
    for name, value in list(vars(parsed).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(parsed, name, value[:depth])
    parsed.num_hidden_layers = min(depth, count)
    return parsed


def _decoder_layers(body: torch.nn.Module, count: int) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    for path, module in body.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and "layer" in path.lower() + "layer":
            parent, _, name = path.rpartition(".")
            return body.get_submodule(parent), name, module
    raise Refused(f"{type(body).__name__} holds its {count} layers in no list that a trace knows")


def _renumber(config: Any, layers: Sequence[torch.nn.Module], origins: Sequence[int]) -> None:
    """Make config and layers agree on how many layers there are and which is which."""
    depth = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth and name != "architectures":
            setattr(config, name, [value[origin] for origin in origins])
    config.num_hidden_layers = len(layers)
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position


def attention_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The attention block of a decoder layer, None where it goes by an unknown name."""
    return next((getattr(layer, name) for name in _ATTENTION_NAMES if hasattr(layer, name)), None)


def add_adapters(body: torch.nn.Module, options: Mapping[str, Any], r: int) -> torch.nn.Module:
    """Wrap with PEFT's LoRA as TRL leaves it: adapters in fp32 beside a low-precision base, or in its dtype.

    Raises:
        Refused: PEFT finds nothing to adapt, or is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise Refused("tracing LoRA needs the peft package in the training Python") from None
    targets = options["lora_targets"]
    wanted = LoraConfig(
        r=r,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.05 if options["lora_dropout"] else 0.0,
    )
    try:
        with torch.device("meta"):
            model = get_peft_model(body, wanted, autocast_adapter_dtype=options["adapter_bytes"] == 4)
    except ValueError as error:
        raise Refused(f"PEFT refuses these targets: {error}") from None
    dtype = torch.float32 if options["adapter_bytes"] == 4 else torch.bfloat16
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


class _Dequantised(torch.autograd.Function):
    """A product with a 4-bit weight: dequantised for forward and again for backward, nothing else kept."""

    @staticmethod
    def forward(ctx, inputs, packed, shape):
        ctx.save_for_backward(packed)
        ctx.shape = shape
        weight = torch.empty(shape, dtype=inputs.dtype)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        weight = torch.empty(ctx.shape, dtype=grad.dtype)
        return grad @ weight, None, None


class Quantised(torch.nn.Linear):
    """Stands for bitsandbytes' Linear4bit: packed codes and a scale per 64 weights."""

    def __init__(self, like: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        count = like.in_features * like.out_features
        self.weight = torch.nn.Parameter(torch.empty(count // 2, 1, dtype=torch.uint8, device="meta"), False)
        self.scales = torch.nn.Parameter(torch.empty(count // 64, device="meta"), requires_grad=False)
        self.bias = like.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product; cloned, as PEFT does with a 4-bit base."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inputs.dtype
        out = _Dequantised.apply(inputs.to(dtype), self.weight, (self.out_features, self.in_features))
        if self.bias is not None:
            out += self.bias.to(dtype)
        return out.clone()


def quantise(layers: Sequence[torch.nn.Module]) -> None:
    """Replace every linear of ``layers`` that is not an adapter, as loading in 4 bits does."""
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is torch.nn.Linear and "lora_" not in name and not _in_adapter(parent):
                    setattr(parent, name, Quantised(child))


def _in_adapter(parent: torch.nn.Module) -> bool:
    return isinstance(parent, torch.nn.ModuleDict)


def make_hollow(model: torch.nn.Module) -> None:
    """Swap meta parameters and buffers for hollow ones; what is shared stays shared."""
    twins: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in twins:
                twins[id(parameter)] = torch.nn.Parameter(like(parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = twins[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = like(buffer)
