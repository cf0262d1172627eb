"""Step times against what TRL published, and each part of a step by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice, LossPath
from planner.hardware import Hardware
from planner.memory import MemoryJob
from planner.step_time import (
    ELEMENTWISE,
    FP32_MATMUL,
    LAUNCH_S,
    MATMUL,
    STREAMING,
    TIME_PARTS,
    TimeEstimate,
    TimeModel,
)
from tests.planner.published_times import LONG, PROFILED, UPGRADES, Run, Upgrade
from tests.planner.replay import bundled, problem_of

H100 = {"flops": 989.4e12, "fp32": 66.9e12, "bytes": 3.35e12}


@pytest.mark.parametrize("upgrade", UPGRADES, ids=lambda u: f"{u.run.model}-{u.run.method}")
def test_what_the_upgrade_from_1_12_buys(upgrade: Upgrade) -> None:
    before, after = (upgrade.run.estimate(path).step_s for path in ("chunked_fp32", "chunked"))
    assert before / after == pytest.approx(upgrade.after / upgrade.before, rel=0.10)
    assert before == pytest.approx(upgrade.seen_s("chunked_fp32"), rel=0.20)
    assert after == pytest.approx(upgrade.seen_s("chunked"), rel=0.20)


def test_upgrades_on_average() -> None:
    """One run that is 19 % off may pass above; all of them may not."""
    paths: tuple[LossPath, ...] = ("chunked_fp32", "chunked")
    errors = [abs(u.run.estimate(path).step_s / u.seen_s(path) - 1) for u in UPGRADES for path in paths]
    assert sum(errors) / len(errors) <= 0.04
    assert max(errors) <= 0.10


@pytest.mark.parametrize(("run", "seconds"), LONG, ids=lambda x: f"{x.model}-{x.gpus}" if isinstance(x, Run) else "")
def test_long_sequences(run: Run, seconds: float) -> None:
    found = run.estimate()
    assert found.step_s == pytest.approx(seconds, rel=0.06)
    assert found.low_s < seconds < found.high_s


def test_a_million_tokens_is_attention() -> None:
    parts = next(run for run, seconds in LONG if seconds == 380.0).estimate().parts
    assert max(parts, key=lambda part: parts[part]) == "attention"
    assert parts["attention"] / sum(parts.values()) > 0.9
    # Both copies of 36 layers x 131,072 tokens x 4,096 x 2 bytes over PCIe 5 x16.
    assert parts["offload"] == pytest.approx(2 * 36 * 131_072 * 4_096 * 2 / 64e9, rel=0.02)


def chunk_model() -> tuple[TimeModel, Choice]:
    """Qwen3.6-35B-A3B has the published chunk's vocabulary of 248,320 and hidden width of 2,048."""
    job = {"model": "Qwen/Qwen3.6-35B-A3B", "method": "full", "seq_len": 4096, "machine": "8xH100-80GB"}
    model = problem_of(job, stack={"trl": "1.13.0"}).judge.time
    assert (model.job.architecture.vocab, model.job.architecture.hidden) == (248_320, 2_048)
    return model, Choice(
        method="full", loss_path="chunked", recompute="full", sharding="fsdp", dp_shard=8, weights="bf16"
    )


@pytest.mark.parametrize(("path", "milliseconds"), [("chunked_fp32", 23.37), ("chunked", 3.86)])
def test_one_chunk_of_256_tokens(path: str, milliseconds: float) -> None:
    model, choice = chunk_model()
    found = 256 * model.loss_s(replace(choice, loss_path=path))  # type: ignore[arg-type]
    assert found * 1e3 == pytest.approx(milliseconds, rel=0.13)


def test_fp32_kernels_of_a_profiled_step() -> None:
    """985 ms in 192 launches of one fp32 product: 64 chunks x 3, for the head was frozen."""
    model, choice = chunk_model()
    product = 2 * 248_320 * 2_048 * 256 / (FP32_MATMUL * H100["fp32"])
    assert 192 * product == pytest.approx(0.985, rel=0.05)
    frozen = replace(choice, method="lora", loss_path="chunked_fp32")
    rest = 110 * 256 * 248_320 + 12 * 248_320 * 2_048
    assert 256 * model.loss_s(frozen) == pytest.approx(3 * product + rest / (STREAMING * H100["bytes"]), rel=1e-3)


def test_a_profiled_mixture_with_linear_attention_stays_outside() -> None:
    """4.57 s per step of Qwen3.6-35B-A3B over 8 cards: the closed forms see 3.3, gated delta rules are not priced.

    The bound holds the shortfall where it is known to be, so that a better count shows.
    """
    run, seen = PROFILED
    assert 0.6 < run.estimate("chunked_fp32").step_s / seen < 0.85


def model_of(
    name: str = "Qwen/Qwen3-8B", *, hardware: dict[str, Any] | None = None, **job: Any
) -> tuple[TimeModel, Choice]:
    values: dict[str, Any] = {
        "device": "cuda",
        "name": "H100-80GB",
        "gpus_per_node": 8,
        "capacity_bytes": 80 * 2**30,
        "matmul_flops": H100["flops"],
        "fp32_flops": H100["fp32"],
        "bandwidth": H100["bytes"],
        "link": 450e9,
        "host_link": 64e9,
        **(hardware or {}),
    }
    problem = problem_of({"model": name, "machine": "1xH100-80GB"}, stack={})
    shared = replace(MemoryJob(architecture=bundled(name), seq_len=4096, padded=False), **job)
    model = TimeModel(job=shared, hardware=Hardware(**values), blocks_of=problem.judge.memory.blocks)
    return model, Choice(method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8)


def seconds(model: TimeModel, choice: Choice, **changes: Any) -> TimeEstimate:
    found = model.estimate(replace(choice, **changes))
    assert found is not None
    return found


def test_parts_add_up_and_repeat_with_accumulation() -> None:
    model, choice = model_of()
    one, four = seconds(model, choice), seconds(model, choice, grad_accum=4)
    assert tuple(one.parts) == TIME_PARTS
    for found in (one, four):
        assert sum(found.parts.values()) == pytest.approx(found.step_s)
        assert found.tokens_per_s_per_gpu * 8 == pytest.approx(found.tokens_per_s)
    for part in ("matmul", "attention", "recompute", "loss"):
        assert four.parts[part] == pytest.approx(4 * one.parts[part])
    assert four.parts["optimizer"] == one.parts["optimizer"]
    assert one.tokens_per_s == pytest.approx(8 * 4096 / one.step_s)
    assert (one.low_s, one.high_s) == pytest.approx((0.75 * one.step_s, 1.25 * one.step_s))


def test_model_flops_utilisation_by_hand() -> None:
    """Six FLOPs a weight and token, and 7 x T x T x width of attention: the recompute is no use."""
    model, choice = model_of()
    found = seconds(model, choice)
    layers = 36 * 6 * 192_937_984 + 36 * 7 * 4096 * 4096
    flops = 4096 * (layers + 6 * 151_936 * 4_096)
    assert found.mfu == pytest.approx(flops / found.step_s / H100["flops"])
    assert found.mfu is not None
    assert 0.3 < found.mfu < 0.6


def test_rates_are_shares_of_the_card() -> None:
    model, choice = model_of()
    again = 36 * 2 * (192_937_984 - 4096 * 12_288)
    moved = 36 * (386 * 4096 + 36 * 12_288 + 239 * 5120)
    found = seconds(model, choice).parts["recompute"]
    # A quarter of the bytes outside matmuls belongs to the recompute.
    assert found == pytest.approx(
        4096 * (again / (MATMUL * H100["flops"]) + 0.225 * moved / (ELEMENTWISE * H100["bytes"]))
    )


def test_fp32_without_autocast_leaves_the_tensor_cores() -> None:
    model, choice = model_of()
    single = replace(choice, sharding="none", dp_shard=1, recompute="none")
    fast = seconds(model, single, weights="fp32", mixed_precision="bf16").parts["matmul"]
    slow = seconds(model, single, weights="fp32", mixed_precision="no").parts["matmul"]
    assert slow > 6 * fast
    unknown, _ = model_of(hardware={"fp32_flops": None})
    assert seconds(unknown, single, weights="fp32", mixed_precision="no").parts["matmul"] == pytest.approx(fast)


@pytest.mark.parametrize(
    ("method", "path", "products", "per_logit"),
    [
        ("full", "fused", 4, 24),
        ("lora", "fused", 3, 24),
        ("full", "full_logits", 3, 110),
        ("lora", "full_logits", 2, 110),
        ("full", "liger", 3, 24),
    ],
)
def test_loss_paths(method: Any, path: Any, products: int, per_logit: int) -> None:
    model, choice = model_of()
    v, h = 151_936, 4_096
    found = model.loss_s(replace(choice, method=method, loss_path=path))
    assert found == pytest.approx(
        products * 2 * v * h / (MATMUL * H100["flops"]) + per_logit * v / (STREAMING * H100["bytes"])
    )


def test_autocast_casts_the_fp32_copies_of_the_head_back() -> None:
    model, choice = model_of()
    chunk = replace(choice, sharding="none", dp_shard=1, loss_path="chunked_fp32")
    copies = 256 * (model.loss_s(chunk) - model.loss_s(replace(chunk, loss_path="chunked")))
    assert copies == pytest.approx(36 * 151_936 * 4_096 / (STREAMING * H100["bytes"]))
    # A card whose fp32 rate is not known is taken at a sixteenth of its matmul rate.
    unknown, _ = model_of(hardware={"fp32_flops": None})
    slow = unknown.loss_s(replace(choice, loss_path="chunked_fp32"))
    assert 256 * slow > 4 * 2 * 151_936 * 4_096 * 256 / (FP32_MATMUL * H100["flops"] / 16)


def test_a_scalar_head_has_no_loss_to_speak_of() -> None:
    model, choice = model_of(scores_vocabulary=False)
    assert model.loss_s(choice) == 0


def test_optimizer_by_bandwidth() -> None:
    """28 bytes and 12 of clipping per fp32 parameter; half of that for pure bf16; over the host link when offloaded."""
    model, choice = model_of()
    n = 8_190_735_360
    assert model.optimizer_s(choice) == pytest.approx(40 * n / 8 / (ELEMENTWISE * H100["bytes"]))
    pure = replace(choice, sharding="none", dp_shard=1, weights="bf16", mixed_precision="no")
    assert model.optimizer_s(pure) == pytest.approx(20 * n / (ELEMENTWISE * H100["bytes"]))
    host = replace(choice, sharding="zero2", offload=frozenset({"optimizer"}))
    assert model.optimizer_s(host) == pytest.approx(n / 8 * (4 / 64e9 + 28 / 60e9))


def test_gathers_by_sharding() -> None:
    """Two gathers and a reduction of bf16 under FSDP2, three under ZeRO-3 with recompute, 7/8 of them from others."""
    model, choice = model_of()
    one = 2 * 8_190_735_360 * 7 / 8 / 450e9
    moved = {
        "fsdp": 3,
        "fsdp_no_reshard": 2,
        "zero3": 4,
        "zero2": 1,
    }
    for sharding, passes in moved.items():
        assert model.gathers_s(replace(choice, sharding=sharding)) == pytest.approx(passes * one)  # type: ignore[arg-type]
    assert model.gathers_s(replace(choice, sharding="zero3", recompute="none")) == pytest.approx(3 * one)
    assert model.gathers_s(replace(choice, sharding="ddp", dp_shard=1, dp_replicate=8)) == 0


def test_reductions_once_per_step() -> None:
    model, choice = model_of()
    n = 8_190_735_360
    ddp = replace(choice, sharding="ddp", dp_shard=1, dp_replicate=8)
    assert model.reduction_s(ddp)[0] == pytest.approx(2 * 7 / 8 * 4 * n / 450e9)
    assert model.reduction_s(replace(ddp, weights="bf16"))[0] == pytest.approx(2 * 7 / 8 * 2 * n / 450e9)
    assert model.reduction_s(replace(choice, sharding="zero1"))[0] == pytest.approx(2 * 7 / 8 * n / 450e9)
    hsdp = replace(choice, sharding="hsdp", dp_shard=4, dp_replicate=2)
    assert model.reduction_s(hsdp)[0] == pytest.approx(4 * n / 4 / 450e9)
    assert model.reduction_s(choice) == (0, 0)


def test_only_what_computation_cannot_hide_is_communication() -> None:
    model, choice = model_of()
    assert seconds(model, choice).parts["communication"] == 0
    slow, _ = model_of(hardware={"link": 16e9})
    found = seconds(slow, choice)
    busy = sum(found.parts[part] for part in ("matmul", "attention", "recompute", "loss", "offload"))
    assert found.parts["communication"] == pytest.approx(3 * 2 * 8_190_735_360 * 7 / 8 / 16e9 - 0.8 * busy)
    # Without any known link a PCIe 3 one is assumed; over nodes the slower of both decides.
    blind, _ = model_of(hardware={"link": None})
    assert seconds(blind, choice).parts["communication"] == pytest.approx(found.parts["communication"])
    wide, _ = model_of(hardware={"nodes": 2, "node_link": 8e9})
    over = seconds(wide, choice, dp_shard=16)
    assert over.parts["communication"] == pytest.approx(3 * 2 * 8_190_735_360 * 15 / 16 / 8e9 - 0.8 * busy)


def test_offload_over_the_host_link() -> None:
    model, choice = model_of()
    layer = 36 * 4096 * 4096 * 2
    assert seconds(model, choice, offload=frozenset({"activations"})).parts["offload"] == pytest.approx(
        2 * layer / 64e9
    )
    shards = 2 * 8_190_735_360 / 8
    states = frozenset({"optimizer", "params"})
    assert seconds(model, choice, offload=states).parts["offload"] == pytest.approx(3 * shards / 64e9)
    bare = seconds(model, choice, offload=states, recompute="none")
    assert bare.parts["offload"] == pytest.approx(2 * shards / 64e9)
    blind, _ = model_of(hardware={"host_link": None})
    assert seconds(blind, choice, offload=states).parts["offload"] == 0


def test_little_work_waits_for_launches() -> None:
    """A 0.6 B model on 64 tokens: 5,936 kernels at 6 microseconds each, whatever the arithmetic."""
    model, choice = model_of("Qwen/Qwen3-0.6B", seq_len=64)
    found = seconds(model, choice, sharding="none", dp_shard=1, weights="bf16", mixed_precision="no")
    assert found.step_s - found.parts["optimizer"] == pytest.approx(28 * 212 * LAUNCH_S)
    assert found.parts["other"] > 0.5 * found.step_s


def test_padding_loses_the_causal_kernel() -> None:
    model, choice = model_of(padded=True)
    one, two = (seconds(model, choice, micro_batch=n).parts["attention"] for n in (1, 2))
    # Twice the tokens, twice the square, at 0.20 of the rate instead of 0.55.
    assert two == pytest.approx(2 * one * 2 * 0.55 / 0.20)
    pairs, _ = model_of(padded=True, rows_per_sequence=2)
    assert seconds(pairs, choice).parts["attention"] == pytest.approx(two)


def test_the_ring_of_context_parallelism() -> None:
    model, choice = model_of(seq_len=131_072)
    ring = (
        seconds(model, choice, cp=8, dp_shard=1).parts["attention"]
        - seconds(model, choice, sharding="zero3", sp=8, dp_shard=1).parts["attention"]
    )
    assert ring == pytest.approx(1.44 * 100 * 131_072 * 36 * 4096 / (ELEMENTWISE * H100["bytes"]))


def test_a_cpu_is_guessed_within_a_factor_of_four() -> None:
    model, choice = model_of(
        "Qwen/Qwen3-0.6B",
        hardware={"device": "cpu", "matmul_flops": 240e9, "fp32_flops": 240e9, "bandwidth": 20e9, "host_link": None},
    )
    found = seconds(model, choice, sharding="none", dp_shard=1, mixed_precision="no")
    assert (found.low_s, found.high_s, found.mfu) == (found.step_s / 4, found.step_s * 4, None)
    assert found.parts["other"] == 0


@pytest.mark.parametrize("missing", ["matmul_flops", "bandwidth"])
def test_no_time_without_the_rates_of_the_card(missing: str) -> None:
    model, choice = model_of(hardware={missing: None})
    assert model.estimate(choice) is None
    assert not model.known
