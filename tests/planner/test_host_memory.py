"""Host memory of a node: sums by hand for Qwen3-8B, 8,190,735,360 parameters, on eight cards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.machine import Host
from planner.memory.host import PROCESS_BYTES, HostMemory, pinned_block
from planner.planning import make_plan
from tests.planner.replay import inputs_of, named_machine
from tests.planner.test_memory import model

GIB = 2**30
PARAMETERS = 8_190_735_360
SHARE = PARAMETERS // 8
SHARDED = Choice(
    method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8, weights="fp32", micro_batch=1
)
LARGEST = 151_936 * 4096
"""The embedding, which is the largest parameter."""


def host(choice: Choice, **machine: Any) -> HostMemory:
    return model(**machine).estimate(choice).host


def tensors(found: HostMemory, when: str, pinned: bool) -> int:
    return sum(part.tensor_bytes for part in found.parts if part.when == when and part.pinned == pinned)


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 1), (2**30, 2**30), (2**30 + 1, 2**31), (503_316_480, 2**29)])
def test_pinned_blocks_are_powers_of_two(size: int, block: int) -> None:
    assert pinned_block(size) == block


@pytest.mark.parametrize(
    ("sharding", "sizes", "pinned", "pageable", "taken"),
    [
        # Master 4, gradients 4, 16-bit copy 2 of a share of 1,023,841,920, and one parameter of 622,329,856; moments 8.
        # Blocks: 4 GB in 4 GiB, twice, 2.05 GB in 2 GiB, 1.24 GB in 2 GiB.
        ("zero2", {"dp_shard": 8}, 10 * SHARE + 2 * LARGEST, 8 * SHARE, 12 * GIB),
        ("zero1", {"dp_shard": 8}, 10 * SHARE + 2 * LARGEST, 8 * SHARE, 12 * GIB),
        # Gradients 4 and 2; master 4 and moments 8. A sub-group of 1e9 takes 4 GiB, the 23.8 million left 128 MiB.
        ("zero3", {"dp_shard": 8}, 6 * SHARE, 12 * SHARE, 4 * GIB + 128 * 2**20 + 2 * GIB),
    ],
)
def test_deepspeeds_optimizer(sharding: Any, sizes: dict[str, int], pinned: int, pageable: int, taken: int) -> None:
    found = host(replace(SHARDED, sharding=sharding, offload=frozenset({"optimizer"}), **sizes))
    assert tensors(found, "train", True) == 8 * pinned
    assert tensors(found, "train", False) == found.pageable_bytes == 8 * pageable
    assert found.pinned_bytes == 8 * taken


def test_accumulation_keeps_gradients_of_zero1_and_2_on_the_host() -> None:
    choice = replace(SHARDED, sharding="zero2", offload=frozenset({"optimizer"}))
    once, twice = host(choice), host(replace(choice, grad_accum=2))
    assert tensors(twice, "train", True) - tensors(once, "train", True) == 2 * PARAMETERS
    third = replace(choice, sharding="zero3")
    assert host(third) == host(replace(third, grad_accum=2))


def test_fsdp2s_offload_is_all_sixteen_bytes() -> None:
    found = host(replace(SHARDED, offload=frozenset({"optimizer", "params"})))
    assert tensors(found, "train", True) == pytest.approx(8 * PARAMETERS, rel=1e-6)
    assert found.pageable_bytes == pytest.approx(8 * PARAMETERS, rel=1e-6)
    # 36 layers of q and o 4,096 x 4,096 (8 MiB shards), k and v 1,024 x 4,096 (2 MiB), three of 12,288 x 4,096
    # (24 MiB in blocks of 32), and two tables of 622,329,856 (297 MiB in 512); weights and gradients alike.
    shards = 36 * (2 * 8 + 2 * 2 + 3 * 32) + 2 * 512
    assert found.pinned_bytes == 8 * 2 * shards * 2**20


def test_zero3s_weights_are_pinned_twice() -> None:
    both = host(replace(SHARDED, sharding="zero3", offload=frozenset({"optimizer", "params"})))
    states = host(replace(SHARDED, sharding="zero3", offload=frozenset({"optimizer"})))
    assert tensors(both, "train", True) - tensors(states, "train", True) == pytest.approx(2 * PARAMETERS, rel=1e-6)
    # One flat buffer of 2.05 GB, and blocks of 4, 1 and 16 MiB for a layer's shares, 256 MiB for a table's.
    shards = 36 * (2 * 4 + 2 * 1 + 3 * 16) + 2 * 256
    assert both.pinned_bytes - states.pinned_bytes == 8 * (2 * GIB + shards * 2**20)


def test_checkpoints_are_pinned_by_every_rank() -> None:
    choice = replace(SHARDED, offload=frozenset({"activations"}), micro_batch=2)
    found = host(choice)
    assert found.pinned_bytes == 8 * 36 * 2 * 2048 * 4096 * 2
    # A node with four cards pins four ranks' share.
    assert host(choice, gpus_per_node=4, nodes=2).pinned_bytes * 2 == found.pinned_bytes
    # A third row makes 48 MiB of a layer, for which 64 are taken.
    third = host(replace(choice, micro_batch=3))
    assert third.pinned_bytes == 8 * 36 * 64 * 2**20


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"sharding": "ddp", "dp_shard": 1, "dp_replicate": 8}, 8),
        ({"sharding": "zero1"}, 8),
        ({"sharding": "zero2"}, 8),
        ({}, 8),
        ({"sharding": "hsdp", "dp_shard": 4, "dp_replicate": 2}, 8),
        # A module at a time.
        ({"sharding": "zero3"}, 0),
        # Straight to the card.
        ({"sharding": "none", "dp_shard": 1}, 0),
        # As they are stored: mapped from the file.
        ({"weights": "bf16"}, 0),
        ({"method": "qlora", "weights": "bf16"}, 0),
    ],
)
def test_who_copies_the_weights_to_load_them(changes: dict[str, Any], ranks: int) -> None:
    assert host(replace(SHARDED, **changes)).load_bytes == ranks * 4 * PARAMETERS


def test_older_transformers_load_once_a_node_under_fsdp() -> None:
    older = model()
    older.job = replace(older.job, fsdp_first_rank_loads=True)
    assert older.estimate(SHARDED).host.load_bytes == 4 * PARAMETERS
    assert older.estimate(replace(SHARDED, sharding="zero2")).host.load_bytes == 8 * 4 * PARAMETERS


@pytest.mark.parametrize(
    ("changes", "per_parameter"),
    [
        # The first rank gathers 4 bytes of weights, then 8 of moments; two ZeRO ranks copy 2 each.
        ({}, 8),
        ({"sharding": "zero2"}, 2 * 8),
        ({"sharding": "zero3"}, 2),
        ({"sharding": "ddp", "dp_shard": 1, "dp_replicate": 8}, 0),
    ],
)
def test_what_saving_gathers(changes: dict[str, Any], per_parameter: int) -> None:
    assert host(replace(SHARDED, **changes)).save_bytes == pytest.approx(per_parameter * PARAMETERS, rel=1e-6)


def test_a_model_alone_is_four_bytes() -> None:
    alone = model()
    alone.job = replace(alone.job, saves_optimizer=False)
    assert alone.estimate(SHARDED).host.save_bytes == pytest.approx(4 * PARAMETERS, rel=1e-6)


def test_the_most_at_any_time() -> None:
    plain = host(SHARDED)
    assert plain.peak_bytes == 8 * PROCESS_BYTES + 8 * 4 * PARAMETERS
    moved = host(replace(SHARDED, offload=frozenset({"optimizer", "params"}), weights="bf16"))
    assert moved.peak_bytes == 8 * PROCESS_BYTES + moved.pinned_bytes + moved.pageable_bytes + moved.save_bytes


@pytest.mark.parametrize("extra", [-1, 0])
def test_the_hosts_memory_is_a_limit(extra: int) -> None:
    for choice in (SHARDED, replace(SHARDED, weights="bf16", offload=frozenset({"activations"}))):
        verdict = model(host_available_bytes=host(choice).peak_bytes + extra).verdict(choice)
        assert (verdict.host_fits, verdict.fits) == (extra == 0, extra == 0)


def test_a_cpus_host_is_its_card() -> None:
    alone = replace(SHARDED, sharding="none", dp_shard=1, mixed_precision="no")
    assert host(alone, device="cpu").peak_bytes == 0


JOB = {"model": "meta-llama/Llama-3.1-70B", "machine": "8xH100-80GB", "global_batch": 8}


def warnings(machine: Any, **pins: Any) -> list[str]:
    inputs = inputs_of({**JOB, "pins": pins}, stack={"trl": "1.16.0", "deepspeed": "0.19.8"}, machine=machine)
    document = make_plan(inputs).document
    return [text for text in document["candidates"][0]["warnings"] if "named machine" in text]


def test_a_host_that_nobody_knows_is_warned_about() -> None:
    """Eight ranks that load 70 billion parameters in fp32 need 2 TiB, more than 640 GiB of cards."""
    machine = named_machine("8xH100-80GB")
    (warning,) = warnings(machine, sharding="fsdp", weights="fp32")
    assert "2,102.7 to load" in warning
    assert not warnings(machine, sharding="zero3", weights="fp32", offload=[])
    machine.host = Host(total_bytes=2**42, available_bytes=2**42, cores=64)
    assert not warnings(machine, sharding="fsdp", weights="fp32")


def test_a_host_that_cannot_load_the_model_is_no_plan() -> None:
    """Qwen3-8B in fp32 by eight ranks is 244 GiB."""
    machine = named_machine("8xH100-80GB")
    machine.host = Host(total_bytes=2**38, available_bytes=200 * GIB, cores=64)
    inputs = inputs_of(
        {
            "model": "Qwen/Qwen3-8B",
            "machine": "8xH100-80GB",
            "pins": {"sharding": "fsdp", "gpus": 8, "weights": "fp32"},
        },
        stack={"trl": "1.16.0"},
        machine=machine,
    )
    document = make_plan(inputs).document
    assert document["best"] is None
    assert "of host memory per node, of which " in document["near_misses"][0]["why"][0]
