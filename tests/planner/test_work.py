"""Work of one token against counts of the real transformers classes: FLOPs to the digit, bytes and launches in 2 %."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.time.traced_work import token_work
from planner.time.work import Work, recomputed_share
from tests.planner.replay import bundled, probed_documents, rows

COUNTS = rows("counts")
CHOICE = Choice(method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=2, weights="bf16")


def counted(row: dict[str, Any]) -> Work:
    """Adapters and weights were bf16 without autocast, but for the rows that say autocast (fp32 weights, one card)."""
    choice = replace(CHOICE, method=row["method"], recompute=row["recompute"])
    if row["autocast"]:
        choice = replace(choice, sharding="none", dp_shard=1, weights="fp32")
    targets: str | list[str] = row["lora_targets"] or "all-linear"
    work, evidence = token_work(
        bundled(row["model"]),
        choice,
        sequence=row["seq_len"],
        lora_r=row["lora_r"] or 16,
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        masked=False,
        fp32_residual=row["autocast"],
    )
    assert evidence == "formula"
    return work


@pytest.mark.parametrize("row", COUNTS, ids=lambda row: row["id"])
def test_matmul_flops(row: dict[str, Any]) -> None:
    work = counted(row)
    found = (work.matmul_flops + work.expert_flops) * row["tokens"]
    assert found == pytest.approx(row["matmul_flops"], rel=1e-4)


@pytest.mark.parametrize("row", COUNTS, ids=lambda row: row["id"])
def test_attention_flops(row: dict[str, Any]) -> None:
    """The counts took every layer as causal; a sliding layer under a mask computes the whole square, twice that."""
    work = counted(row)
    found = (work.attention_flops + work.masked_attention_flops / 2) * row["tokens"]
    assert found == pytest.approx(row["attention_flops"], rel=1e-6)
    assert (work.masked_attention_flops > 0) == row["model"].startswith("google/gemma")


@pytest.mark.parametrize("row", COUNTS, ids=lambda row: row["id"])
def test_bytes_and_launches(row: dict[str, Any]) -> None:
    work = counted(row)
    assert work.elementwise_bytes * row["tokens"] == pytest.approx(row["elementwise_bytes"], rel=0.02)
    assert work.launches_per_batch == pytest.approx(row["launches"], rel=0.02)


def of(model: str, choice: Choice, **changes: Any) -> Work:
    values: dict[str, Any] = {
        "sequence": 4096,
        "lora_r": 16,
        "lora_targets": "all-linear",
        "masked": False,
        "fp32_residual": False,
    }
    return token_work(bundled(model), choice, **{**values, **changes})[0]


def test_forward_and_backward_of_qwen3_8b_by_hand() -> None:
    """36 layers of 192.9 million weights: 6 FLOPs each, 2 more for the recompute of all but the down projection."""
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288
    assert weights == 192_937_984
    plain = of("Qwen/Qwen3-8B", replace(CHOICE, recompute="none"))
    assert plain.matmul_flops == 36 * 6 * weights
    assert plain.recompute_flops == 0
    again = of("Qwen/Qwen3-8B", CHOICE)
    assert again.recompute_flops == 36 * 2 * (weights - 4096 * 12_288)
    assert again.matmul_flops == plain.matmul_flops + again.recompute_flops
    # 2 forward, 5 backward and 2 again of 2 x T x T x width / 2.
    assert plain.attention_flops == 36 * 7 * 4096 * 4096
    assert again.attention_flops == 36 * 9 * 4096 * 4096
    # Kept attention outputs are not computed again.
    kept = of("Qwen/Qwen3-8B", replace(CHOICE, recompute="selective"))
    assert kept.attention_flops == plain.attention_flops


@pytest.mark.parametrize(
    ("recompute", "layers", "share"),
    [
        ("none", 36, 0),
        ("full", 36, 1),
        ("selective", 36, 1),
        ("every_2", 36, 1 / 2),
        ("every_3", 26, 9 / 26),
        ("every_4", 5, 2 / 5),
    ],
)
def test_recomputed_share(recompute: str, layers: int, share: float) -> None:
    assert recomputed_share(recompute, layers) == pytest.approx(share)


def test_masks_and_windows() -> None:
    causal = of("Qwen/Qwen3-8B", CHOICE)
    masked = of("Qwen/Qwen3-8B", CHOICE, masked=True)
    assert (masked.attention_flops, masked.masked_attention_flops) == (0, 2 * causal.attention_flops)
    # Operators multiply the whole square in plain products, eight of them, and move every score many times.
    eager = of("Qwen/Qwen3-8B", replace(CHOICE, attention="eager"))
    assert eager.attention_flops == eager.masked_attention_flops == 0
    assert eager.matmul_flops - causal.matmul_flops == 36 * 8 * 2 * 4096 * 4096
    assert eager.elementwise_bytes - causal.elementwise_bytes == 36 * (2 * 28 + 30) * 32 * 4096
    # Flash attention sees the window of 512 tokens in 15 of gemma-3-270m's 18 layers, 3 are causal. The first 512
    # tokens see fewer.
    flash = of("google/gemma-3-270m", replace(CHOICE, attention="flash_attention_2"))
    width = 4 * 256
    assert flash.masked_attention_flops == 0
    assert flash.attention_flops == pytest.approx(9 * width * (15 * (2 * 4096 - 512) * 512 / 4096 + 3 * 4096))


def test_linear_attention_does_not_grow_with_the_sequence() -> None:
    short, long = (of("Qwen/Qwen3-Next-80B-A3B-Instruct", CHOICE, sequence=n) for n in (4096, 8192))
    full = next(k for k in bundled("Qwen/Qwen3-Next-80B-A3B-Instruct").kinds if k.attention == "full")
    layers = 48 // 4
    assert long.attention_flops - short.attention_flops == pytest.approx(9 * 4096 * full.heads * full.head_dim * layers)


def test_dropout_before_adapters() -> None:
    """Llama-3-8B, adapters on attention in fp32: their 16,384 inputs of a layer, and the trace of the whole layer."""
    lora = replace(CHOICE, method="lora", sharding="none", dp_shard=1)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    with_dropout, without = (
        of("meta-llama/Meta-Llama-3-8B", lora, lora_targets=targets, lora_dropout=x) for x in (True, False)
    )
    assert with_dropout.elementwise_bytes - without.elementwise_bytes == pytest.approx(32 * 8.5 * 4 * 16_384)
    traced = rows_of_probe("meta-llama/Meta-Llama-3-8B", "bf16/lora-fp32:q_proj,k_proj,v_proj,o_proj/dropout/sdpa")
    assert with_dropout.elementwise_bytes / 32 == pytest.approx(traced, rel=0.03)


def rows_of_probe(model: str, key: str) -> float:
    """Bytes per token of a recorded probe's layer, with recompute."""
    document = next(d for d in probed_documents().values() if d.model == model)
    return float(document.sets[key]["layers"][0]["full"]["work"]["elementwise_bytes"][0])


def test_routed_experts_and_their_router() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of 3 x 2,048 x 768, and a router of 128 x 2,048, in 48 layers."""
    work = of("Qwen/Qwen3-30B-A3B", replace(CHOICE, recompute="none"))
    attention = 2048 * (2 * 4096 + 2 * 512)
    assert work.expert_flops == 48 * 6 * 8 * 3 * 2048 * 768
    assert work.matmul_flops == 48 * 6 * (attention + 128 * 2048)
