"""A short training of one model under one recipe, and the same in bf16: equal data, equal seeds, nothing else differs.

The products of both go through ``route_linear``, so that rounding is all that sets them apart. The model is the one
that is asked about where its weights are here and small enough, else a stand-in: a byte decoder of the Llama class.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from route_linear import GRIDS, Quantiser, RouteLinear, convert, quantise
from torch import nn

PLAIN = {product: [{}, {}] for product in ("input", "igrad", "wgrad")}
"""The recipe of bf16: every operand as it comes."""
TAIL = 30
"""Steps at the end whose mean is the training loss."""
HELD_OUT_BATCHES = 8
HELD_OUT_SEED = 987_654_321


@dataclass
class Trial:
    """What all trainings of one comparison share."""

    data: torch.Tensor
    """Token ids of the text, one dimension; its last tenth is held out."""
    steps: int = 300
    rows: int = 16
    length: int = 64
    learning_rate: float = 3e-3
    device: str = "cpu"


@dataclass
class TrialEnd:
    """One training."""

    train_loss: float
    """Mean of the last steps."""
    held_out: float
    """Loss on held-out text with the products in bf16, whatever they were trained in."""
    start: float
    """The same before the first step."""
    non_finite: int
    """Steps whose loss or gradient was not finite."""
    gradient_norm: float
    """Median over the steps."""
    seconds: float
    losses: list[float] = field(repr=False)


def byte_decoder(seed: int, *, width: int = 64, layers: int = 4) -> nn.Module:
    """The stand-in: a decoder over bytes, of transformers' Llama class, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def python_texts() -> tuple[bytes, bytes]:
    """Two real texts that every Python has: its language reference, and its own source.

    Raises:
        RuntimeError: this Python comes without them.
    """
    import argparse
    import inspect
    import pathlib
    import typing

    try:
        from pydoc_data import topics
    except ImportError:
        raise RuntimeError("this Python has no pydoc_data, whose text the trial reads; name a --dataset") from None
    reference = "\n".join(text for _, text in sorted(topics.topics.items()))
    source = "\n".join(inspect.getsource(module) for module in (argparse, pathlib, typing))
    return reference.encode(), source.encode()


def as_tokens(text: bytes) -> torch.Tensor:
    """Bytes as token ids."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(trial: Trial, seed: int, held_out: bool = False) -> Iterator[torch.Tensor]:
    """Windows of the text at random places: training from its first nine tenths, the held-out ones from the last."""
    cut = len(trial.data) * 9 // 10
    part = trial.data[cut:] if held_out else trial.data[:cut]
    generator = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randint(0, len(part) - trial.length, (trial.rows,), generator=generator)
        yield torch.stack([part[p : p + trial.length] for p in places.tolist()]).to(trial.device)


def train(
    model: nn.Module,
    recipe: Mapping[str, Any] | None,
    trial: Trial,
    seed: int,
) -> TrialEnd:
    """Train ``model`` under ``recipe``, None for bf16; it is changed.

    Args:
        model: as it starts; two calls with equal weights and seeds differ by their recipe alone.
        recipe: of the route.
        trial: data and sizes.
        seed: of the data's order and of stochastic rounding.
    """
    model.to(trial.device).train()
    convert(model, recipe or PLAIN, seed)
    if recipe is not None and recipe.get("keep_last"):
        convert(model, PLAIN, seed)  # blocks that the route leaves in bf16 compute as bf16's do
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, trial.steps // 20)
    losses, norms, non_finite, source = [], [], 0, batches(trial, seed)
    start, began = held_out_loss(model, trial), time.perf_counter()
    for step in range(trial.steps):
        share = min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / trial.steps))
        for group in optimizer.param_groups:
            group["lr"] = trial.learning_rate * share
        loss = _loss(model, next(source), trial.device)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(loss) and torch.isfinite(norm):
            optimizer.step()
            norms.append(norm.item())
        else:
            non_finite += 1
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    tail = losses[-min(TAIL, len(losses)) :]
    return TrialEnd(
        train_loss=sum(tail) / len(tail),
        held_out=held_out_loss(model, trial),
        start=start,
        non_finite=non_finite,
        gradient_norm=sorted(norms)[len(norms) // 2] if norms else float("nan"),
        seconds=seconds,
        losses=losses,
    )


def _loss(model: nn.Module, ids: torch.Tensor, device: str) -> torch.Tensor:
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, trial: Trial) -> float:
    """Loss on text that no step sees, with the products in bf16."""
    layers = [module for module in model.modules() if isinstance(module, RouteLinear)]
    recipes = [layer.recipe for layer in layers]
    plain = {product: (Quantiser(), Quantiser()) for product in PLAIN}
    for layer in layers:
        layer.recipe = plain
    source = batches(trial, HELD_OUT_SEED, held_out=True)
    total = sum(_loss(model, next(source), trial.device).item() for _ in range(HELD_OUT_BATCHES))
    for layer, recipe in zip(layers, recipes, strict=True):
        layer.recipe = recipe
    return total / HELD_OUT_BATCHES


@torch.no_grad()
def forward_gap(model: nn.Module, recipe: Mapping[str, Any], trial: Trial) -> float:
    """Loss on held-out text under the route's forward less that in bf16, in nats: seconds, and no training."""
    before = held_out_loss(model, trial)
    convert(model, recipe)
    source = batches(trial, HELD_OUT_SEED, held_out=True)
    total = sum(_loss(model, next(source), trial.device).item() for _ in range(HELD_OUT_BATCHES))
    return total / HELD_OUT_BATCHES - before


def captured(model: nn.Module, trial: Trial, seed: int, most: int = 12) -> list[dict[str, Any]]:
    """Input, weight and output gradient of some of the layers in one bf16 micro-batch; the model is changed.

    Args:
        model: with or without training behind it.
        trial: data and sizes.
        seed: of the data.
        most: layers, spread evenly over the model.
    """
    names = convert(model.to(trial.device), PLAIN, seed)
    chosen = names[:: max(1, len(names) // most)][:most]
    seen: dict[str, dict[str, Any]] = {name: {"name": name} for name in chosen}
    hooks = []
    for name in chosen:
        layer = model.get_submodule(name)

        def keep_input(module: nn.Module, args: tuple[torch.Tensor], kept: dict[str, Any] = seen[name]) -> None:
            kept["x"] = args[0].detach().reshape(-1, args[0].shape[-1]).float()
            kept["w"] = module.weight.detach().float()

        def keep_gradient(_: nn.Module, __: Any, out: tuple[torch.Tensor], kept: dict[str, Any] = seen[name]) -> None:
            kept["dy"] = out[0].detach().reshape(-1, out[0].shape[-1]).float()

        hooks += [layer.register_forward_pre_hook(keep_input), layer.register_full_backward_hook(keep_gradient)]
    _loss(model, next(batches(trial, seed)), trial.device).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return [tensors for tensors in seen.values() if "dy" in tensors]


def operator_errors(tensors: Mapping[str, Any], recipe: Mapping[str, Any], draws: int = 4) -> dict[str, float]:
    """Error energy of each product against float32, as a share of the product's energy.

    Args:
        tensors: ``x``, ``w`` and ``dy`` of one layer.
        recipe: of the route.
        draws: of stochastic rounding; each is an error of its own, and their mean is what many steps see.
    """
    x, w, dy = tensors["x"], tensors["w"], tensors["dy"]
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device)
    linear.weight.data.copy_(w)
    layer = RouteLinear.of(linear, recipe, seed=0)
    products: dict[str, list[torch.Tensor]] = {"forward": [], "input gradient": [], "weight gradient": []}
    for _ in range(draws):
        entering = x.clone().requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16):
            out = layer(entering)
        out.backward(dy.to(out.dtype))
        products["forward"].append(out.detach().float())
        products["input gradient"].append(entering.grad)
        products["weight gradient"].append(linear.weight.grad.clone())
        linear.weight.grad = None
    exact = {"forward": x @ w.t(), "input gradient": dy @ w, "weight gradient": dy.t() @ x}
    found = {name: _energy(drawn[0] - exact[name], exact[name]) for name, drawn in products.items()}
    mean = torch.stack(products["input gradient"]).mean(0)
    found[f"input gradient, mean of {draws} draws"] = _energy(mean - exact["input gradient"], exact["input gradient"])
    activation = layer.recipe["input"][0]
    if activation.values in GRIDS:
        codes = quantise(x, activation).codes
        found["zeros of the input"] = ((codes == 0) & (x != 0)).float().mean().item()
    return found


def _energy(error: torch.Tensor, exact: torch.Tensor) -> float:
    return (error.double().square().sum() / exact.double().square().sum().clamp(min=1e-300)).item()


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; 0 where one is 0."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else 0.0
