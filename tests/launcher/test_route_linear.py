"""Numerics of precision routes: against independent tables, torch's own casts, and torchao bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from launcher.children.route_linear import (
    Quantiser,
    RouteLinear,
    body_linears,
    convert,
    hadamard,
    power_of_two_up,
    quantise,
    read_recipe,
    round_to_grid,
)
from profiles.routes import PRODUCTS, Route, load_routes

pytestmark = pytest.mark.stack

MXFP4 = Quantiser(values="e2m1", scale="e8m0", block=32, rule="enclosing")
MXFP4_WEIGHT = Quantiser(values="e2m1", scale="e8m0", block=32, rows=32, rule="finer")
MXFP8 = Quantiser(values="e4m3", scale="e8m0", block=32, rule="ceiling")
NVFP4 = Quantiser(values="e2m1", scale="e4m3", block=16, second="tensor")
NVFP4_WEIGHT = Quantiser(values="e2m1", scale="e4m3", block=16, rows=16, second="tensor")
NVFP4_TILE = Quantiser(values="e2m1", scale="e4m3", block=16, second="tile")

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""OCP Microscaling Formats v1.0, table 5: every value without its sign."""


def values(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Numbers over four orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, width, generator=generator)
    return numbers * torch.exp(2 * torch.randn(rows, 1, generator=generator))


def recipe_of(route: Route) -> dict[str, Any]:
    """The recipe as runs and probes hand it over."""
    return {p: [operand.to_json() for operand in route.operands[p]] for p in PRODUCTS}


def test_e2m1_is_the_table_and_rounds_ties_to_even() -> None:
    points = torch.linspace(-7, 7, 28_001, dtype=torch.float64).float()
    table = torch.tensor(E2M1)
    rounded = round_to_grid(points, "e2m1")
    assert set(rounded.abs().unique().tolist()) == set(E2M1)
    distance = (points.abs().clamp(max=6)[:, None] - table).abs()
    assert torch.equal((points.abs().clamp(max=6) - rounded.abs()).abs(), distance.amin(1))
    # Of two equally near the one with an even code, which is every second of the table.
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    assert round_to_grid(torch.tensor(list(ties)), "e2m1").tolist() == list(ties.values())


@pytest.mark.parametrize(
    ("grid", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_eight_bit_grids_are_torchs(grid: str, dtype: torch.dtype) -> None:
    """Every value of the format is a fixed point, and what lies between rounds as torch's cast does."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    assert torch.equal(round_to_grid(codes, grid), codes)
    points = torch.cat([values(64, 512) * scale for scale in (1e-4, 1e-2, 1.0)])
    points = points.clamp(-codes.max(), codes.max())
    assert torch.equal(round_to_grid(points, grid), points.to(dtype).float())


def test_e8m0_is_torchs_powers_of_two() -> None:
    codes = torch.arange(1, 255, dtype=torch.uint8)
    powers = codes.view(torch.float8_e8m0fnu).float()
    assert torch.equal(power_of_two_up(powers), powers)
    inside = powers[:-1] * 1.25  # rounds up to the next
    assert torch.equal(power_of_two_up(inside), powers[1:])
    assert power_of_two_up(torch.zeros(1)).item() == 1.0


def test_stochastic_rounding_has_no_bias() -> None:
    """The mean of many draws is the value: within five standard errors at each of 500 points, on every grid."""
    generator, draws = torch.Generator().manual_seed(7), 4000
    for grid, top in (("e2m1", 6.0), ("e4m3", 448.0), ("e5m2", 57344.0)):
        points = torch.linspace(-top, top, 500)
        drawn = round_to_grid(points.expand(draws, -1).contiguous(), grid, generator)
        error = (drawn.double().mean(0) - points.double()).abs()
        spread = drawn.double().std(0) / draws**0.5
        assert bool((error <= 5 * spread + 1e-9).all()), grid
        # A draw is one of the two neighbours, never farther than a step.
        assert len(drawn[:, 123].unique()) <= 2
    # Rounding to the nearest is not unbiased: 2.2 is always 2.
    assert round_to_grid(torch.full((10,), 2.2), "e2m1").unique().tolist() == [2.0]
    # Above the largest value there is one neighbour only, so there is a bias; the enclosing scale keeps out of there.
    assert round_to_grid(torch.full((100,), 7.0), "e2m1", generator).unique().tolist() == [6.0]


@pytest.mark.parametrize("width", [16, 32])
def test_hadamard_comes_back_exactly(width: int) -> None:
    x = torch.randint(-1000, 1000, (8, 4 * width), generator=torch.Generator().manual_seed(1)).float()
    # A matrix by its definition: (-1) to the number of ones that two indices share, and the signs of 0x2817.
    signs = [1 if 0x2817 >> (i % 16) & 1 else -1 for i in range(width)]
    matrix = torch.tensor([[(-1) ** (i & j).bit_count() * signs[j] for j in range(width)] for i in range(width)])
    turned = hadamard(x, width).reshape(8, 4, width)
    assert torch.equal(turned, x.reshape(8, 4, width) @ matrix.float().t())
    assert torch.equal(turned @ matrix.float() / width, x.reshape(8, 4, width))


def test_a_hadamard_pair_leaves_the_product_alone() -> None:
    left = torch.randint(-50, 50, (8, 64), generator=torch.Generator().manual_seed(2)).float()
    right = torch.randint(-50, 50, (4, 64), generator=torch.Generator().manual_seed(3)).float()
    assert torch.equal(hadamard(left, 32) @ hadamard(right, 32).t() / 32, left @ right.t())


def test_scales_enclose_and_finer_ones_clip_within_bounds() -> None:
    x = values(64, 128)
    groups = x.reshape(64, 4, 32)
    enclosing = quantise(x, MXFP4)
    # Under the enclosing power of two nothing is clipped: no code is above the grid before rounding.
    assert bool((groups.abs() <= enclosing.scale.reshape(64, 4, 32) * 6).all())
    finer = quantise(x, Quantiser(values="e2m1", scale="e8m0", block=32, rule="finer"))
    ratio = enclosing.scale / finer.scale
    share = groups.abs().amax(2, keepdim=True) / (enclosing.scale.reshape(64, 4, 32) * 6)
    assert torch.equal(ratio.reshape(64, 4, 32), torch.where(share < 0.87, 2.0, 1.0).expand(64, 4, 32))
    # What reaches 0.87 of the enclosing power of two becomes 0.5 of it, and loses no more than that.
    clipped = (x - finer.decoded).abs() / x.abs()
    assert 0.3 < clipped[finer.codes.abs() == 6].max() <= 1 - 0.5 / 0.87


def test_torchao_agrees_bit_for_bit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
        from torchao.float8.float8_utils import tensor_to_scale
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
        from torchao.quantization.quantize_.common import KernelPreference  # noqa: F401

    points = torch.linspace(-7, 7, 14_001)
    ours = round_to_grid(points, "e2m1")
    theirs = kernels.f4_unpacked_to_f32(kernels.f32_to_f4_unpacked(points.clamp(-6, 6)))
    assert torch.equal(ours, theirs)

    x = values(64, 256, seed=4)
    # MXFP8 and MXFP4 under the power of two below which nothing is clipped.
    scale, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    found = quantise(x, MXFP8)
    assert torch.equal(found.codes, codes.float())
    assert torch.equal(found.scale[:, ::32], scale.float())
    scale, codes = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    found = quantise(x, Quantiser(values="e2m1", scale="e8m0", block=32, rule="ceiling"))
    assert torch.equal(found.scale[:, ::32], scale.float())
    decoded = to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, torch.float32)
    assert torch.equal(found.decoded, decoded)

    # NVFP4, two levels.
    second = per_tensor_amax_to_scale(x.abs().amax())
    scale, codes = nvfp4_quantize(x, 16, second)
    found = quantise(x, NVFP4)
    assert torch.equal(found.scale[:, ::16], scale.float())
    assert found.second.unique().tolist() == [second.item()]
    assert torch.equal(found.codes, kernels.f4_unpacked_to_f32(kernels.unpack_uint4(codes)).reshape(x.shape))

    # FP8 under one scale for all, and one for each row rounded down to a power of two.
    from torchao.float8.config import ScalingGranularity

    for quantiser, options in (
        (Quantiser(values="e4m3", scale="fp32", rows=0), {}),
        (Quantiser(values="e5m2", scale="fp32", rows=0), {}),
        (
            Quantiser(values="e4m3", scale="fp32", rule="power-of-two"),
            {
                "scaling_granularity": ScalingGranularity.AXISWISE,
                "axiswise_dim": -1,
                "round_scales_to_power_of_2": True,
            },
        ),
    ):
        dtype = torch.float8_e4m3fn if quantiser.values == "e4m3" else torch.float8_e5m2
        factor = tensor_to_scale(x, dtype, **options)
        limit = torch.finfo(dtype).max
        assert torch.equal(quantise(x, quantiser).codes, (x * factor).clamp(-limit, limit).to(dtype).float())


def test_a_tiles_scale_reaches_no_further_than_its_rows() -> None:
    x = values(256, 64, seed=5)
    louder = torch.cat([x[:128] * 4096, x[128:]])
    quiet, loud = quantise(x, NVFP4_TILE), quantise(louder, NVFP4_TILE)
    assert torch.equal(quiet.decoded[128:], loud.decoded[128:])
    # Under a scale of the whole tensor the second tile changes with the first.
    assert not torch.equal(quantise(x, NVFP4).decoded[128:], quantise(louder, NVFP4).decoded[128:])


def test_one_quantisation_serves_both_layouts_or_each_is_made_from_full_precision() -> None:
    weight = values(64, 96, seed=6)
    for square in (MXFP4_WEIGHT, NVFP4_WEIGHT, Quantiser(values="e4m3", scale="fp32", rows=0)):
        assert square.serves_both_layouts
        # Quantising the transpose is transposing the quantisation: one weight in both products.
        assert torch.equal(quantise(weight.t(), square).decoded, quantise(weight, square).t().decoded)
    x = values(64, 96, seed=7)
    for along in (MXFP4, MXFP8, NVFP4, NVFP4_TILE):
        assert not along.serves_both_layouts
        forward, transposed = quantise(x, along).decoded, quantise(x.t(), along).decoded.t()
        assert not torch.equal(forward, transposed)
        # Quantised twice would be another matrix again, so the second layout comes from what came in.
        assert not torch.equal(quantise(quantise(x, along).decoded.t(), along).decoded.t(), transposed)


def test_a_layer_uses_each_layout_as_its_recipe_says() -> None:
    """Every product of a layer, recomputed by hand from the operands that the recipe names."""
    by_id = {route.id: route for route in load_routes()}
    x, dy = values(64, 96, seed=8) / 10, values(64, 32, seed=9) / 100
    linear = nn.Linear(96, 32, bias=True)
    weight = linear.weight.detach()

    for name in ("mxfp4-sr-h32", "mxfp8-ao", "fp8-te-block", "nvfp4-cta"):
        recipe = recipe_of(by_id[name])
        read = read_recipe(recipe)
        layer = RouteLinear.of(linear, recipe, seed=3)
        entering = x.clone().requires_grad_()
        out = layer(entering)
        out.backward(dy)
        activation, stored = read["input"]
        expected = quantise(x, activation).decoded @ quantise(weight, stored).decoded.t() + linear.bias
        assert torch.equal(out, expected), name
        # The draw of the layer's own generator, seed 3.
        chance = torch.Generator().manual_seed(3)
        gradient, again = read["igrad"]
        right = (
            quantise(weight, again).decoded if again.serves_both_layouts else quantise(weight.t(), again).decoded.t()
        )
        assert torch.equal(entering.grad, quantise(dy, gradient, chance).decoded @ right), name
        left, right = dy.t(), x.t()
        if read["wgrad"][0].hadamard:
            left, right = hadamard(left.contiguous(), 32) / 4, hadamard(right.contiguous(), 32) / 8
        product = quantise(left, read["wgrad"][0]).decoded @ quantise(right, read["wgrad"][1]).decoded.t()
        assert torch.equal(linear.weight.grad, product), name
        linear.weight.grad = linear.bias.grad = None


def test_a_recipe_of_bf16_is_the_layer_itself() -> None:
    linear = nn.Linear(64, 32)
    plain = {p: [Quantiser().__dict__, Quantiser().__dict__] for p in PRODUCTS}
    layer = RouteLinear.of(linear, plain, seed=0)
    x = values(16, 64).requires_grad_()
    first = torch.autograd.grad(linear(x).square().sum(), (x, linear.weight, linear.bias))
    second = torch.autograd.grad(layer(x).square().sum(), (x, linear.weight, linear.bias))
    for mine, theirs in zip(second, first, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_delayed_scaling_looks_at_earlier_steps() -> None:
    route = next(route for route in load_routes() if route.id == "fp8-te-delayed")
    linear = nn.Linear(32, 16, bias=False)
    layer = RouteLinear.of(linear, recipe_of(route), seed=0)
    x = values(16, 32)
    layer(x.requires_grad_()).sum().backward()
    louder = 8 * x.detach()
    # The scale is of the step before, so what is eight times as large saturates.
    late = layer.operand(louder, layer.recipe["input"][0], "input")
    assert late.abs().amax() == pytest.approx(x.detach().abs().amax().item(), rel=1e-5)
    layer(louder).sum().backward()
    now = layer.operand(louder, layer.recipe["input"][0], "input")
    assert now.abs().amax() == pytest.approx(louder.abs().amax().item(), rel=1e-5)


class Tiny(nn.Module):
    """Two decoder blocks, a head and what a route leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(2)
        )
        self.layers[0]["gate"] = nn.Linear(32, 32)
        self.layers[1]["odd"] = nn.Linear(32, 20)
        self.lm_head = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return self.lm_head(x)


def test_a_conversion_covers_the_blocks_and_nothing_else() -> None:
    assert body_linears(Tiny(), features=16) == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    assert body_linears(Tiny(), keep_last=1, features=16) == ["layers.0.up", "layers.0.down"]
    assert "layers.1.odd" in body_linears(Tiny())
    with pytest.raises(ValueError, match="covers no linear"):
        convert(nn.Linear(4, 4), recipe_of(load_routes()[1]))


@pytest.mark.parametrize("route", [route for route in load_routes() if route.id != "bf16"], ids=lambda route: route.id)
def test_every_route_trains(route: Route) -> None:
    torch.manual_seed(0)
    model = Tiny()
    convert(model, {**recipe_of(route), "features": 16}, seed=1)
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
