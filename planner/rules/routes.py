"""Precision routes below 16 bits: on which cards and packages, and with what they have been tried."""

from __future__ import annotations

from planner.choice import FSDP2, Choice
from planner.precision.routes import lack_of
from planner.rules.book import refuses
from planner.rules.context import RuleContext

PLAIN = frozenset({"none", "ddp"})


def _asks(context: RuleContext) -> bool:
    return context.asked_route is not None


def _converts(context: RuleContext) -> bool:
    """A package's conversion, not the reference layer."""
    return context.asked_route is not None and not context.asked_route.emulated


@refuses(
    "route-machine",
    why="FP8 and FP4 products are instructions of some cards, reached through kernels of some packages",
    versions="all",
    source="profiles/routes.toml, each route with its own",
    applies=_converts,
)
def route_machine(context: RuleContext, choice: Choice) -> str | None:
    """A precision route without its card, its packages or anybody's kernels."""
    asked = context.asked_route
    assert asked is not None
    lack = lack_of(
        asked.route,
        on_cpu=context.on_cpu,
        capability=context.compute_capability,
        versions=context.versions,
        cuda=context.cuda,
    )
    return f"precision route {asked.route.id}: {lack.reason}" if lack.kind else None


@refuses(
    "route-full-training",
    why="converters take adapters for layers of their own and quantise them, and no run of one was tried",
    versions="all",
    source="accelerate/utils/ao.py:63-78 @1.15.0 (lora_A and lora_B with r 16 become Float8Linear; tried)",
    concerns="adapter",
    applies=_asks,
)
def route_full_training(context: RuleContext, choice: Choice) -> str | None:
    """A precision route with an adapter."""
    return f"precision routes are written for full training, not for {choice.method}: pin precision=bf16"


@refuses(
    "route-sft",
    why="other trainers generate with the model, or hold a second one, which the conversion would not reach",
    versions="all",
    source="trl/trainer/sft_trainer.py @1.16.0: one model, converted before it is prepared; tried with SFT alone",
    applies=_asks,
)
def route_sft(context: RuleContext, choice: Choice) -> str | None:
    """A precision route with another trainer than SFT."""
    if context.trainer != "sft":
        return f"precision routes are written for sft, not for {context.trainer}: pin precision=bf16"
    return None


@refuses(
    "route-sharding",
    why="ZeRO-3 gives parameters back behind the layer's own hooks, and split sequences change the tokens that a scale"
    " is made of",
    versions="all",
    source="deepspeed/runtime/zero/parameter_offload.py @0.19.8; not tried",
    applies=_asks,
)
def route_sharding(context: RuleContext, choice: Choice) -> str | None:
    """A precision route under ZeRO, FSDP1 or split sequences."""
    asked = context.asked_route
    assert asked is not None
    if choice.cp > 1 or choice.sp > 1 or choice.tp > 1:
        return f"precision route {asked.route.id} is not written for split sequences or layers: pin cp=1, sp=1 and tp=1"
    if choice.sharding not in PLAIN and choice.sharding not in FSDP2:
        return f"precision route {asked.route.id} is not written for {choice.sharding}: pin sharding=fsdp or ddp"
    return None


@refuses(
    "route-numerics",
    why="routes leave the range of bf16 to the rest of the model, and torchao's MX products ask for bf16 operands",
    versions="torchao 0.18",
    source="torchao/prototype/moe_training/mxfp8_linear.py @0.18.0 (expected m1 and m2 to have the same dtype; tried)",
    applies=_asks,
)
def route_numerics(context: RuleContext, choice: Choice) -> str | None:
    """A precision route in fp16, or MX products of fp32 weights."""
    asked = context.asked_route
    assert asked is not None
    if "fp16" in (choice.weights, choice.mixed_precision):
        return f"precision route {asked.route.id} goes with bf16: choose mixed_precision bf16"
    half = choice.weights == "bf16" or (choice.sharding in FSDP2 and choice.mixed_precision == "bf16")
    if asked.route.needs_half_weights and not asked.emulated and not half:
        return f"precision route {asked.route.id} multiplies bf16 weights: pin weights=bf16 and mixed_precision=no"
    return None


@refuses(
    "route-recompute",
    why="accelerate wraps the model's forward in Transformer Engine's autocast, and a recompute runs outside it: layers"
    " run in FP8 once and in bf16 the second time",
    versions="accelerate 1.15",
    source="accelerate/utils/transformer_engine.py @1.15.0; TransformerEngine issues 415, 1190; tried with a recorder"
    " in its place",
    applies=_converts,
)
def route_recompute(context: RuleContext, choice: Choice) -> str | None:
    """Transformer Engine through accelerate, with recompute."""
    asked = context.asked_route
    assert asked is not None
    if asked.route.needs_no_recompute and choice.recompute != "none":
        return f"precision route {asked.route.id} is lost in recomputed layers: pin recompute=none"
    return None


@refuses(
    "route-tied-head",
    why="the converter replaces every linear by a new one with a copy of the weight, the tied head among them",
    versions="accelerate 1.15",
    source="accelerate/utils/transformer_engine.py:26-64 @1.15.0 (82,304 parameters become 90,496; tried)",
    applies=_converts,
)
def route_tied_head(context: RuleContext, choice: Choice) -> str | None:
    """Transformer Engine through accelerate, with a head tied to the embedding."""
    asked = context.asked_route
    assert asked is not None
    if asked.route.unties_head and context.model.tied:
        return f"precision route {asked.route.id} would untie head and embedding: pin precision=fp8-te-current"
    return None


@refuses(
    "route-shapes",
    why="a scale belongs to a whole group of values along the contraction, tokens in the weight gradient",
    versions="all",
    source="torchao/prototype/mx_formats/mx_tensor.py @0.18.0 (must be divisible by block_size 32; tried)",
    applies=_asks,
)
def route_shapes(context: RuleContext, choice: Choice) -> str | None:
    """A precision route on widths, or packed lengths, that its groups do not divide."""
    asked = context.asked_route
    assert asked is not None
    route = asked.route
    if not context.route_covers:
        return f"precision route {route.id} covers no layer of this model: widths must be multiples of {route.features}"
    if context.packing and context.seq_len % route.tokens and not asked.emulated:
        return f"precision route {route.id} needs packed rows of a multiple of {route.tokens} tokens: change seq_len"
    return None
