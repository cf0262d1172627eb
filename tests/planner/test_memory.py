"""Peaks, interval and verdict of whole choices, by hand arithmetic on published shapes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice, Recompute, Sharding
from planner.hardware import Hardware
from planner.memory.model import MemoryEstimate, MemoryModel
from planner.memory.parts import MemoryJob, rank_tokens
from planner.problem import make_problem
from planner.search.search import search
from profiles.releases import newest_known, trl_release
from tests.planner.replay import bundled, cpu_kernel_coefficients, inputs_of, named_machine, problem_of, tensor_bytes

GIB = 2**30
MIB = 2**20
WORKSPACE = 2 * (32 * MIB + 64 * 1024)
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
    assert step["gradients"] == pytest.approx(2 * PARAMETERS / 8, rel=1e-6)


@pytest.mark.parametrize(("sharding", "autocast"), [("ddp", True), ("fsdp", False), ("fsdp1", True), ("zero3", False)])
def test_layers_are_asked_for_as_they_run(sharding: Any, autocast: bool) -> None:
    options = model().activation_options(replace(SHARDED, sharding=sharding))
    assert (options.residual_bytes, options.compute_bytes, options.autocast) == (2, 2, autocast)


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


@pytest.mark.parametrize(("sharding", "whole"), [("fsdp", True), ("hsdp", True), ("zero3", False)])
def test_fsdp2_holds_a_whole_reference_while_it_loads_and_while_it_runs(sharding: Any, whole: bool) -> None:
    sizes = {"dp_shard": 4, "dp_replicate": 2} if sharding == "hsdp" else {}
    choice = replace(SHARDED, sharding=sharding, weights="fp32", **sizes)
    plain, found = model().estimate(choice), model(reference_model=True).estimate(choice)
    if not whole:
        assert parts(found, "loss")["gather"] == parts(plain, "loss")["gather"]
        return
    # fp32 as it was loaded, 30.5 GiB on the card before it is cut; bf16 in its forward, 15.3 GiB.
    assert tensor_bytes(found)["load"] == 4 * PARAMETERS
    assert parts(found, "loss")["gather"] == 2 * PARAMETERS
    # Of a model that does not fit whole, loading decides, however many cards there are.
    large = model("meta-llama/Llama-3.1-70B", reference_model=True, nodes=16).estimate(replace(choice, dp_shard=64))
    assert (large.peak_phase, large.fits) == ("load", False)
    assert model(reference_model=True).verdict(choice).device_bytes == found.device_bytes
    # One that scores all rows before training is loaded as well, and leaves nothing.
    before = tensor_bytes(model(reference_before=True).estimate(choice))
    assert before == {**tensor_bytes(plain), "load": 4 * PARAMETERS}


@pytest.mark.parametrize(
    ("quantization", "codes", "scales"),
    [("nf4", 0.5, 4 / 64), ("nf4-double", 0.5, 1 / 64 + 4 / 16_384)],
)
@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_qlora_shards_codes_and_not_scales(sharding: Any, quantization: str, codes: float, scales: float) -> None:
    """Eight ranks: what is packed is cut, each cut refers to the scales of the whole matrix.

    Adapters are 2 bytes: TRL makes those of a quantised base bf16, accelerate upcasts no model with 4-bit parameters
    (accelerate/utils/fsdp_utils.py:813-825), and ZeRO holds 2 bytes of everything.
    """
    choice = replace(SHARDED, method="qlora", sharding=sharding, weights="bf16")
    shared = model(quantization=quantization)
    quantised, adapters = 36 * 192_937_984, 43_646_976
    held = shared.estimate(choice)
    others = 2 * (PARAMETERS - quantised)
    expected = (quantised * codes + others + 2 * adapters) / 8 + quantised * scales
    assert parts(held, "forward")["weights"] == pytest.approx(expected, abs=8)
    # 0.43 GB of scales on every card of eight, where their share would be 54 MB.
    if quantization == "nf4":
        assert quantised * scales == pytest.approx(434e6, rel=0.01)


def test_accumulation_keeps_gradients_from_step_to_step() -> None:
    once, twice = (model().estimate(replace(SINGLE, grad_accum=n)) for n in (1, 2))
    for phase in ("forward", "loss"):
        assert parts(once, phase)["gradients"] == 0
        assert parts(twice, phase)["gradients"] == 2 * PARAMETERS
    # At length backward is at its highest before the first layers have made theirs.
    long = model(seq_len=65_536).estimate(SINGLE)
    assert parts(long, "backward")["gradients"] < 2 * PARAMETERS
    assert parts(once, "step") == parts(twice, "step")


def test_offload_moves_bytes_off_the_card() -> None:
    choice = replace(SHARDED, offload=frozenset({"optimizer", "params"}))
    kept, moved = model().estimate(SHARDED), model().estimate(choice)
    assert (kept.host.pinned_bytes, kept.host.pageable_bytes) == (0, 0)
    assert parts(moved, "forward")["weights"] == parts(moved, "step")["gradients"] == 0
    # What is gathered and saved stays on the card.
    assert parts(moved, "forward")["gather"] == parts(kept, "forward")["gather"]
    on_host = replace(SHARDED, sharding="zero2", offload=frozenset({"optimizer"}))
    assert parts(model().estimate(on_host), "step")["gradients"] == 0
    # DeepSpeed keeps room for the largest gradient, the embedding's 151,936 x 4,096, on both sides.
    rest = [parts(model().estimate(on_host), phase)["offload_buffers"] for phase in ("forward", "loss", "step")]
    assert rest == [2 * 151_936 * 4096] * 3
    third = model().estimate(replace(on_host, sharding="zero3"))
    assert parts(third, "forward")["offload_buffers"] == 0
    assert parts(third, "forward")["gradients"] == 0


def test_zero3_holds_divided_gradients_for_good() -> None:
    found = model().estimate(replace(SHARDED, sharding="zero3"))
    held = {phase: parts(found, phase)["gradients"] for phase in ("forward", "loss", "backward", "step", "save")}
    assert held == pytest.approx(dict.fromkeys(held, 2 * PARAMETERS / 8), rel=1e-6)
    # The step makes fp32 of a sub-group of a billion of them, by way of a flat copy.
    assert parts(found, "step")["recompute"] == 6_000_000_000


def test_zero2_makes_room_for_gradients_with_the_first_full_bucket() -> None:
    found = model().estimate(replace(SHARDED, sharding="zero2"))
    assert parts(found, "loss")["gradients"] == parts(found, "loss")["buckets"] == 0
    assert parts(found, "backward")["gradients"] == pytest.approx(2 * PARAMETERS / 8, rel=1e-6)
    # The bucket, and its copy on the way to other ranks.
    assert parts(found, "backward")["buckets"] == 2_000_000_000
    assert parts(found, "step")["buckets"] == 0


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
    memory = model(logit_metrics=trl_release("1.3.0").logit_metrics)
    choice = replace(SINGLE, loss_path="full_logits", micro_batch=micro_batch, mixed_precision="bf16")
    assert parts(memory.estimate(choice), "loss")["loss"] == bytes_per_logit * micro_batch * 2048 * 151_936


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
    # The hidden states are counted as saved, and gone when the rows were copied out of them. 28 bytes are statistics.
    assert alone == tile + 4 * n * h + 4 * v * h + 2 * n * h + 2 * 2 * 32_768 * h + 28 * n
    assert gathered == tile + 4 * n * h + 4 * v * h + 2 * n * h + 2 * v * h + 28 * n


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
    trained = found.roles.trained
    assert trained.weights + trained.gradients + trained.master + trained.moment1 + trained.moment2 == 8
    assert named_machine("8xH100-80GB").cards[3].nvlink_peers == [0, 1, 2, 4, 5, 6, 7]


def test_what_candidates_share_depends_on_nothing_that_tells_them_apart() -> None:
    """A model that has judged many choices says of each what one says that has judged no other."""
    stack = {**newest_known(), "deepspeed": "0.19.8"}
    inputs = inputs_of({"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096}, stack=stack)
    problem = make_problem(inputs)
    found = search(problem.judge, problem.options, "fastest")
    judged = [*found.fitting, *found.near_misses]
    hosted = [candidate for candidate in judged if "optimizer" in candidate.choice.offload]
    r = random.Random(5)
    some = [*r.sample(judged, 60), *r.sample(hosted, min(40, len(hosted)))]
    for candidate in some:
        alone = make_problem(inputs).judge.memory.estimate(candidate.choice)
        assert problem.judge.memory.estimate(candidate.choice) == alone, candidate.choice
    assert {"fsdp", "hsdp", "zero2", "zero3"} <= {candidate.choice.sharding for candidate in some}
