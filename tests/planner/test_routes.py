"""Precision routes in plans: which card and stack may run them, what they cost, the published table by the model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.routes import MARKS, PAGE, read_rows, tables
from planner.choice import Choice
from planner.memory.activations import ActivationsAt, LayerAt, ModeAt
from planner.precision.route_memory import copied_bytes, kept_bytes, with_route
from planner.precision.route_time import covered_linears, route_work
from planner.precision.routes import asked_route, lack_of, low_routes
from planner.problem import Problem
from planner.rules import RULES, first_refusal
from profiles.cards import find_card
from profiles.routes import find_route, load_routes
from tests.planner.replay import problem_of

LLAMA = "meta-llama/Meta-Llama-3-8B"
BOTH = {"torchao": "0.18.0", "transformer-engine": "2.20.2", "accelerate": "1.15.0"}
CHOICE = Choice(
    method="full", loss_path="fused", recompute="none", sharding="fsdp", dp_shard=8, micro_batch=1, grad_accum=1
)


def offered(card: str, versions: dict[str, str]) -> set[str]:
    major, minor = find_card(card).compute_capability.split(".")
    capability = (int(major), int(minor))
    found = {r.id: lack_of(r, on_cpu=False, capability=capability, versions=versions) for r in low_routes()}
    return {name for name, lack in found.items() if not lack.kind}


AO = {"fp8-ao-tensorwise", "fp8-ao-rowwise", "fp8-ao-rowwise-gw-hp"}
TE_ADA = {"fp8-te-delayed", "fp8-te-current"}
TE_BLACKWELL = {"mxfp8-te", "nvfp4-te", "nvfp4-te-last4"}


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("T4", set[str]()),
        ("A100-80GB", set[str]()),
        ("L4", AO | TE_ADA),
        ("RTX4090", AO | TE_ADA),
        # Float8BlockScaling is Hopper's own.
        ("H100-80GB", AO | TE_ADA | {"fp8-te-block"}),
        ("B200", AO | TE_ADA | TE_BLACKWELL | {"mxfp8-ao"}),
        ("B300", AO | TE_ADA | TE_BLACKWELL | {"mxfp8-ao"}),
        # sm_120 has no stochastic rounding, and Transformer Engine no MXFP8 for it.
        ("RTX5090", AO | TE_ADA),
    ],
)
def test_a_card_offers_what_its_products_can(card: str, expected: set[str]) -> None:
    assert offered(card, BOTH) == expected


def test_packages_decide_as_well() -> None:
    assert offered("B200", {}) == set()
    assert offered("B200", {"torchao": "0.18.0", "accelerate": "1.15.0"}) == AO | {"mxfp8-ao"}
    # NVFP4 came with Transformer Engine 2.8.
    assert "nvfp4-te" not in offered("B200", {"transformer-engine": "2.7"})
    lack = lack_of(find_route("nvfp4-te"), on_cpu=False, capability=(10, 0), versions={"transformer-engine": "2.7"})
    assert lack.kind == "package"
    assert "needs transformer-engine >= 2.8, transformer-engine 2.7 is there" in lack.reason


def test_cuda_decides_where_it_is_known() -> None:
    route, here = find_route("fp8-te-block"), {"transformer-engine": "2.20.2"}
    old = lack_of(route, on_cpu=False, capability=(9, 0), versions=here, cuda="12.6")
    assert old.reason == "needs CUDA 12.9, torch was built for 12.6"
    assert not lack_of(route, on_cpu=False, capability=(9, 0), versions=here, cuda="13.0").kind
    assert not lack_of(route, on_cpu=False, capability=(9, 0), versions=here).kind


def test_what_is_missing_is_said() -> None:
    lack = lack_of(find_route("nvfp4-te"), on_cpu=False, capability=(12, 0), versions=BOTH)
    assert lack.reason.startswith("needs compute capability 10.0 to 10.3, the card has 12.0: stochastic rounding")
    assert lack_of(find_route("mxfp4-sr"), on_cpu=False, capability=(10, 0), versions=BOTH).kind == "kernels"
    assert lack_of(find_route("nvfp4-te"), on_cpu=True, capability=None, versions=BOTH).reason == "needs a GPU"
    assert not lack_of(find_route("fp8-ao-rowwise"), on_cpu=True, capability=None, versions=BOTH).kind
    assert "not known" in lack_of(find_route("nvfp4-te"), on_cpu=False, capability=None, versions=BOTH).reason


def problem(machine: str = "8xH100-80GB", route: str = "fp8-ao-rowwise", **job: Any) -> Problem:
    model = job.pop("model", "Qwen/Qwen3-8B")
    stack = {"trl": "1.16.0", "torchao": "0.18.0", "transformer-engine": "2.20.2"}
    return problem_of({"model": model, "machine": machine, "pins": {"precision": route}, **job}, stack=stack)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("fp8-ao-rowwise", {}, {}, None),
    ("fp8-ao-rowwise", {"sharding": "zero3"}, {}, "route-sharding"),
    ("fp8-ao-rowwise", {"cp": 2, "dp_shard": 4, "grad_accum": 2}, {"data": {"packing": False}}, "route-sharding"),
    ("fp8-ao-rowwise", {"method": "lora", "weights": "bf16"}, {"method": "lora"}, "route-full-training"),
    ("fp8-ao-rowwise", {"mixed_precision": "fp16"}, {}, "route-numerics"),
    ("fp8-ao-rowwise", {}, {"trainer": "reward"}, "route-sft"),
    ("fp8-te-delayed", {}, {}, None),
    ("fp8-te-delayed", {"recompute": "full"}, {}, "route-recompute"),
    ("fp8-te-delayed", {}, {"model": "Qwen/Qwen3-0.6B"}, "route-tied-head"),
    ("fp8-te-current", {"recompute": "full"}, {"model": "Qwen/Qwen3-0.6B"}, None),
    ("nvfp4-te", {}, {}, "route-machine"),
    ("mxfp4-sr", {}, {}, "route-machine"),
    # The reference layer runs anywhere.
    ("mxfp4-sr:emulated", {}, {}, None),
    ("nvfp4-te:emulated", {"recompute": "full"}, {}, None),
]


@pytest.mark.parametrize(("route", "change", "job", "rule"), REFUSED)
def test_what_routes_go_with(route: str, change: dict[str, Any], job: dict[str, Any], rule: str | None) -> None:
    rules = problem(route=route, **job).judge.rules
    found = first_refusal(rules, replace(CHOICE, precision=route, **change))
    assert (found.rule if found else None) == rule, found


def test_every_rule_about_routes_is_shown() -> None:
    known = {rule.id for rule in RULES if rule.check.__module__ == "planner.rules.routes"}
    assert known - {rule for *_, rule in REFUSED} == {"route-shapes"}  # below


def test_mx_products_ask_for_bf16_weights_and_whole_groups() -> None:
    rules = problem("1xB200", "mxfp8-ao").judge.rules
    one = replace(CHOICE, precision="mxfp8-ao", sharding="none", dp_shard=1, grad_accum=8)
    refused = first_refusal(rules, one)
    assert refused is not None
    assert refused.rule == "route-numerics"
    assert first_refusal(rules, replace(one, weights="bf16", mixed_precision="no")) is None
    packed = problem("1xB200", "mxfp8-ao", seq_len=4000, data={"packing": True}).judge.rules
    assert first_refusal(packed, replace(one, packing=True, weights="bf16", mixed_precision="no")) is None
    odd = problem("1xB200", "mxfp8-ao", seq_len=4001, data={"packing": True}).judge.rules
    refused = first_refusal(odd, replace(one, packing=True, weights="bf16", mixed_precision="no"))
    assert refused is not None
    assert refused.rule == "route-shapes"


def test_a_pin_names_a_route() -> None:
    assert asked_route({}) is None
    assert asked_route({"precision": "bf16"}) is None
    found = asked_route({"precision": "mxfp4-sr:emulated"})
    assert found is not None
    assert found.emulated


def test_covered_products_are_those_of_the_layers() -> None:
    """Llama-3-8B by hand: per layer q and o 4096 x 4096, k and v 4096 x 1024, three of 4096 x 14336."""
    architecture = problem(model=LLAMA).judge.memory.job.architecture
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert sum(m.num_weights for m in covered_linears(architecture.kinds[0], 128)) == layer
    inputs = 3 * 4096 + 4096 + 2 * 4096 + 14336
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    work = route_work(architecture, find_route("nvfp4-te"), 0.0)
    assert work.flops == 32 * 6 * layer
    assert work.values == 32 * (inputs + outputs)
    assert (work.flops_again, work.values_again) == (0, 0)
    # Four blocks stay in bf16; a recompute repeats all products but the last.
    kept = route_work(architecture, find_route("nvfp4-te-last4"), 1.0)
    assert kept.flops == 28 * 6 * layer
    assert kept.flops_again == 28 * 2 * (layer - 4096 * 14336)
    assert kept.weights == 2 * 28 * layer
    # Two products of three below 16 bits.
    assert route_work(architecture, find_route("fp8-ao-rowwise-gw-hp"), 0.0).flops == 32 * 4 * layer


def test_memory_is_not_half_of_bf16() -> None:
    """Kept per token and layer of Llama-3-8B, by hand: FP8 copies of seven inputs, three shared tensors in bf16."""
    kind = problem(model=LLAMA).judge.memory.job.architecture.kinds[0]
    inputs, shared = 7 * 4096 - 4096 + 14336, 2 * (4096 + 4096 + 14336)
    assert inputs == 3 * 4096 + 4096 + 2 * 4096 + 14336
    assert kept_bytes(kind, find_route("fp8-te-current")) == inputs - shared
    assert kept_bytes(kind, find_route("nvfp4-te")) == 0.5625 * inputs - shared
    # torchao keeps bf16's tensors.
    assert kept_bytes(kind, find_route("fp8-ao-tensorwise")) == 0
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert copied_bytes(kind, find_route("fp8-te-current")) == 2 * weights
    assert copied_bytes(kind, find_route("fp8-ao-rowwise")) == 0


def test_what_a_layer_keeps_and_needs_moves_with_the_route() -> None:
    architecture = problem(model=LLAMA).judge.memory.job.architecture
    mode = ModeAt(10**9, 2 * 10**9, 3 * 10**9, 10**9)
    at = ActivationsAt((LayerAt(mode, mode, mode),), 5, 7)
    route, tokens = find_route("fp8-te-current"), 4096
    found = with_route(at, architecture, route, tokens, emulated=False).kinds[0]
    copies = int(copied_bytes(architecture.kinds[0], route))
    assert found.none.kept - mode.kept == int(kept_bytes(architecture.kinds[0], route) * tokens + copies / 2)
    assert found.none.forward - mode.forward == copies
    assert found.full.kept == mode.kept
    emulated = with_route(at, architecture, route, tokens, emulated=True).kinds[0]
    assert emulated.none.kept == mode.kept
    assert emulated.none.forward - mode.forward == 16 * (tokens * (4096 + 14336) + 4096 * 14336)


def test_only_covered_products_change_their_time() -> None:
    """H100 and Qwen3-8B: FP8 saves time in products, pays for quantising, and leaves the rest of the step alone."""
    plain = problem(route="bf16").judge.time.estimate(CHOICE)
    low = problem(route="fp8-te-delayed").judge.time.estimate(replace(CHOICE, precision="fp8-te-delayed"))
    slow = problem(route="mxfp4-sr:emulated").judge.time.estimate(replace(CHOICE, precision="mxfp4-sr:emulated"))
    assert plain is not None
    assert low is not None
    assert slow is not None
    changed = {part for part in plain.parts if plain.parts[part] != low.parts[part]}
    assert changed == {"matmul", "elementwise"}
    assert 0.4 * plain.parts["matmul"] < low.parts["matmul"] < 0.6 * plain.parts["matmul"]
    assert low.parts["elementwise"] > plain.parts["elementwise"]
    assert plain.step_s > low.step_s > 0.6 * plain.step_s
    assert slow.step_s > plain.step_s


# The four routes of the published table, in the source's own stack. Its author names clocks of 1,455 to 1,620 MHz under
# load against 2,062 nominal; its elementwise kernels are compiled, which by hand move 15 MB a token where eager ones
# move 61.6 (norms, rotary embedding, SwiGLU and residuals read and written once, forward and twice in backward) at the
# share of streaming kernels; 32 cards of one NVLink domain; every 8th block recomputed for bf16, every 32nd for others.
CLOCK = 0.78
COMPILED = 15.0 / 61.6


GEOMETRY = {
    "bf16": (2, 8),
    "mxfp4-sr": (4, 32),
    "mxfp4-sr-h32": (4, 32),
    "nvfp4-te-last4": (2, 32),
    "nvfp4-te": (2, 32),
    "nvfp4-global": (4, 32),
    "nvfp4-cta": (4, 32),
}
"""Route -> its micro-batch, and every how many blocks one is recomputed."""


def in_the_sources_stack(route: str) -> float:
    """Tokens per second and GPU by the time model, in the stack that the table was made with."""
    micro_batch, every = GEOMETRY[route]
    job = {"model": LLAMA, "machine": "32xGB200", "seq_len": 8192, "global_batch": 512}
    time = problem_of(job).judge.time
    hardware = time.hardware
    assert hardware.matmul_flops is not None
    assert hardware.fp4_flops is not None
    slower = replace(hardware, matmul_flops=CLOCK * hardware.matmul_flops, fp4_flops=CLOCK * hardware.fp4_flops)
    below = None if route == "bf16" else find_route(route)
    model = replace(time, hardware=slower, job=replace(time.job, padded=False, route=below))
    assert model.rates is not None
    model.rates = replace(model.rates, elementwise=model.rates.streaming / COMPILED)
    choice = Choice(
        method="full",
        loss_path="chunked",
        recompute=f"every_{every}",  # type: ignore[arg-type]
        sharding="fsdp",
        dp_shard=32,
        micro_batch=micro_batch,
        grad_accum=16 // micro_batch,
        precision=route,
    )
    found = model.estimate(choice)
    assert found is not None
    return found.tokens_per_s_per_gpu


@pytest.mark.parametrize("route", GEOMETRY)
def test_the_published_speed_of_each_route(route: str) -> None:
    found, published = in_the_sources_stack(route), find_route(route).published[0].tokens_per_s
    assert found == pytest.approx(published, rel=0.15)
    # The page shows both.
    page = (Path(__file__).parents[2] / "docs" / "precision.md").read_text(encoding="utf-8")
    shown = re.search(rf"^\| {route} \| ([\d,]+) \| ([\d,]+) \| [^|]*% \|$", page, re.MULTILINE)
    assert shown is not None
    assert [int(number.replace(",", "")) for number in shown.groups()] == pytest.approx([published, found], rel=1e-4)


def test_the_page_shows_what_was_trained() -> None:
    """Every route has three seeds from scratch, and the tables are those of the kept results."""
    rows = read_rows()
    seeds: dict[str, set[int]] = {}
    for row in rows:
        if row["regime"] == "from scratch":
            seeds.setdefault(row["route"], set()).add(row["seed"])
    assert seeds == {route.id: {0, 1, 2} for route in load_routes()}
    assert f"{MARKS[0]}\n{tables(rows)}\n{MARKS[1]}" in PAGE.read_text(encoding="utf-8")
