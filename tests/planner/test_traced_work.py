"""Traced work beside the closed forms on every bundled model, and how its lines become work of one token."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from planner.choice import Choice
from planner.memory.coefficients import Affine, LayerWork, OperatorWork
from planner.memory.model import MemoryModel
from planner.memory.parts import MemoryJob
from planner.problem import layer_work_of, make_problem
from planner.time.traced_work import token_work
from planner.time.work import Work
from profiles.models import list_models
from tests.planner.replay import H100_WITHOUT_RATES, bundled, bundled_coefficients, inputs_of

SEQUENCE = 4096
TOKENS = 4 * SEQUENCE
FULL = Choice(method="full", loss_path="fused", recompute="full", weights="bf16", mixed_precision="no")
CASES: dict[str, Choice] = {
    "full": FULL,
    "without recompute": replace(FULL, recompute="none"),
    "every second layer": replace(FULL, recompute="every_2"),
    "flash_attention_2": replace(FULL, attention="flash_attention_2"),
    "fp32 weights": replace(FULL, weights="fp32", mixed_precision="bf16"),
    "lora": replace(FULL, method="lora", mixed_precision="bf16", sharding="fsdp", dp_shard=2),
    "lora on one card": replace(FULL, method="lora", mixed_precision="bf16"),
    "qlora": replace(FULL, method="qlora", mixed_precision="bf16"),
}
BYTES_MEDIAN = 0.035
BYTES_WORST = 0.10
"""Bytes outside products: half of the models within 3.5 %, all within 10 % but for those below."""
FEW_BYTES = {
    "deepseek-ai/DeepSeek-V2-Lite": "latent attention: 22 % of its bytes are not in the closed forms",
    "Qwen/Qwen3-30B-A3B": "adapters of stacked experts: the closed forms count routed copies, PEFT makes whole "
    "weights; and 14 % more under fp32 weights",
    "Qwen/Qwen3-Next-": "10 % more under fp32 weights",
    "Qwen/Qwen3-235B-A22B": "the same",
    "mistralai/Mixtral-": "few wide experts: 15 to 24 % more; and adapters as above",
    "microsoft/Phi-3": "projections in one product, whose parts are copied: 11 % more",
    "microsoft/Phi-4-mini-": "the same",
    "microsoft/phi-4": "the same",
    "allenai/OLMo-2-": "norms over whole queries and keys: 12 to 16 % more",
    "THUDM/GLM-4-": "norms behind the blocks as well: 12 % less than the closed forms count, 22 % under fp32 weights",
    "google/gemma-7b": "19 % more under fp32 weights",
    "google/gemma-2b": "16 % more under fp32 weights",
    "openai/gpt-oss-": "attention by operators, with sinks",
    "google/gemma-2-": "attention by operators, with a soft cap",
}


def both(name: str, choice: Choice) -> tuple[Work, Work] | None:
    """(closed, traced) work of one token, None where nothing is bundled for the choice."""
    architecture = bundled(name)
    memory = MemoryModel(
        job=MemoryJob(architecture=architecture, seq_len=SEQUENCE, padded=False),
        hardware=H100_WITHOUT_RATES,
        reserve=0.05,
        source=bundled_coefficients,
    )
    traced = layer_work_of(memory)(choice, False)
    if not traced:
        return None
    values: dict[str, Any] = {
        "sequence": SEQUENCE,
        "lora_r": 16,
        "lora_targets": "all-linear",
        "masked": False,
        "fp32_residual": choice.weights == "fp32",
    }
    closed, formula = token_work(architecture, choice, **values)
    found, evidence = token_work(architecture, choice, traced=traced, **values)
    assert (formula, evidence) == ("formula", "traced")
    return closed, found


NAMES = tuple(model.name for model in list_models())


@pytest.mark.parametrize("case", CASES)
def test_closed_forms_hold_to_the_traces(case: str) -> None:
    compared = {name: found for name in NAMES if (found := both(name, CASES[case])) is not None}
    assert len(compared) >= 40
    off: dict[str, float] = {}
    for name, (closed, traced) in compared.items():
        kinds = bundled(name).kinds
        if not name.startswith("deepseek-ai"):
            # flash-attn pads the values of latent attention to the width of its keys.
            assert closed.attention_flops == pytest.approx(traced.attention_flops, rel=0.001), name
            assert closed.masked_attention_flops == pytest.approx(traced.masked_attention_flops, rel=0.001), name
        adapted_mixture = CASES[case].method != "full" and any(kind.experts for kind in kinds)
        if not adapted_mixture and all(kind.attention != "linear" for kind in kinds):
            per_batch = traced.matmul_flops_per_batch / TOKENS
            assert closed.matmul_flops == pytest.approx(traced.matmul_flops + per_batch, rel=0.02), name
            assert closed.expert_flops == pytest.approx(traced.expert_flops, rel=0.001), name
        elif not adapted_mixture:
            # Linear attention's products by torch operators, a twentieth of the whole, are counted by its kernels.
            total = traced.matmul_flops + traced.matmul_flops_per_batch / TOKENS
            assert closed.matmul_flops + closed.linear_flops == pytest.approx(total, rel=0.05), name
        moved = traced.elementwise_bytes + traced.elementwise_bytes_per_batch / TOKENS
        off[name] = abs(closed.elementwise_bytes / moved - 1)
    assert median(off.values()) < BYTES_MEDIAN
    far = {name for name, error in off.items() if error > BYTES_WORST}
    assert {name for name in far if not name.startswith(tuple(FEW_BYTES))} == set()


def test_a_plan_says_what_its_time_rests_on() -> None:
    def evidence(targets: Any) -> str:
        job = {
            "model": "Qwen/Qwen3-8B",
            "machine": "8xH100-80GB",
            "method": "lora",
            "lora": {"target_modules": targets},
        }
        inputs = replace(inputs_of(job, stack={"trl": "1.16.0"}), source=bundled_coefficients)
        found = make_problem(inputs).judge.time.estimate(replace(CASES["lora"], dp_shard=8))
        assert found is not None
        return found.evidence

    assert evidence("all-linear") == "traced"
    assert evidence(["q_proj"]) == "formula"


def test_linear_attention_is_traced_by_operators_alone() -> None:
    """With flash-linear-attention in the stack, 24 linear layers of Qwen3.5-0.8B are priced by its kernels."""
    job = {"model": "Qwen/Qwen3.5-0.8B", "machine": "1xH100-80GB", "seq_len": 16_384}
    times = {}
    for stack in ({}, {"flash-linear-attention": "0.4.0"}):
        inputs = replace(inputs_of(job, stack={"trl": "1.16.0", **stack}), source=bundled_coefficients)
        found = make_problem(inputs).judge.time.estimate(FULL)
        assert found is not None
        times[found.evidence] = found.step_s
    assert set(times) == {"traced", "formula"}
    assert times["traced"] > 3 * times["formula"]


def layer(**lines: Affine) -> LayerWork:
    once = OperatorWork(**lines)
    return LayerWork(none=once, full=once, selective=once)


def work_of(traced: LayerWork, choice: Choice = FULL, sequence: int = SEQUENCE, **changes: Any) -> Work:
    architecture = bundled("Qwen/Qwen3-8B")
    values: dict[str, Any] = {
        "sequence": sequence,
        "lora_r": 16,
        "lora_targets": "all-linear",
        "masked": False,
        "fp32_residual": False,
    }
    return token_work(architecture, choice, traced=(traced,), **{**values, **changes})[0]


def test_what_grows_with_pairs_grows_with_the_sequence() -> None:
    found = work_of(layer(elementwise_bytes=Affine(100.0, 0.0, 3.0), matmul_flops=Affine(10.0, 7.0, 2.0)))
    assert found.elementwise_bytes == 36 * (100 + 3 * 4096)
    assert found.matmul_flops == 36 * (10 + 2 * 4096)
    assert found.matmul_flops_per_batch == 36 * 7


@pytest.mark.parametrize(("sequence", "seen"), [(256, 256), (512, 512), (4096, (2 * 4096 - 512) * 512 / 4096)])
def test_a_window_is_counted_exactly(sequence: int, seen: float) -> None:
    """gemma-3-1b: 4 heads of 256 that look back 512 tokens in 22 of 26 layers; the line of a trace is not asked."""
    traced = layer(attention_flops=Affine(1.0, -1.0))
    choice = replace(FULL, attention="flash_attention_2")
    values: dict[str, Any] = {"lora_r": 16, "lora_targets": "all-linear", "masked": False, "fp32_residual": False}
    architecture = bundled("google/gemma-3-1b-pt")
    found, _ = token_work(architecture, choice, sequence=sequence, traced=(traced, traced), **values)
    assert found.attention_flops == pytest.approx(9 * 1024 * (22 * seen + 4 * sequence))


def test_casts_of_weights_are_shared_out_where_autocast_makes_none() -> None:
    traced = layer(elementwise_bytes=Affine(0.0, 800.0))
    autocast = replace(FULL, weights="fp32", mixed_precision="bf16")
    assert work_of(traced, autocast).elementwise_bytes_per_batch == 36 * 800
    assert work_of(traced, replace(autocast, sharding="fsdp", dp_shard=8)).elementwise_bytes_per_batch == 36 * 100


def test_layers_are_mixed_as_they_are_recomputed() -> None:
    once, again = OperatorWork(matmul_flops=Affine(6.0)), OperatorWork(matmul_flops=Affine(8.0))
    traced = LayerWork(none=once, full=again, selective=again)
    found = work_of(traced, replace(FULL, recompute="every_3"))
    assert found.matmul_flops == pytest.approx(24 * 6 + 12 * 8)
    assert found.recompute_flops == pytest.approx(12 * 2)


def test_liger_and_a_packed_base_come_on_top() -> None:
    traced = layer(elementwise_bytes=Affine(4e6), launches=Affine(0.0, 200.0))
    plain, fused = work_of(traced), work_of(traced, liger=True)
    norms = (2 * 4096 + 5120) * (2 * 32 + 90)
    rest = 5120 * (2 * 16.8 + 24.8) + 12_288 * (2 * 4 + 8)
    assert plain.elementwise_bytes - fused.elementwise_bytes == pytest.approx(36 * (norms + rest))
    packed = work_of(traced, replace(FULL, method="qlora"), quantization="nf4")
    assert packed.elementwise_bytes_per_batch == pytest.approx(36 * 3 * 2.5625 * 192_937_984)
