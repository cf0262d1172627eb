"""Which values each knob may take, before any rule speaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.choice import Choice
from planner.hardware import Hardware
from planner.search.space import (
    MAX_MICRO_BATCH,
    SpaceOptions,
    _data_splits,  # pyright: ignore[reportPrivateUsage]
    frames,
    gpu_counts,
    micro_batches,
    numerics_options,
)

OPTIONS = SpaceOptions(
    method="full",
    seq_len=4096,
    global_batch=16,
    packing=False,
    loss_paths=("fused",),
    attentions=("sdpa",),
)


def hardware(gpus: int = 8, nodes: int = 1, **changes: Any) -> Hardware:
    values: dict[str, Any] = {
        "device": "cuda",
        "name": "card",
        "gpus_per_node": gpus,
        "nodes": nodes,
        "capacity_bytes": None,
        "matmul_flops": None,
        "fp32_flops": None,
        "bandwidth": None,
        "link": None,
        "host_link": None,
        "compute_capability": "9.0",
        **changes,
    }
    return Hardware(**values)


def options(**changes: Any) -> SpaceOptions:
    return replace(OPTIONS, **changes)


def choices(machine: Hardware, **changes: Any) -> list[Choice]:
    return [choice for choice, _ in frames(options(**changes), machine)]


@pytest.mark.parametrize(
    ("gpus", "nodes", "counts"),
    [
        (1, 1, [1]),
        (2, 1, [1, 2]),
        # Powers of two inside a node, and the node itself.
        (6, 1, [1, 2, 4, 6]),
        (8, 1, [1, 2, 4, 8]),
        # Then whole nodes that divide the machine.
        (8, 4, [1, 2, 4, 8, 16, 32]),
        (8, 6, [1, 2, 4, 8, 16, 24, 48]),
        (4, 3, [1, 2, 4, 12]),
    ],
)
def test_numbers_of_gpus(gpus: int, nodes: int, counts: list[int]) -> None:
    assert gpu_counts(hardware(gpus, nodes), {}, 1) == counts


@pytest.mark.parametrize(
    ("batch", "counts"), [(12, [1, 2, 3, 4, 6, 8]), (7, [1, 2, 4, 7, 8]), (9, [1, 2, 3, 4, 8]), (64, [1, 2, 4, 8])]
)
def test_numbers_of_gpus_that_share_a_batch(batch: int, counts: list[int]) -> None:
    assert gpu_counts(hardware(8, 1), {}, batch) == counts


def test_pinned_numbers_of_gpus() -> None:
    assert gpu_counts(hardware(), {"gpus": 3}, 8) == [3]
    sizes = {"cp": 2, "sp": 1, "tp": 1, "dp_shard": 2, "dp_replicate": 1}
    assert gpu_counts(hardware(), sizes, 8) == [4]
    del sizes["tp"]
    assert gpu_counts(hardware(), sizes, 8) == [1, 2, 4, 8]


def numerics(machine: Hardware | None = None, **changes: Any) -> list[tuple[str, str, str, str]]:
    found = numerics_options(options(**changes), machine or hardware())
    return [(n.weights, n.mixed_precision, n.optimizer, n.alters) for n in found]


FUSED = "adamw_torch_fused"


def test_numerics_that_nobody_altered() -> None:
    assert numerics() == [("fp32", "bf16", FUSED, "nothing")]
    assert numerics(method="lora") == [("bf16", "bf16", FUSED, "nothing")]
    # Before Ampere there is no bf16; a CPU gains nothing from autocast.
    assert numerics(hardware(compute_capability="7.5")) == [("fp32", "fp16", FUSED, "nothing")]
    assert numerics(hardware(compute_capability="7.5"), method="qlora") == [("fp16", "fp16", FUSED, "nothing")]
    assert numerics(hardware(device="cpu")) == [("fp32", "no", FUSED, "nothing")]


def test_numerics_that_were_allowed() -> None:
    allowed = numerics(allow_numerics=True, optimizers_8bit=("adamw_bnb_8bit",))
    assert allowed == [
        ("fp32", "bf16", FUSED, "nothing"),
        ("bf16", "no", FUSED, "numerics"),
        ("fp32", "bf16", "adamw_bnb_8bit", "numerics"),
        ("bf16", "no", "adamw_bnb_8bit", "numerics"),
    ]
    assert numerics(allow_numerics=True, method="lora", optimizers_8bit=("adamw_bnb_8bit",)) == [
        ("bf16", "bf16", FUSED, "nothing"),
        ("bf16", "bf16", "adamw_bnb_8bit", "numerics"),
    ]
    assert ("bf16", "no", FUSED, "numerics") not in numerics(hardware(compute_capability="7.5"), allow_numerics=True)


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"weights": "bf16"}, [("bf16", "bf16", FUSED, "nothing")]),
        ({"optimizer": "sgd"}, [("fp32", "bf16", "sgd", "nothing")]),
        ({"weights": "bf16", "mixed_precision": "no"}, [("bf16", "no", FUSED, "nothing")]),
    ],
)
def test_a_pin_is_the_users_own_word(pins: dict[str, Any], expected: list[tuple[str, ...]]) -> None:
    """What a pin sets alters nothing, whether or not numerics were allowed."""
    assert numerics(pins=pins) == expected


def test_what_is_allowed_beside_a_pin_still_alters() -> None:
    """Weights pinned to bf16 say nothing of the precision without autocast, nor of 8-bit states."""
    both: dict[str, Any] = {"allow_numerics": True, "optimizers_8bit": ("adamw_bnb_8bit",)}
    assert numerics(pins={"weights": "bf16"}, **both) == [
        ("bf16", "bf16", FUSED, "nothing"),
        ("bf16", "no", FUSED, "numerics"),
        ("bf16", "no", "adamw_bnb_8bit", "numerics"),
    ]
    assert numerics(pins={"optimizer": "sgd"}, **both) == [
        ("fp32", "bf16", "sgd", "nothing"),
        ("bf16", "no", "sgd", "numerics"),
    ]
    assert numerics(pins={"mixed_precision": "bf16"}, **both) == [
        ("fp32", "bf16", FUSED, "nothing"),
        ("fp32", "bf16", "adamw_bnb_8bit", "numerics"),
    ]


def test_shardings_by_number_of_gpus() -> None:
    found = {(c.num_gpus, c.sharding) for c in choices(hardware(2))}
    assert {sharding for gpus, sharding in found if gpus == 1} == {"none"}
    assert {sharding for gpus, sharding in found if gpus == 2} == {
        "ddp",
        "fsdp",
        "fsdp_no_reshard",
        "zero1",
        "zero2",
        "zero3",
    }


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        # Inside a node every split; over nodes shards stay inside one.
        (8, 1, {(2, 4), (4, 2)}),
        (8, 2, {(8, 2)}),
        (2, 2, {(2, 2)}),
    ],
)
def test_hybrid_sharding(gpus: int, nodes: int, expected: set[tuple[int, int]]) -> None:
    found = choices(hardware(gpus, nodes), pins={"sharding": "hsdp", "gpus": gpus * nodes})
    assert {(c.dp_shard, c.dp_replicate) for c in found} == expected


def test_long_sequences_are_split_over_cards() -> None:
    assert {c.cp for c in choices(hardware(), seq_len=4096)} == {1}
    long = choices(hardware(), seq_len=8192)
    assert {(c.sharding in ("fsdp", "fsdp_no_reshard", "hsdp"), c.cp > 1) for c in long if c.cp > 1} == {(True, True)}
    assert {c.cp for c in long if c.sharding == "fsdp" and c.num_gpus == 8} == {1, 2, 4, 8}
    assert {c.sp for c in long if c.sharding == "zero3" and c.num_gpus == 8} == {1, 2, 4, 8}
    assert {c.sp for c in long if c.sharding == "ddp"} == {1}
    # One short sequence and eight cards: only together can they read it.
    assert {c.cp for c in choices(hardware(), seq_len=512, global_batch=1) if c.sharding == "fsdp"} == {1, 2, 4, 8}
    pinned = choices(hardware(), seq_len=512, pins={"cp": 2, "gpus": 8})
    assert {(c.cp, c.sp) for c in pinned} == {(2, 1)}


def test_pinned_sizes() -> None:
    found = choices(hardware(), pins={"gpus": 8, "dp_shard": 2, "sharding": "hsdp"})
    assert {(c.dp_shard, c.dp_replicate) for c in found} == {(2, 4)}
    found = choices(hardware(), pins={"gpus": 8, "dp_replicate": 4, "sharding": "hsdp"})
    assert {(c.dp_shard, c.dp_replicate) for c in found} == {(2, 4)}
    # tp goes through, so that a rule can say why it is refused.
    assert {c.tp for c in choices(hardware(), pins={"tp": 2, "gpus": 2})} == {2}
    # Three ways of a sequence do not divide eight cards.
    assert choices(hardware(), pins={"cp": 3, "gpus": 8}) == []


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("ddp", [set[str](), {"activations"}]),
        ("zero2", [set[str](), {"activations"}, {"optimizer"}, {"activations", "optimizer"}]),
        ("fsdp", [set[str](), {"activations"}, {"optimizer", "params"}, {"activations", "optimizer", "params"}]),
        (
            "zero3",
            [
                set[str](),
                {"activations"},
                {"optimizer"},
                {"activations", "optimizer"},
                {"optimizer", "params"},
                {"activations", "optimizer", "params"},
            ],
        ),
    ],
)
def test_what_each_sharding_can_offload(sharding: str, expected: list[set[str]]) -> None:
    found = choices(hardware(2), pins={"sharding": sharding, "recompute": "full", "gpus": 2})
    assert [set(c.offload) for c in found] == expected


def test_checkpoints_are_offloaded_only_where_there_are_some() -> None:
    found = choices(hardware(1))
    assert not any("activations" in c.offload for c in found if c.recompute == "none")
    pinned = choices(hardware(1), pins={"recompute": "none", "offload": frozenset({"activations"})})
    assert len(pinned) == 1


def test_every_knob_is_crossed_with_every_other() -> None:
    found = choices(hardware(1), loss_paths=("fused", "liger"), attentions=("sdpa", "flash_attention_2"))
    # 2 loss paths, 2 attentions, 6 recomputes; offload of activations with the five that recompute.
    assert len(found) == 2 * 2 * (6 + 5)
    assert len(set(found)) == len(found)


def test_all_pinned_leaves_one() -> None:
    pins: dict[str, Any] = {
        "loss_path": "fused",
        "recompute": "full",
        "offload": frozenset[str](),
        "sharding": "fsdp",
        "cp": 1,
        "sp": 1,
        "tp": 1,
        "dp_shard": 8,
        "dp_replicate": 1,
        "micro_batch": 2,
        "grad_accum": 1,
        "optimizer": "sgd",
        "weights": "fp32",
        "mixed_precision": "bf16",
        "attention": "eager",
        "precision": "bf16",
    }
    (only,) = choices(hardware(), pins=pins)
    assert {knob: getattr(only, knob) for knob in pins} == pins


@pytest.mark.parametrize(
    ("batch", "ranks", "changes", "expected"),
    [
        (16, 2, {}, [(1, 8), (2, 4), (4, 2), (8, 1)]),
        (6, 1, {}, [(1, 6), (2, 3), (3, 2), (6, 1)]),
        (7, 2, {}, []),
        (2, 4, {}, []),
        (16, 2, {"pins": {"micro_batch": 4}}, [(4, 2)]),
        (16, 2, {"pins": {"micro_batch": 3}}, []),
        (16, 2, {"pins": {"grad_accum": 4}}, [(2, 4)]),
        (16, 2, {"pins": {"grad_accum": 3}}, []),
        # Both pinned is the user's word; whether they make the batch is for a rule to say.
        (16, 2, {"pins": {"micro_batch": 3, "grad_accum": 5}}, [(3, 5)]),
        (6, 1, {"min_micro_batch": 2}, [(2, 3), (3, 2), (6, 1)]),
        # A prime, and twice a prime, near the largest batch.
        (999_983, 1, {}, [(1, 999_983)]),
        (999_958, 1, {}, [(1, 999_958), (2, 499_979)]),
    ],
)
def test_micro_batches(batch: int, ranks: int, changes: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    assert micro_batches(options(global_batch=batch, **changes), ranks) == expected


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64))
def test_the_global_batch_is_kept_exactly(batch: int, ranks: int) -> None:
    found = micro_batches(options(global_batch=batch), ranks)
    assert all(micro * accumulate * ranks == batch for micro, accumulate in found)
    assert all(a[0] < b[0] for a, b in pairwise(found))
    assert bool(found) == (batch % ranks == 0)
    assert all(micro <= MAX_MICRO_BATCH for micro, _ in found)


def test_frames_carry_a_batch_that_is_kept() -> None:
    for choice in choices(hardware(), global_batch=24, min_micro_batch=2, pins={"gpus": 8}):
        assert choice.global_batch == 24
        assert choice.micro_batch == (3 if choice.data_parallel == 8 else 2)
    # Where there is none, the rule that refuses it sees the smallest micro-batch.
    (first, *_) = choices(hardware(), global_batch=3, pins={"gpus": 8})
    assert (first.micro_batch, first.grad_accum, first.data_parallel) == (1, 1, 8)


def test_pinned_data_sizes_must_fill_the_ranks() -> None:
    hardware = cast("Hardware", None)  # only hybrid sharding reads the machine
    assert _data_splits(2, "fsdp", hardware, {"dp_shard": 4}) == []
    assert _data_splits(2, "ddp", hardware, {"dp_replicate": 4}) == []
    assert _data_splits(8, "fsdp", hardware, {"dp_shard": 4}) == [(4, 2)]
