"""Bytes per parameter of the five roles under every wrapper, and what divides them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.memory.states import (
    QUANTISED_BYTES,
    Roles,
    adapter_bytes,
    compute_bytes,
    frozen_roles,
    residual_bytes,
    role_table,
    runs_under_autocast,
    trainable_roles,
    uses_autocast,
)

CHOICE = Choice(method="full", loss_path="fused", recompute="full")
SHARDED = replace(CHOICE, dp_shard=8)


def widths(roles: Roles) -> tuple[float, ...]:
    return (roles.weights, roles.gradients, roles.master, roles.moment1, roles.moment2)


def divisors(roles: Roles) -> tuple[int, int, int]:
    return (roles.weights_ranks, roles.gradients_ranks, roles.optimizer_ranks)


@pytest.mark.parametrize(
    ("sharding", "weights", "mixed", "expected", "total"),
    [
        # TRL's default: fp32 under autocast, no master copy, 16 bytes.
        ("none", "fp32", "bf16", (4, 4, 0, 4, 4), 16),
        ("ddp", "fp32", "bf16", (4, 4, 0, 4, 4), 16),
        # Pure bf16: states follow the parameter.
        ("none", "bf16", "no", (2, 2, 0, 2, 2), 8),
        ("none", "bf16", "bf16", (2, 2, 0, 2, 2), 8),
        # accelerate upcasts trainable parameters to fp32 shards when mixed precision is on.
        ("fsdp", "bf16", "bf16", (4, 4, 0, 4, 4), 16),
        ("hsdp", "fp32", "bf16", (4, 4, 0, 4, 4), 16),
        ("fsdp", "bf16", "no", (2, 2, 0, 2, 2), 8),
        ("fsdp1", "bf16", "bf16", (4, 4, 0, 4, 4), 16),
        # DeepSpeed: bf16 parameters and gradients, fp32 master partition and moments, whatever was loaded.
        ("zero1", "fp32", "bf16", (2, 2, 4, 4, 4), 16),
        ("zero2", "bf16", "bf16", (2, 2, 4, 4, 4), 16),
        ("zero3", "bf16", "no", (2, 2, 4, 4, 4), 16),
    ],
)
def test_roles_of_full_training(sharding: Any, weights: Any, mixed: Any, expected: tuple[int, ...], total: int) -> None:
    roles = trainable_roles(replace(SHARDED, sharding=sharding, weights=weights, mixed_precision=mixed))
    assert widths(roles) == expected
    assert sum(widths(roles)) == total


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("none", (1, 1, 1)),
        ("ddp", (1, 1, 1)),
        ("fsdp", (8, 8, 8)),
        ("fsdp_no_reshard", (8, 8, 8)),
        ("hsdp", (8, 8, 8)),
        ("zero1", (1, 1, 8)),
        ("zero2", (1, 8, 8)),
        ("zero3", (8, 8, 8)),
    ],
)
def test_what_each_sharding_divides(sharding: Any, expected: tuple[int, int, int]) -> None:
    assert divisors(trainable_roles(replace(SHARDED, sharding=sharding))) == expected


@pytest.mark.parametrize(
    ("optimizer", "weights", "moments"),
    [
        ("adamw_torch", "fp32", (4, 4)),
        ("sgd", "fp32", (0, 0)),
        ("rmsprop", "bf16", (0, 2)),
        ("lion_8bit", "fp32", (1.02, 0)),
        ("paged_adamw_32bit", "bf16", (4, 4)),
    ],
)
def test_moments_by_optimizer(optimizer: str, weights: Any, moments: tuple[float, float]) -> None:
    roles = trainable_roles(replace(CHOICE, optimizer=optimizer, weights=weights))
    assert (roles.moment1, roles.moment2) == moments


@pytest.mark.parametrize(
    ("method", "sharding", "mixed", "width"),
    [
        # PEFT keeps adapters of a bf16 base in fp32; TRL makes those of a quantised base bf16.
        ("lora", "none", "bf16", 4),
        ("lora", "ddp", "no", 4),
        ("qlora", "none", "bf16", 2),
        # FSDP2 under mixed precision upcasts what trains, but for models with 4-bit parameters.
        ("qlora", "fsdp", "bf16", 2),
        ("qlora", "fsdp1", "bf16", 4),
        ("lora", "fsdp", "bf16", 4),
        ("lora", "zero2", "bf16", 2),
    ],
)
def test_adapters(method: Any, sharding: Any, mixed: Any, width: int) -> None:
    choice = replace(SHARDED, method=method, sharding=sharding, weights="bf16", mixed_precision=mixed)
    assert trainable_roles(choice, adapter=True).weights == width


@pytest.mark.parametrize(
    ("method", "sharding", "mixed", "width"),
    [
        ("lora", "none", "bf16", 4),
        ("lora", "none", "no", 4),
        ("lora", "ddp", "bf16", 4),
        ("lora", "fsdp", "bf16", 2),
        ("lora", "fsdp1", "no", 4),
        ("qlora", "fsdp1", "no", 2),
        # Under mixed precision the shards are fp32, whatever PEFT made.
        ("qlora", "fsdp1", "bf16", 4),
        ("lora", "zero3", "bf16", 2),
        ("qlora", "none", "bf16", 2),
        ("full", "none", "bf16", 2),
    ],
)
def test_adapters_at_work(method: Any, sharding: Any, mixed: Any, width: int) -> None:
    choice = replace(SHARDED, method=method, sharding=sharding, weights="bf16", mixed_precision=mixed)
    assert adapter_bytes(choice) == width


def test_quantised_weights() -> None:
    """A code of 4 bits and a scale of 32 per 64 values; doubly quantised, 8 bits and 32 per 256 of those."""
    assert QUANTISED_BYTES["nf4"] == 0.5625
    assert QUANTISED_BYTES["nf4-double"] == pytest.approx(0.5 + 1 / 64 + 4 / 16_384)
    assert QUANTISED_BYTES["int8"] == 1.0


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [("none", 1), ("ddp", 1), ("zero1", 1), ("zero2", 1), ("zero3", 8), ("fsdp", 8), ("fsdp1", 8)],
)
def test_frozen_weights_are_alone(sharding: Any, ranks: int) -> None:
    choice = replace(SHARDED, method="lora", sharding=sharding, weights="bf16")
    roles = frozen_roles(choice)
    assert widths(roles) == (2, 0, 0, 0, 0)
    assert roles.weights_ranks == ranks


def test_the_table_quantises_under_qlora_only() -> None:
    table = role_table(replace(CHOICE, method="qlora", weights="bf16"), "nf4")
    assert (table.quantised.weights, table.frozen.weights, table.adapters.weights) == (0.5625, 2, 2)
    lora = role_table(replace(CHOICE, method="lora", weights="bf16"), "nf4")
    assert lora.quantised.weights == 2
    assert [fate for fate, _ in table.items()] == ["trained", "frozen", "quantised", "adapters"]


def test_roles_as_json() -> None:
    found = trainable_roles(replace(SHARDED, sharding="zero1")).to_json()
    assert found["divided_by"] == {"weights": 1, "gradients": 1, "master": 8, "moment1": 8, "moment2": 8}
    assert (found["weights"], found["master"]) == (2, 4)


@pytest.mark.parametrize(
    ("sharding", "method", "weights", "mixed", "compute", "residual", "wrapped", "copies"),
    [
        # Embeddings and residual sums stay in the weights' dtype where autocast runs the forward.
        ("none", "full", "fp32", "bf16", 2, 4, True, True),
        ("ddp", "full", "fp32", "fp16", 2, 4, True, True),
        ("none", "full", "bf16", "bf16", 2, 2, True, True),
        ("none", "full", "bf16", "no", 2, 2, False, False),
        ("none", "full", "fp32", "no", 4, 4, False, False),
        # Two processes show it (tests/launcher/test_sharded_runs.py).
        ("fsdp", "full", "fp32", "bf16", 2, 2, False, False),
        ("hsdp", "lora", "bf16", "bf16", 2, 2, False, False),
        ("zero2", "full", "fp32", "bf16", 2, 2, False, False),
        # prepare_model wraps FSDP1, whose own casts come first.
        ("fsdp1", "lora", "bf16", "bf16", 2, 2, True, False),
        ("fsdp1", "lora", "bf16", "no", 2, 2, False, False),
        ("fsdp1", "full", "fp32", "bf16", 2, 2, True, False),
    ],
)
def test_dtypes_at_work(
    sharding: Any, method: Any, weights: Any, mixed: Any, compute: int, residual: int, wrapped: bool, copies: bool
) -> None:
    choice = replace(SHARDED, sharding=sharding, method=method, weights=weights, mixed_precision=mixed)
    assert (compute_bytes(choice), residual_bytes(choice)) == (compute, residual)
    assert (runs_under_autocast(choice), uses_autocast(choice)) == (wrapped, copies)
