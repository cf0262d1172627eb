"""A plan that ran itself on all of its ranks: it counts for exactly that choice, and says nothing of any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.measured.check import BadMeasurement, check_measurement
from planner.measured.document import whole_of
from planner.measured.probes import PHASES, Measured, MeasuredWhole
from planner.memory.coefficients_json import option_key, shape_hash
from planner.planning import make_plan
from planner.problem import PlanInput, Problem, make_problem
from tests.planner.replay import inputs_of

MIB = 2**20
FSDP = Choice(method="full", loss_path="fused", recompute="none", sharding="fsdp", dp_shard=8, weights="bf16")
ALONE = replace(FSDP, sharding="none", dp_shard=1)


def inputs(machine: str = "8xH100-80GB", **job: Any) -> PlanInput:
    batch = 1 if machine.startswith("1x") else 8
    return inputs_of({"model": "Qwen/Qwen3-0.6B", "machine": machine, "seq_len": 2048, "global_batch": batch, **job})


def ran(asked: PlanInput, choice: Choice, peaks: dict[str, int], step_s: float = 1.0) -> MeasuredWhole:
    architecture, memory = asked.architecture, make_problem(asked).judge.memory
    options = memory.activation_options(choice)
    return MeasuredWhole(
        trainer="sft",
        shape=shape_hash(architecture),
        vocab=architecture.vocab,
        tied=architecture.tied,
        options=option_key(architecture, options),
        lora_r=options.lora_r,
        choice=choice,
        layers=architecture.num_layers,
        sequence=asked.job.seq_len,
        peaks=peaks,
        step_s=step_s,
    )


def told(asked: PlanInput, *wholes: MeasuredWhole) -> Problem:
    return make_problem(replace(asked, measured=Measured(card="H100-80GB", wholes=wholes)))


def seen_of(asked: PlanInput, choice: Choice, more: int) -> dict[str, int]:
    """What the model says of each phase with the kernels' workspaces, and ``more``."""
    memory = make_problem(asked).judge.memory
    workspace = memory.device_of(choice).workspace_bytes
    frame = memory.frame(choice)
    return {p.name: p.bytes + workspace + more for p in frame.phases(choice.micro_batch, choice.grad_accum)}


@pytest.mark.parametrize("more", [300 * MIB, -3 * MIB, -900 * MIB], ids=["more", "less", "far less"])
def test_its_own_choice_is_as_seen(more: int) -> None:
    asked = inputs()
    seen = seen_of(asked, FSDP, more)
    found, before = (p.judge.memory.estimate(FSDP) for p in (told(asked, ran(asked, FSDP, seen)), make_problem(asked)))
    assert (before.evidence, found.evidence) == ("formula", "measured")
    highest = max(seen[phase] for phase in PHASES)
    assert found.allocated_bytes == pytest.approx(highest, abs=16)
    assert (found.high_bytes - found.low_bytes) / 2 == pytest.approx(0.015 * found.allocated_bytes, rel=0.2)
    workspace = make_problem(asked).judge.memory.device_of(FSDP).workspace_bytes
    for phase in found.phases:
        assert all(size >= 0 for size in phase.parts.values())
        tensors = sum(size for part, size in phase.parts.items() if part not in ("context", "slack"))
        if phase.name in PHASES:
            assert tensors + workspace == pytest.approx(seen[phase.name], abs=16)


def test_seconds_of_all_ranks_are_the_steps_own() -> None:
    asked = inputs()
    found = told(asked, ran(asked, FSDP, seen_of(asked, FSDP, 0), step_s=0.7)).judge.time.estimate(FSDP)
    before = make_problem(asked).judge.time.estimate(FSDP)
    assert found is not None and before is not None
    assert (found.step_s, found.evidence) == (pytest.approx(0.7), "measured")
    assert (found.low_s, found.high_s) == (pytest.approx(0.85 * 0.7), pytest.approx(1.15 * 0.7))
    share = found.step_s / before.step_s
    assert found.parts == {part: pytest.approx(seconds * share) for part, seconds in before.parts.items()}


@pytest.mark.parametrize(
    "change",
    [
        {"sharding": "none", "dp_shard": 1},
        {"dp_shard": 4},
        {"sharding": "fsdp_no_reshard"},
        {"sharding": "ddp", "dp_shard": 1, "dp_replicate": 8},
        {"cp": 2, "dp_shard": 4},
        {"grad_accum": 2},
        {"micro_batch": 2},
        {"recompute": "full"},
    ],
    ids=lambda change: " ".join(f"{knob}={value}" for knob, value in change.items()),
)
def test_several_ranks_say_nothing_of_another_choice(change: dict[str, Any]) -> None:
    asked, other = inputs(), replace(FSDP, **change)
    problem = told(asked, ran(asked, FSDP, seen_of(asked, FSDP, 300 * MIB), step_s=9.0))
    bare = make_problem(asked)
    assert problem.judge.memory.estimate(other) == bare.judge.memory.estimate(other)
    assert problem.judge.time.estimate(other) == bare.judge.time.estimate(other)


def test_one_rank_says_nothing_of_several() -> None:
    asked = inputs()
    problem = told(asked, ran(asked, ALONE, seen_of(asked, ALONE, 300 * MIB), step_s=9.0))
    bare = make_problem(asked)
    assert problem.judge.memory.estimate(FSDP) == bare.judge.memory.estimate(FSDP)
    assert problem.judge.time.estimate(FSDP) == bare.judge.time.estimate(FSDP)
    assert problem.judge.memory.estimate(ALONE).evidence == "measured"
    # What CUDA, NCCL and the kernels hold beside is the machine's, and comes from one rank alone.
    assert problem.hardware == bare.hardware


def test_another_length_or_model_is_not_what_ran() -> None:
    asked = inputs()
    whole = ran(asked, FSDP, seen_of(asked, FSDP, 300 * MIB))
    longer = inputs(seq_len=4096)
    assert told(longer, whole).judge.memory.estimate(FSDP) == make_problem(longer).judge.memory.estimate(FSDP)
    shallow = replace(whole, layers=whole.layers - 1)
    assert told(asked, shallow).judge.memory.estimate(FSDP).evidence == "formula"


def test_the_newest_of_two_stands_and_plans_say_measured() -> None:
    pins = {"sharding": "fsdp", "recompute": "none", "loss_path": "fused", "weights": "bf16", "gpus": "8"}
    asked = inputs(pins=pins)
    best = make_plan(asked).document["best"]
    choice = Choice.from_json(best["choice"])
    old, new = (ran(asked, choice, seen_of(asked, choice, more), step_s=0.1) for more in (500 * MIB, 100 * MIB))
    plan = make_plan(replace(asked, measured=Measured(card="H100-80GB", wholes=(new, old))))
    found = plan.document["best"]
    assert (found["memory"]["evidence"], found["time"]["evidence"]) == ("measured", "measured")
    gained = found["memory"]["allocated_bytes"] - best["memory"]["allocated_bytes"]
    assert gained == pytest.approx(100 * MIB, abs=16)


def test_a_best_plan_beside_one_that_ran_is_said() -> None:
    asked = inputs(pins={"sharding": "fsdp", "loss_path": "fused", "gpus": "8"})
    choice = replace(Choice.from_json(make_plan(asked).document["best"]["choice"]), recompute="full")
    slow = ran(asked, choice, seen_of(asked, choice, 0), step_s=9.0)
    plan = make_plan(replace(asked, measured=Measured(card="H100-80GB", wholes=(slow,)))).document
    assert plan["best"]["choice"] != choice.to_json() and plan["best"]["memory"]["evidence"] == "formula"
    (note,) = plan["notes"]
    assert "another was (8 ranks of fsdp, recompute full, loss fused, 1 x 1 rows) and took 9.0" in note
    assert "`trlfit probe MODEL --whole` runs the best one too" in note


def document(choice: Choice, ranks: int) -> dict[str, Any]:
    seconds = {**dict.fromkeys(PHASES, 0.1), "other": 0.05}
    seen: dict[str, Any] = {"peaks": dict.fromkeys(PHASES, 5), "seconds": seconds}
    tokens = choice.micro_batch * 64
    cell = {"layers": 2, "sequence": 64, "tokens": tokens, **seen, "ranks": [seen for _ in range(ranks)]}
    facts = {"model": "m", "trainer": "sft", "shape": "s", "options": "o", "vocab": 9, "tied": True, "lora_r": 0}
    return {
        "schema": "trlfit.measurement/1", "kind": "whole", "device": "cpu", "name": "n", "taken": "2026",
        "versions": {}, "whole": {**facts, "choice": choice.to_json(), "cells": [cell]},
    }  # fmt: skip


def test_as_many_ranks_as_the_choice_takes() -> None:
    whole = whole_of(check_measurement(document(FSDP, 8)))
    assert whole is not None
    assert (whole.choice, whole.layers, whole.sequence, whole.step_s) == (FSDP, 2, 64, pytest.approx(0.45))
    assert whole_of(check_measurement(document(ALONE, 0))) is not None
    for choice, ranks in ((FSDP, 0), (FSDP, 7), (ALONE, 2)):
        with pytest.raises(BadMeasurement, match=f"ranks has {ranks} rows of a choice of {choice.num_gpus}"):
            check_measurement(document(choice, ranks))
    broken = document(FSDP, 8)
    broken["whole"]["cells"][0]["ranks"][3] = {"peaks": {}}
    with pytest.raises(BadMeasurement, match=r"ranks\[3\]"):
        check_measurement(broken)


def test_a_plan_that_ran_out_of_memory_corrects_nothing_and_is_said() -> None:
    short = document(FSDP, 0)
    short["whole"]["cells"] = [{"layers": 2, "sequence": 64, "rank": 3, "out_of_memory": "rank 3 of 8: no room"}]
    whole = whole_of(check_measurement(short))
    assert whole is not None
    assert (whole.out_of_memory, whole.choice, whole.peaks) == ("rank 3 of 8: no room", FSDP, {})
    asked = inputs(pins={"sharding": "fsdp", "recompute": "none", "loss_path": "fused", "gpus": "8"})
    bare = make_plan(asked)
    best = bare.document["best"]
    failed = replace(ran(asked, Choice.from_json(best["choice"]), {}), out_of_memory=whole.out_of_memory)
    plan = make_plan(replace(asked, measured=Measured(card="H100-80GB", wholes=(failed,))))
    assert plan.document["best"] == best
    (note,) = plan.document["notes"]
    assert note.startswith("the best plan was probed here and ran out of the memory that a probe may take: rank 3 of 8")
    assert not bare.document["notes"]
