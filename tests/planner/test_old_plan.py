"""An old plan on another day: what changed is named, and the verdict is that of a plan made today."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.advice.old_plan import OldPlan, held_against
from planner.choice import Choice
from planner.machine import Host, Machine
from planner.planning import PlanOutcome, make_plan
from planner.problem import PlanInput
from profiles.releases import newest_known
from tests.planner.replay import inputs_of, named_machine

JOB: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 8}
STACK = dict(newest_known())
GIB = 2**30


def asked(stack: dict[str, str] | None = None, machine: Machine | None = None, **changes: Any) -> PlanInput:
    return inputs_of({**JOB, **changes}, stack=stack or STACK, machine=machine)


def old_of(outcome: PlanOutcome) -> OldPlan:
    document = outcome.document
    memory, time = document["best"]["memory"], document["best"]["time"]
    return OldPlan(
        job={name: value for name, value in document["job"].items() if name != "origin"},
        machine=document["machine"],
        versions=document["stack"]["versions"],
        choice=Choice.from_json(document["best"]["choice"]),
        device_bytes=memory["device_bytes"],
        allocated_bytes=memory["allocated_bytes"],
        step_s=time["step_s"] if time else None,
    )


OLD = old_of(make_plan(asked()))


def test_nothing_changed() -> None:
    found = held_against(asked(), OLD)
    assert found["changed"] == {"job": [], "machine": [], "stack": []}
    assert found["prediction"]["device_bytes"] == [OLD.device_bytes] * 2
    assert found["prediction"]["step_s"] == [OLD.step_s] * 2
    assert (found["holds"], found["is_best"], found["slower_s"], found["adapted"]) == (True, True, 0, [])
    assert found["sentence"] == "the old choice still holds, and is still the best"


def test_another_process_on_the_cards() -> None:
    """As much taken as the choice had free: one GiB less holds, one more does not."""
    free = make_plan(asked()).document["best"]["memory"]["headroom_bytes"]
    for more, holds in ((-GIB, True), (GIB, False)):
        machine = named_machine("8xH100-80GB")
        for card in machine.cards:
            card.used_bytes = free + more
        found = held_against(asked(machine=machine), OLD)
        assert found["holds"] is holds
        assert found["short_bytes"] == (0 if holds else pytest.approx(GIB, abs=1024))
        fields = [entry["field"] for entry in found["changed"]["machine"]]
        assert fields == [f"cards[{i}].used_bytes" for i in range(8)]
        if not holds:
            assert "does not fit any more: " in found["sentence"] and "what does: " in found["sentence"]
            assert found["best"]["fits"]


def test_smaller_cards_and_fewer_of_them() -> None:
    small = held_against(asked(machine=named_machine("8xA100-40GB")), OLD)
    assert not small["holds"] and small["short_bytes"] > 0
    assert small["changed"]["machine"] == [{"field": "cards", "values": [["H100-80GB"] * 8, ["A100-40GB"] * 8]}]
    few = held_against(asked(machine=named_machine("4xH100-80GB")), OLD)
    assert few["refused"] == "it uses 8 GPUs, and the machine has 4 GPUs to use"
    assert not few["holds"] and few["short_bytes"] == 0
    assert few["best"]["num_gpus"] <= 4


def test_a_choice_that_holds_and_is_no_longer_the_best() -> None:
    """Planned with full recompute pinned; without the pin there is room for none."""
    old = old_of(make_plan(asked(pins={"recompute": "full"})))
    found = held_against(asked(), old)
    assert found["holds"] and not found["is_best"]
    best = make_plan(asked()).document["best"]
    assert found["best"]["choice"] == best["choice"]
    assert old.step_s is not None
    assert found["slower_s"] == pytest.approx(old.step_s - best["time"]["step_s"], rel=1e-4)
    slower = old.step_s / best["time"]["step_s"] - 1
    assert f"is {slower:.0%} slower than recompute none (" in found["sentence"]
    assert found["changed"]["job"] == [{"field": "pins.recompute", "values": ["full", None]}]


def test_another_release_computes_the_loss_in_its_own_way() -> None:
    found = held_against(asked(stack={**STACK, "trl": "1.12.0"}), OLD)
    assert found["changed"]["stack"] == [{"field": "trl", "values": [STACK["trl"], "1.12.0"]}]
    assert found["adapted"] == ["this TRL computes the loss as chunked_fp32, not as fused"]
    assert found["candidate"]["choice"]["loss_path"] == "chunked_fp32"
    before, after = found["prediction"]["device_bytes"]
    # lm_head in fp32: 151,936 x 4,096 x 4 bytes = 2.3 GiB.
    assert after - before > 1.5 * GIB


def test_another_batch_is_another_accumulation() -> None:
    found = held_against(asked(global_batch=32), OLD)
    assert found["holds"]
    assert found["adapted"] == ["the global batch takes 4 micro-batches per step, not 1"]
    assert found["candidate"]["choice"]["grad_accum"] == 4
    odd = held_against(asked(global_batch=12), OLD)
    assert not odd["holds"]
    assert "not global_batch 12" in odd["refused"]


def test_a_host_with_less_memory() -> None:
    pins = {"offload": ["optimizer", "params"], "recompute": "full", "gpus": 8}
    machines = {}
    for gib in (512, 40):
        machines[gib] = named_machine("8xH100-80GB")
        machines[gib].host = Host(total_bytes=512 * GIB, available_bytes=gib * GIB, cores=64)
    old = old_of(make_plan(asked(machine=machines[512], pins=pins)))
    found = held_against(asked(machine=machines[40], pins=pins), old)
    assert found["changed"]["machine"] == [{"field": "host.available_bytes", "values": [512 * GIB, 40 * GIB]}]
    assert not found["holds"]
    assert "host memory" in found["sentence"]


def test_unknown_rates() -> None:
    unknown = held_against(replace(asked(pins={"recompute": "full"}), profile=None), OLD)
    assert unknown["prediction"]["step_s"] == [OLD.step_s, None]
    assert unknown["holds"] and unknown["slower_s"] == 0


def test_the_longest_goal_holds_the_choice_to_the_longest_length() -> None:
    """As the plan of today says: a choice of 4,096 tokens without recompute does not reach it."""
    inputs = asked(goal="longest", global_batch=1)
    plan = make_plan(inputs).document
    found = held_against(inputs, old_of(make_plan(asked(global_batch=1))))
    assert found["job"]["seq_len"] == plan["longest"] > 100_000
    assert not found["holds"]
    assert found["best"]["choice"] == plan["best"]["choice"]
    again = held_against(inputs, old_of(make_plan(inputs)))
    assert again["sentence"] == "the old choice still holds, and is still the best"
    fewer = asked(goal="longest", global_batch=1, machine=named_machine("8xA100-40GB"))
    smaller = held_against(fewer, old_of(make_plan(inputs)))
    assert smaller["job"]["seq_len"] < plan["longest"]
    assert smaller["sentence"].endswith(
        f"the longest sequence is {smaller['job']['seq_len']:,} tokens now, {plan['longest']:,} in that plan"
    )


def test_another_method_is_another_question() -> None:
    found = held_against(asked(method="lora"), OLD)
    assert not found["holds"]
    assert found["refused"] == "it is full training, and the job asks for LoRA"
    assert found["sentence"].startswith(
        "the old choice cannot run: it is full training, and the job asks for LoRA; what does: LoRA"
    )
    assert (found["candidate"], found["prediction"]["device_bytes"]) == (None, [OLD.device_bytes, None])
    adapters = old_of(make_plan(asked(method="lora")))
    assert held_against(asked(), adapters)["refused"] == "it is LoRA, and the job asks for full training"
    allowed = held_against(asked(allow=["method"]), adapters)
    assert allowed["holds"] and allowed["candidate"]["alters"] == "method"


def test_packed_data_is_another_question() -> None:
    packed = {"data": {"packing": True}}
    found = held_against(asked(**packed), OLD)
    assert found["refused"] == "the job packs its data, and it does not"
    assert "packing" in found["sentence"].partition("what does: ")[2]
    back = held_against(asked(), old_of(make_plan(asked(**packed))))
    assert back["refused"] == "it packs its data, and the job does not"
    assert "no packing" in back["sentence"]


def test_faster_than_the_pins() -> None:
    found = held_against(asked(pins={"recompute": "full"}), OLD)
    assert found["holds"]
    assert "is faster than what the pins ask for: recompute full (" in found["sentence"]
