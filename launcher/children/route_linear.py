"""A drop-in for ``torch.nn.Linear`` that computes its three products as a precision route says.

Operands are rounded to the route's grid under the route's scales and decoded at once, so the products run in float32:
it shows what a route does to a training, never how fast it is. Any device; only torch is needed.

A recipe is a mapping: ``input``, ``igrad`` and ``wgrad`` give two quantisers each (activation and weight, output
gradient and weight, output gradient and activation; ``Quantiser`` has the fields), ``keep_last`` the decoder blocks at
the end that stay as they are, ``features`` what both widths of a converted layer must be a multiple of.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

GRIDS = {"e2m1": (1, 0, 6.0), "e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
"""Grid -> bits of the mantissa, exponent of the smallest normal value, largest value."""
E8M0_EXPONENTS = (-127, 127)
E4M3_TINY = 2.0**-6
"""Smallest scale that is stored: the smallest normal E4M3, as torchao's nvfp4_quantize clamps."""
TILE_ROWS = 128
"""Rows that one thread block works on: the reach of a scale that is local to it."""
FINER_BELOW = 0.87
"""A weight's scale is halved where its group's maximum is below this share of it: finer steps, and bounded clipping."""
SIGNS = 0x2817
"""Signs of the Hadamard transform, 16 bits repeated: a set bit is +1."""
HISTORY = 1024
"""Maxima that delayed scaling looks back on."""


@dataclass(frozen=True)
class Quantiser:
    """How one operand is rounded; the words are those of ``profiles/routes.toml``."""

    values: str = "bf16"
    scale: str = "none"
    block: int = 0
    rows: int = 1
    rule: str = "exact"
    second: str = "none"
    stochastic: bool = False
    hadamard: int = 0

    @property
    def serves_both_layouts(self) -> bool:
        """Whether a matrix and its transpose are quantised alike: by one scale, or by square groups."""
        same = self.block == self.rows and self.second != "tile"
        return same and not self.stochastic and not self.hadamard


@dataclass(frozen=True)
class Quantised:
    """A matrix on a grid, in groups that share a scale: ``codes * scale * second`` is what it decodes to."""

    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """The three, each groups of rows x rows x groups of columns x columns, or 1 where they are alike."""
    shape: tuple[int, int]
    transposed: bool = False

    @property
    def codes(self) -> torch.Tensor:
        """Values on the grid, of the matrix's shape like all below."""
        return self._whole(self.parts[0])

    @property
    def scale(self) -> torch.Tensor:
        """The scale of each value's group."""
        return self._whole(self.parts[1])

    @property
    def second(self) -> torch.Tensor:
        """The float32 scale above it; 1 where there is none."""
        return self._whole(self.parts[2])

    @property
    def decoded(self) -> torch.Tensor:
        """What the product sees, float32."""
        codes, scale, second = self.parts
        return self._whole(codes * (scale * second))

    def t(self) -> Quantised:
        """The other layout of the same quantisation."""
        return Quantised(self.parts, self.shape, not self.transposed)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        rows, columns = self.shape
        filled = part.expand_as(self.parts[0])
        matrix = filled.reshape(filled.shape[0] * filled.shape[1], -1)[:rows, :columns]
        return matrix.t() if self.transposed else matrix


def round_to_grid(x: torch.Tensor, grid: str, generator: torch.Generator | None = None) -> torch.Tensor:
    """Values of ``grid`` nearest to ``x``, ties to even, or one of the two neighbours by chance with a generator.

    The chance is the share of the way, so that the mean is ``x`` wherever it is not above the largest value: that one
    saturates. ``x`` is float32.
    """
    bits, smallest, largest = GRIDS[grid]
    # The bits of the exponent alone are the power of two below: what is between two of them has steps of one size.
    below = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = below.clamp_(min=2.0**smallest).mul_(2.0**-bits)
    steps = x.clamp(-largest, largest).div_(step)
    if generator is None:
        steps = steps.round_()
    else:
        steps = steps.add_(torch.rand(steps.shape, generator=generator, device=steps.device)).floor_()
    return steps.mul_(step).clamp_(-largest, largest)


def power_of_two_up(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least ``x``, as E8M0 stores it; 1 for 0."""
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(*E8M0_EXPONENTS)
    return torch.where(x > 0, torch.ldexp(torch.ones_like(x), exponent), torch.ones_like(x))


def power_of_two_down(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is at most ``x``, which is above 0."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)


def hadamard(x: torch.Tensor, width: int) -> torch.Tensor:
    """Signed Walsh-Hadamard transform of every ``width`` values of the last dimension, without its factor.

    Twice the transform without signs is ``width`` times the identity, and nothing is multiplied but by +1 and -1: what
    float32 can add exactly comes back exactly.
    """
    return _butterflies(x * _signs(x, width), width)


def _signs(x: torch.Tensor, width: int) -> torch.Tensor:
    bits = [1.0 if SIGNS >> (i % 16) & 1 else -1.0 for i in range(width)]
    return torch.tensor(bits, dtype=x.dtype, device=x.device).repeat(x.shape[-1] // width)


def _butterflies(x: torch.Tensor, width: int) -> torch.Tensor:
    shape, half = x.shape, 1
    while half < width:
        pairs = x.reshape(-1, width // (2 * half), 2, half)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
        half *= 2
    return x.reshape(shape)


def quantise(
    x: torch.Tensor,
    quantiser: Quantiser,
    generator: torch.Generator | None = None,
    maximum: torch.Tensor | None = None,
) -> Quantised:
    """Quantise a matrix whose last dimension is the contraction.

    Args:
        x: rows x contraction; a last group that is not whole is filled up with zeros.
        quantiser: the rule; its Hadamard transform has been applied.
        generator: of chance, used where the rule rounds stochastically.
        maximum: the group's maximum where the rule does not look at ``x`` (delayed scaling).
    """
    rows, width = x.shape
    group_rows = quantiser.rows or rows
    block = quantiser.block or width
    padded = _padded(x.float(), group_rows, block)
    groups = padded.reshape(padded.shape[0] // group_rows, group_rows, padded.shape[1] // block, block)
    largest = groups.abs().amax((1, 3), keepdim=True)
    if quantiser.rule == "history" and maximum is not None:
        largest = maximum.float().expand_as(largest)
    factor, scale, second = _scales(largest, quantiser)
    chance = generator if quantiser.stochastic else None
    codes = round_to_grid(groups * factor, quantiser.values, chance)
    return Quantised((codes, scale, second), (rows, width))


def _padded(x: torch.Tensor, rows: int, block: int) -> torch.Tensor:
    more_rows, more = -x.shape[0] % rows, -x.shape[1] % block
    return nn.functional.pad(x, (0, more, 0, more_rows)) if more or more_rows else x


def _scales(largest: torch.Tensor, quantiser: Quantiser) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what values are multiplied with, the stored scale, the second scale), of the groups' maxima."""
    top, one = GRIDS[quantiser.values][2], torch.ones_like(largest)
    if quantiser.scale == "fp32":
        # torchao/float8/float8_utils.py: amax_to_scale divides in float64.
        factor = (top / largest.double().clamp(min=1e-12)).float()
        if quantiser.rule == "power-of-two":
            factor = power_of_two_down(factor)
        return factor, 1.0 / factor, one
    if quantiser.scale == "e8m0":
        if quantiser.rule == "ceiling":
            # The smallest power of two under which nothing is clipped.
            scale = power_of_two_up(largest / top)
            return 1.0 / scale, scale, one
        # The power of two that encloses the maximum lands on the largest value; the constant joins the product.
        scale = power_of_two_up(largest)
        if quantiser.rule == "finer":
            scale = torch.where((largest > 0) & (largest / scale < FINER_BELOW), scale / 2, scale)
        return top / scale, scale / top, one
    # E4M3 under a float32 scale that lets the largest group use the largest E4M3 (torchao's nvfp4_quantize).
    second = _reach(largest, quantiser.second) / (GRIDS["e4m3"][2] * top)
    second = torch.where(second > 0, second, one)
    stored = (largest / top / second).clamp(E4M3_TINY, GRIDS["e4m3"][2]).to(torch.float8_e4m3fn).float()
    return (1.0 / second) / stored, stored, second


def _reach(largest: torch.Tensor, second: str) -> torch.Tensor:
    """The maximum over all groups that share the second scale."""
    if second == "tensor":
        return largest.amax().expand_as(largest)
    rows = largest.amax((2, 3), keepdim=True)
    tiles = [tile.amax(0, keepdim=True).expand_as(tile) for tile in rows.split(TILE_ROWS)]
    return torch.cat(tiles).expand_as(largest)


class RouteLinear(nn.Linear):
    """A linear layer whose products follow a recipe; weight and bias are those of the layer it replaces."""

    recipe: dict[str, tuple[Quantiser, Quantiser]]

    @classmethod
    def of(cls, linear: nn.Linear, recipe: Mapping[str, Any], seed: int) -> RouteLinear:
        """The same layer under ``recipe``; ``seed`` is of its stochastic rounding."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        made.recipe = read_recipe(recipe)
        made.seed = seed
        made.dtype = torch.float32
        made.generator = None
        made.maxima = {name: deque(maxlen=HISTORY) for name in ("input", "weight", "gradient")}
        return made.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input @ weight.T + bias`` in the dtype that autocast, or the input, asks for."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        self.dtype = dtype
        output = _Products.apply(input.to(dtype), self.weight, self)
        return output if self.bias is None else output + self.bias.to(dtype)

    @property
    def looks_back(self) -> bool:
        """Whether some operand's scale follows from earlier steps."""
        return any(quantiser.rule == "history" for pair in self.recipe.values() for quantiser in pair)

    def chance(self, device: torch.device) -> torch.Generator:
        """The layer's own generator on this rank, made on first use where the layer is by then.

        Ranks that drew alike would round alike, and what they average would keep the noise of one.
        """
        if self.generator is None or self.generator.device.type != device.type:
            many = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if many else 0
            self.generator = torch.Generator(device).manual_seed(self.seed + 1_000_000_007 * rank)
        return self.generator

    def highest(self, name: str) -> torch.Tensor | None:
        """The largest of earlier maxima; None on the first step (Transformer Engine takes a scale of 1 there)."""
        seen = self.maxima[name]
        return torch.stack(list(seen)).amax() if seen else None

    def operand(self, x: torch.Tensor, quantiser: Quantiser, name: str, second: bool = False) -> torch.Tensor:
        """What a product sees of the matrix ``x``, rows x contraction.

        Args:
            x: in full precision.
            quantiser: the rule.
            name: whose history of maxima it has.
            second: the other operand of a Hadamard pair.
        """
        if quantiser.values == "bf16":
            # What the product would be handed: under autocast the weight's low-precision copy.
            return x.to(self.dtype).float()
        if quantiser.hadamard:
            width = quantiser.hadamard
            # The two factors make 1 / width together, and both are powers of two.
            halves = int(math.log2(width))
            x = hadamard(_padded(x.float(), 1, width), width)
            x = x * 2.0 ** -(halves - halves // 2 if second else halves // 2)
        return quantise(x, quantiser, self.chance(x.device), self.highest(name)).decoded


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: RouteLinear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        activation, stored = layer.recipe["input"]
        with torch.autocast(x.device.type, enabled=False):
            rows = layer.operand(x.reshape(-1, x.shape[-1]), activation, "input")
            output = rows @ layer.operand(weight, stored, "weight").t()
        return output.reshape(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer: RouteLinear = ctx.layer
        dy, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dw = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = input_gradient(layer, dy, weight).reshape(x.shape).to(x.dtype)
            if ctx.needs_input_grad[1]:
                by_tokens, activations = layer.recipe["wgrad"]
                left = layer.operand(dy.t(), by_tokens, "gradient")
                dw = (left @ layer.operand(rows.t(), activations, "input", second=True).t()).to(weight.dtype)
        if layer.looks_back:
            # Once a step, after a recompute has used what the first forward did.
            for name, seen in (("input", rows), ("weight", weight), ("gradient", dy)):
                layer.maxima[name].append(seen.detach().abs().amax().float())
        return dx, dw, None


def input_gradient(layer: RouteLinear, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``dY @ W`` as the recipe says.

    A weight whose groups are square is the one of the forward product, in its other layout; any other is quantised
    again from its full precision, along the contraction of this product.
    """
    gradient, stored = layer.recipe["igrad"]
    forward = layer.recipe["input"][1]
    if stored == forward and stored.serves_both_layouts:
        right = layer.operand(weight, stored, "weight")
    else:
        right = layer.operand(weight.t(), stored, "weight").t()
    return layer.operand(dy, gradient, "gradient") @ right


def read_recipe(recipe: Mapping[str, Any]) -> dict[str, tuple[Quantiser, Quantiser]]:
    """Quantisers of a recipe as JSON holds it."""
    products = ("input", "igrad", "wgrad")
    return {p: (Quantiser(**recipe[p][0]), Quantiser(**recipe[p][1])) for p in products}


def body_linears(model: nn.Module, keep_last: int = 0, features: int = 1) -> list[str]:
    """Names of the linears that a route converts: those of the decoder blocks.

    Left out are the head and all else outside the blocks, adapters, routers, the last ``keep_last`` blocks, and what
    is not a multiple of ``features`` wide and high.
    """
    stacks = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    stacks = [(name, m) for name, m in stacks if any(type(part) is nn.Linear for part in m.modules())]
    if not stacks:
        return []
    stack, blocks = max(stacks, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    chosen = []
    for number, block in enumerate(blocks[: len(blocks) - keep_last]):
        for name, module in block.named_modules():
            last = name.rpartition(".")[2]
            apart = "lora_" in name or last in ("gate", "router", "shared_expert_gate")
            whole = isinstance(module, nn.Linear) and not (
                module.in_features % features or module.out_features % features
            )
            if type(module) is nn.Linear and whole and not apart:
                chosen.append(f"{stack}.{number}.{name}")
    return chosen


def convert(model: nn.Module, recipe: Mapping[str, Any], seed: int = 0) -> list[str]:
    """Put ``RouteLinear`` in the place of every linear that the recipe covers; their names.

    Raises:
        ValueError: the model has none.
    """
    names = body_linears(model, recipe.get("keep_last", 0), recipe.get("features", 1))
    if not names:
        raise ValueError("the recipe covers no linear of this model: none in its decoder blocks is of a fitting size")
    for number, name in enumerate(names):
        parent, _, last = name.rpartition(".")
        linear = model.get_submodule(name)
        setattr(model.get_submodule(parent), last, RouteLinear.of(linear, recipe, seed * 100_003 + number))
    return names
