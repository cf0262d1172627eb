"""Where a stack differs from the textbook: sums by hand for Qwen3-8B, 36 layers of 4,096, 8,190,735,360 parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.text.plan import ledger_text
from planner.choice import SHARDINGS, Choice
from planner.ledger.ledger import ledger
from planner.ledger.one_choice import choose_one
from planner.ledger.textbook import TextbookInput, textbook
from planner.ledger.textbook_gap import stage_of, textbook_gap
from tests.planner.replay import inputs_of
from tests.planner.test_memory import model

PARAMETERS = 8_190_735_360
SHARDED = Choice(
    method="full", loss_path="fused", recompute="full", sharding="fsdp", dp_shard=8, weights="fp32", micro_batch=1
)
ALONE = replace(SHARDED, sharding="none", dp_shard=1)


def gap(choice: Choice, **changes: Any) -> dict[str, Any]:
    shared = model(**changes)
    return textbook_gap(shared, choice, shared.estimate(choice))


def differs(choice: Choice) -> dict[str, tuple[int, int]]:
    return {d["part"]: (d["textbook_bytes"], d["bytes"]) for d in gap(choice)["differences"]}


def why(choice: Choice, part: str) -> tuple[str, str]:
    (found,) = [d for d in gap(choice)["differences"] if d["part"] == part]
    return found["why"], found["source"]


@pytest.mark.parametrize(
    ("sharding", "stage"), [("none", 0), ("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp", 3), ("hsdp", 3)]
)
def test_the_textbooks_side_is_the_textbook(sharding: Any, stage: int) -> None:
    """The same bytes that the sheet comes to, for 2,048 tokens."""
    ranks = {"none": {}, "ddp": {"dp_replicate": 8}, "hsdp": {"dp_shard": 4, "dp_replicate": 2}}
    choice = replace(ALONE, sharding=sharding, **ranks.get(sharding, {"dp_shard": 8}))
    devices = 4 if sharding == "hsdp" else 8
    for recompute in ("none", "full"):
        found = gap(replace(choice, recompute=recompute))
        sheet = textbook(
            TextbookInput(
                params=PARAMETERS, hidden=4096, layers=36, seq_len=2048, devices=devices, stage=stage,  # type: ignore[arg-type]
                recompute=recompute == "full",
            )
        )  # fmt: skip
        assert found["stage"] == stage_of(choice) == stage
        assert found["total_bytes"] == sheet["total_bytes"]
        assert found["activations_bytes"] == sheet["activations_bytes"]


def test_fsdp2_keeps_fp32_shards_and_gathers_bf16() -> None:
    found = differs(SHARDED)
    assert found["weights"] == (2 * PARAMETERS // 8, 4 * PARAMETERS // 8)
    assert found["gradients"] == (2 * PARAMETERS // 8, 4 * PARAMETERS // 8)
    assert found["master"] == (4 * PARAMETERS // 8, 0)
    assert not {"moment1", "moment2"} & set(found)
    # The head of 151,936 x 4,096 and one or two layers of 192,946,432 parameters, in 2 bytes.
    layer, head = 2 * 192_946_432, 2 * 151_936 * 4096
    assert found["gather"][0] == 0
    assert layer + head <= found["gather"][1] <= 2 * layer + head
    assert why(SHARDED, "weights") == (
        "accelerate makes fp32 shards of what trains",
        "accelerate/utils/fsdp_utils.py",
    )
    assert why(SHARDED, "gather")[0] == "2 bytes: the layer in use and the next, in the loss the whole head"


def test_trl_loads_in_fp32() -> None:
    found = differs(ALONE)
    assert found["weights"] == (2 * PARAMETERS, 4 * PARAMETERS)
    assert found["master"] == (4 * PARAMETERS, 0)
    assert why(ALONE, "weights")[0] == "TRL loads in fp32 unless told otherwise"
    assert why(ALONE, "master")[0] == "none: the weights are fp32 themselves"
    assert why(ALONE, "casts")[0] == "2-byte copies of fp32 weights that autocast keeps"


def test_pure_bf16_is_eight_bytes() -> None:
    pure = replace(ALONE, weights="bf16", mixed_precision="no")
    found = differs(pure)
    assert {"weights", "gradients"} & set(found) == set()
    assert found["master"] == (4 * PARAMETERS, 0)
    assert found["moment1"] == found["moment2"] == (4 * PARAMETERS, 2 * PARAMETERS)
    assert why(pure, "master")[0] == "none: pure bf16 trains its weights in place, 8 bytes in all"


def test_zero2s_buckets_and_ddps_second_gradients() -> None:
    zero, ddp = replace(SHARDED, sharding="zero2"), replace(ALONE, sharding="ddp", dp_replicate=8)
    assert not {"weights", "gradients", "master", "moment1"} & set(differs(zero))
    assert differs(zero)["buckets"] == (0, 2_000_000_000)
    assert why(zero, "buckets")[0] == "a bucket of 500 million elements or fewer, and its copy"
    assert differs(ddp)["buckets"] == (0, 4 * PARAMETERS)
    assert why(ddp, "buckets") == ("gradients a second time, in buckets", "torch DistributedDataParallel")
    third = replace(SHARDED, sharding="zero3")
    assert why(third, "gather")[0] == "stage 3 keeps up to a billion parameters gathered"


def test_what_is_offloaded_is_elsewhere() -> None:
    moved = replace(SHARDED, sharding="zero2", offload=frozenset({"optimizer"}))
    found = differs(moved)
    assert [found[role][1] for role in ("gradients", "master", "moment1", "moment2")] == [0, 0, 0, 0]
    assert why(moved, "master") == ("on the host", "planner/memory/host.py")


def test_every_difference_of_every_sharding_has_a_reason_and_a_source() -> None:
    for sharding in SHARDINGS:
        for method in ("full", "lora", "qlora"):
            sizes = {"none": {"dp_shard": 1}, "ddp": {"dp_shard": 1, "dp_replicate": 8}}.get(sharding, {"dp_shard": 8})
            choice = replace(SHARDED, sharding=sharding, method=method, weights="bf16", recompute="none", **sizes)
            found = gap(choice)["differences"]
            assert found
            assert all(d["why"] and d["source"] for d in found)


def test_the_ledger_shows_it_in_eighty_columns() -> None:
    pins = {"sharding": "fsdp", "gpus": 8, "offload": []}
    one = choose_one(
        inputs_of({"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "pins": pins}, stack={"trl": "1.16.0"})
    )
    document = ledger(one.problem, one.candidate) | {"refusals": [], "warnings": [], "notes": []}
    assert document["textbook"]["differences"]
    assert {part["when"] for part in document["host"]} == {"load", "save"}
    shown = ledger_text(document).partition("against the textbook")[2].splitlines()
    assert all(len(line) <= 80 for line in shown)
    for difference in document["textbook"]["differences"]:
        assert any(line.split()[:1] == [difference["part"]] for line in shown)
