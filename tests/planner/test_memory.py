"""Peaks, interval and verdict of whole choices, by hand arithmetic on published shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice, Recompute, Sharding
from planner.hardware import Hardware
from planner.memory import MemoryEstimate, MemoryJob, MemoryModel, rank_tokens
from tests.planner.replay import bundled, cpu_kernel_coefficients, named_machine, problem_of, tensor_bytes

GIB = 2**30
MIB = 2**20
WORKSPACE = 32 * MIB + 64 * 1024
CONTEXT = 500 * MIB
NCCL = 800 * MIB
PARAMETERS = 8_190_735_360
"""Qwen3-8B."""

SINGLE = Choice(method="full", loss_path="fused", recompute="full", weights="bf16", mixed_precision="no")
SHARDED = replace(SINGLE, sharding="fsdp", dp_shard=8, mixed_precision="bf16")


def model(name: str = "Qwen/Qwen3-8B", *, reserve: float = 0.05, **changes: Any) -> MemoryModel:
    hardware: dict[str, Any] = {
        "device": "cuda",
        "name": "H100-80GB",
        "gpus_per_node": 8,
        "capacity_bytes": 80 * GIB,
        "compute_capability": "9.0",
        "matmul_flops": None,
        "fp32_flops": None,
        "bandwidth": None,
        "link": None,
        "host_link": None,
    }
    job: dict[str, Any] = {"seq_len": 2048, "padded": False}
    for key, value in changes.items():
        (hardware if key in Hardware.__dataclass_fields__ else job)[key] = value
    return MemoryModel(
        job=replace(MemoryJob(architecture=bundled(name), seq_len=2048), **job),
        hardware=Hardware(**hardware),
        reserve=reserve,
        source=cpu_kernel_coefficients,
    )


def parts(found: MemoryEstimate, phase: str) -> dict[str, int]:
    return next(p for p in found.phases if p.name == phase).parts


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    # Weights, gradients and two moments in bf16; foreach copies the parameters once more.
    [("adamw_torch_fused", 8.0), ("adamw_torch", 10.0)],
)
def test_pure_bf16_in_the_step(optimizer: str, per_parameter: float) -> None:
    found = model("ibm/PowerLM-3b").estimate(replace(SINGLE, optimizer=optimizer))
    count = bundled("ibm/PowerLM-3b").num_parameters
    assert tensor_bytes(found)["step"] / count == pytest.approx(per_parameter, abs=1e-6)


def test_the_published_foreach_peak() -> None:
    """PowerLM-3B in bf16 on an A100: 35,135 MB, 10.00 bytes per parameter."""
    count = bundled("ibm/PowerLM-3b").num_parameters
    found = model("ibm/PowerLM-3b", compute_capability="8.0").estimate(replace(SINGLE, optimizer="adamw_torch"))
    assert found.peak_phase == "step"
    assert found.allocated_bytes == pytest.approx(35_135e6, rel=0.001)
    assert found.allocated_bytes / count == pytest.approx(10.0, abs=0.01)


def test_states_over_eight_ranks_of_fsdp2() -> None:
    """bf16 weights under mixed precision rest as fp32 shards: 16 bytes / 8 in the step, 20 / 8 with foreach."""
    for optimizer, per_parameter in (("adamw_torch_fused", 16), ("adamw_torch", 20)):
        found = tensor_bytes(model().estimate(replace(SHARDED, optimizer=optimizer)))["step"]
        assert found == pytest.approx(PARAMETERS * per_parameter / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("sharding", "rest"),
    [
        # 2 bytes of weights everywhere; master and moments over eight.
        ("zero1", 2 + 12 / 8),
        ("zero2", 2 + 12 / 8),
        ("zero3", 14 / 8),
    ],
)
def test_zero_at_rest(sharding: Any, rest: float) -> None:
    found = parts(model().estimate(replace(SHARDED, sharding=sharding)), "forward")
    held = sum(found[role] for role in ("weights", "master", "moment1", "moment2"))
    assert held == pytest.approx(PARAMETERS * rest, rel=1e-6)
    step = parts(model().estimate(replace(SHARDED, sharding=sharding)), "step")
    assert step["gradients"] == pytest.approx(2 * PARAMETERS / (1 if sharding == "zero1" else 8), rel=1e-6)


def test_ddp_holds_everything_and_a_bucket_copy() -> None:
    ddp = replace(SINGLE, sharding="ddp", dp_replicate=8)
    alone, together = (tensor_bytes(model().estimate(choice)) for choice in (SINGLE, ddp))
    for phase in ("forward", "loss", "backward", "step"):
        assert together[phase] - alone[phase] == 2 * PARAMETERS


@pytest.mark.parametrize(
    ("quantization", "width"), [("nf4", 0.5625), ("nf4-double", 0.5 + 1 / 64 + 4 / 16_384), ("int8", 1.0)]
)
def test_qlora_at_rest(quantization: str, width: float) -> None:
    """Qwen3-8B: 6,945,767,424 weights of linears quantised, 1,244,967,936 others in bf16, 43,646,976 of adapters."""
    choice = replace(SINGLE, method="qlora", mixed_precision="bf16")
    found = parts(model(quantization=quantization).estimate(choice), "forward")
    quantised = 36 * 192_937_984
    assert found["weights"] == pytest.approx(quantised * width + 2 * (PARAMETERS - quantised) + 2 * 43_646_976, abs=1)
    assert found["moment1"] == found["moment2"] == 2 * 43_646_976


def test_accumulation_keeps_gradients_from_step_to_step() -> None:
    once, twice = (model().estimate(replace(SINGLE, grad_accum=n)) for n in (1, 2))
    for phase in ("forward", "loss"):
        assert parts(once, phase)["gradients"] == 0
        assert parts(twice, phase)["gradients"] == 2 * PARAMETERS
    # At length backward is at its highest before the first layers have made theirs.
    long = model(seq_len=65_536).estimate(SINGLE)
    assert parts(long, "backward")["gradients"] < 2 * PARAMETERS
    assert parts(once, "step") == parts(twice, "step")


def test_offload_moves_bytes_to_the_host() -> None:
    choice = replace(SHARDED, offload=frozenset({"optimizer", "params"}))
    kept, moved = model().estimate(SHARDED), model().estimate(choice)
    assert (kept.host_pinned_bytes, kept.host_pageable_bytes) == (0, 0)
    # Eight ranks of a node hold all 16 bytes per parameter there.
    assert moved.host_pinned_bytes == pytest.approx(16 * PARAMETERS, rel=1e-6)
    assert parts(moved, "forward")["weights"] == parts(moved, "step")["gradients"] == 0
    # What is gathered and saved stays on the card.
    assert parts(moved, "forward")["gather"] == parts(kept, "forward")["gather"]


def test_offloaded_checkpoints_are_pinned_by_every_rank() -> None:
    choice = replace(SHARDED, offload=frozenset({"activations"}), micro_batch=2)
    found = model().estimate(choice)
    assert found.host_pinned_bytes == 8 * 36 * 2 * 2048 * 4096 * 2
    # A node with four cards pins four ranks' share.
    half = model(gpus_per_node=4, nodes=2).estimate(choice)
    assert half.host_pinned_bytes * 2 == found.host_pinned_bytes
    on_host = replace(SHARDED, sharding="zero2", offload=frozenset({"optimizer"}))
    assert model().estimate(on_host).host_pinned_bytes == pytest.approx(12 * PARAMETERS, rel=1e-6)


@pytest.mark.parametrize("extra", [-1, 0])
def test_the_hosts_memory_is_a_limit(extra: int) -> None:
    choice = replace(SHARDED, offload=frozenset({"activations"}))
    needed = 8 * 36 * 2048 * 4096 * 2
    verdict = model(host_available_bytes=needed + extra).verdict(choice)
    assert (verdict.host_fits, verdict.fits) == (extra == 0, extra == 0)
    assert model(host_available_bytes=0).verdict(SHARDED).host_fits


def test_from_tensors_to_the_card() -> None:
    found = model().estimate(SINGLE)
    tensors = max(tensor_bytes(found).values())
    assert found.allocated_bytes == tensors + WORKSPACE
    assert found.reserved_bytes == found.allocated_bytes + int(0.03 * found.allocated_bytes)
    assert found.device_bytes == found.reserved_bytes + CONTEXT
    assert found.headroom_bytes is not None
    assert found.headroom_bytes == int(80 * GIB * 0.95) - found.device_bytes
    assert found.peak.name == found.peak_phase
    several = model().estimate(SHARDED)
    assert several.device_bytes == several.reserved_bytes + CONTEXT + NCCL


def test_reserve_and_neighbours_are_taken_off() -> None:
    plain = model(reserve=0.0).verdict(SHARDED)
    held = model(reserve=0.2).verdict(SHARDED)
    assert plain.headroom_bytes is not None and held.headroom_bytes is not None
    assert plain.headroom_bytes - held.headroom_bytes == 16 * GIB
    busy = model(reserve=0.0, taken_bytes=(0,) * 7 + (3 * GIB,), card_indices=tuple(range(8))).verdict(SHARDED)
    assert busy.headroom_bytes is not None
    assert plain.headroom_bytes - busy.headroom_bytes == 3 * GIB


def test_what_fits_only_below_its_interval_does_not_fit() -> None:
    """The upper end has to be on the card, the prediction below the reserve."""
    found = model(reserve=0.0).verdict(SHARDED)
    high = found.device_bytes + found.spread_bytes
    assert model(reserve=0.0, capacity_bytes=high).verdict(SHARDED).fits
    assert not model(reserve=0.0, capacity_bytes=high - 1).verdict(SHARDED).fits
    tight = model(reserve=0.0, capacity_bytes=high - 1).verdict(SHARDED)
    assert tight.headroom_bytes is not None
    assert tight.headroom_bytes > 0


def test_the_interval_is_a_share_of_what_depends_on_tokens() -> None:
    long = model(seq_len=65_536)
    found = long.estimate(SHARDED)
    assert found.peak_phase == "backward"
    uncertain = sum(parts(found, "backward")[p] for p in ("saved_activations", "recompute", "loss"))
    assert found.high_bytes - found.allocated_bytes == pytest.approx(0.06 * uncertain, rel=1e-6)
    assert found.allocated_bytes - found.low_bytes == found.high_bytes - found.allocated_bytes
    # States alone are never known better than to 2 %.
    still = model(seq_len=64).estimate(SINGLE)
    assert still.high_bytes - still.allocated_bytes == max(tensor_bytes(still).values()) // 50


def test_the_upper_end_is_the_highest_of_all_phases() -> None:
    """A step of known size just above a backward of unknown size is no reason for a narrow interval."""
    memory = model("ibm/PowerLM-3b", seq_len=38_000)
    found = memory.estimate(replace(SINGLE, optimizer="adamw_torch"))
    sizes = tensor_bytes(found)
    assert found.peak_phase == "step"
    backward = parts(found, "backward")
    uncertain = sum(backward[p] for p in ("saved_activations", "recompute", "loss"))
    high = sizes["backward"] + 0.15 * uncertain
    assert high > sizes["step"] * 1.02
    assert found.high_bytes - found.allocated_bytes == pytest.approx(high - sizes["step"], rel=1e-3)


def test_an_unknown_capacity_fits() -> None:
    found = model(capacity_bytes=None).estimate(SINGLE)
    assert (found.capacity_bytes, found.headroom_bytes, found.fits) == (None, None, True)


@pytest.mark.parametrize("reference", [False, True])
def test_a_reference_model_is_one_more_copy_of_the_weights(reference: bool) -> None:
    found = parts(model(reference_model=reference).estimate(SINGLE), "forward")["weights"]
    assert found == 2 * PARAMETERS * (2 if reference else 1)
    sharded = parts(model(reference_model=reference).estimate(SHARDED), "forward")["weights"]
    # Frozen, so it stays in bf16 while the policy is upcast.
    assert sharded == pytest.approx((4 + (2 if reference else 0)) * PARAMETERS / 8, rel=1e-6)


def test_preference_pairs_are_two_rows() -> None:
    pairs, plain = model(rows_per_sequence=2), model()
    found = pairs.estimate(SINGLE)
    twice = plain.estimate(replace(SINGLE, micro_batch=2))
    assert tensor_bytes(found) == tensor_bytes(twice)
    assert rank_tokens(pairs.job, replace(SINGLE, micro_batch=3)) == 6 * 2048


def test_tokens_of_one_rank() -> None:
    job = model(seq_len=1000).job
    assert rank_tokens(job, replace(SHARDED, cp=3, dp_shard=1, micro_batch=2)) == 2 * 334
    assert rank_tokens(job, replace(SHARDED, sharding="zero3", sp=4, dp_shard=2)) == 250


def test_a_reward_models_scalar_head_has_no_logits() -> None:
    found = parts(model(scores_vocabulary=False).estimate(replace(SINGLE, loss_path="full_logits")), "loss")
    assert found["loss"] == 0


@pytest.mark.parametrize(("micro_batch", "bytes_per_logit"), [(1, 12), (2, 16)])
def test_metrics_that_hold_two_copies_of_the_logits(micro_batch: int, bytes_per_logit: int) -> None:
    memory = model(full_logits_bytes=12.0, full_logits_bytes_batched=16.0)
    found = memory.estimate(replace(SINGLE, loss_path="full_logits", micro_batch=micro_batch))
    assert parts(found, "loss")["loss"] == bytes_per_logit * micro_batch * 2048 * 151_936


@pytest.mark.parametrize(
    ("padded", "micro_batch", "packing", "attention", "masked"),
    [
        (True, 1, False, "sdpa", False),
        (True, 2, False, "sdpa", True),
        (False, 2, False, "sdpa", False),
        (False, 1, True, "sdpa", True),
        (True, 2, True, "flash_attention_2", False),
    ],
)
def test_when_rows_carry_a_mask(padded: bool, micro_batch: int, packing: bool, attention: Any, masked: bool) -> None:
    choice = replace(SINGLE, micro_batch=micro_batch, packing=packing, attention=attention)
    assert model(padded=padded).activation_options(choice).masked is masked


def test_options_of_adapters() -> None:
    lora = replace(SINGLE, method="lora", mixed_precision="bf16")
    memory = model(lora_r=8, lora_targets=("q_proj",), lora_dropout=True)
    found = memory.activation_options(lora)
    assert (found.lora_r, found.lora_targets, found.lora_dropout, found.adapter_bytes) == (8, ("q_proj",), True, 4)
    full = memory.activation_options(SINGLE)
    assert (full.lora_r, full.lora_targets, full.lora_dropout, full.trains_base) == (0, None, False, True)
    assert model(device="cpu").activation_options(SINGLE).mask_bias is False


def test_fsdp2_shows_the_loss_a_head_in_the_compute_dtype() -> None:
    """The head is gathered in bf16, so its gradient is as well: 2 V H returned, where fp32 weights return nothing."""
    fp32 = replace(SINGLE, weights="fp32", mixed_precision="bf16", recompute="none")
    v, h, n = 151_936, 4096, 2048
    alone = parts(model().estimate(fp32), "loss")["loss"]
    gathered = parts(model().estimate(replace(SHARDED, weights="fp32")), "loss")["loss"]
    tile = n * 32_768 * 2
    assert alone == tile + 4 * n * h + 4 * n * h + 4 * v * h + 2 * n * h + 2 * 32_768 * h
    assert gathered == tile + 2 * n * h + 4 * n * h + 4 * v * h + 2 * n * h + 2 * v * h


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="optimizer 'adamax' is not known"):
        model().estimate(replace(SINGLE, optimizer="adamax"))
    with pytest.raises(ValueError, match="unknown loss path 'cut'"):
        model().estimate(replace(SINGLE, loss_path="cut"))  # type: ignore[arg-type]


def test_a_million_tokens_over_eight_cards_need_offload() -> None:
    """The published four levers: without offload Qwen3-8B does not fit, with it it does."""
    job = {"model": "Qwen/Qwen3-8B", "seq_len": 1_048_576, "machine": "8xH100-80GB", "global_batch": 1}
    memory = problem_of(job, stack={"trl": "1.16.0"}).judge.memory
    choice = replace(SHARDED, cp=8, dp_shard=1)
    assert not memory.verdict(choice).fits
    assert memory.verdict(replace(choice, offload=frozenset({"activations"}))).fits


def test_verdict_and_estimate_agree() -> None:
    """The search asks the short way; people see the long one."""
    memory = model(seq_len=8192, taken_bytes=(GIB,) * 8, card_indices=tuple(range(8)))
    recomputes: tuple[Recompute, ...] = ("none", "full", "selective", "every_3")
    shardings: tuple[Sharding, ...] = ("fsdp", "zero2", "ddp")
    for recompute in recomputes:
        for sharding in shardings:
            for micro, accumulate in ((1, 1), (1, 4), (4, 1)):
                choice = replace(
                    SHARDED,
                    recompute=recompute,
                    sharding=sharding,
                    dp_shard=1 if sharding == "ddp" else 8,
                    dp_replicate=8 if sharding == "ddp" else 1,
                    micro_batch=micro,
                    grad_accum=accumulate,
                )
                verdict, found = memory.verdict(choice), memory.estimate(choice)
                assert verdict.device_bytes == pytest.approx(found.device_bytes, abs=64)
                assert verdict.headroom_bytes == pytest.approx(found.headroom_bytes, abs=64)
                assert verdict.fits == found.fits
                frame = memory.frame(replace(choice, micro_batch=7, grad_accum=3))
                assert frame.verdict(micro, accumulate) == verdict


def test_evidence_comes_with_the_coefficients() -> None:
    found = model().estimate(SINGLE)
    assert found.evidence == model().coefficients(SINGLE).evidence == "formula"
    assert found.roles.trained.per_parameter == 8
    assert named_machine("8xH100-80GB").cards[3].nvlink_peers == [0, 1, 2, 4, 5, 6, 7]
