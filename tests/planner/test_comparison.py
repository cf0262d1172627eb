"""Two candidates side by side: each as it is planned alone, and the differences by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.advice.comparison import NoSuchRank, compare
from planner.pins import PinError
from planner.planning import RefusedJob, make_plan
from planner.problem import with_job
from profiles.releases import newest_known
from tests.planner.replay import inputs_of

JOB: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 8}
INPUTS = inputs_of(JOB, stack={**newest_known(), "bitsandbytes": "0.50.0"})
GIB = 2**30


def test_each_side_is_the_plan_under_its_pins() -> None:
    sides: tuple[dict[str, Any], dict[str, Any]] = ({"recompute": "full"}, {"recompute": "none", "sharding": "fsdp"})
    document = compare(INPUTS, *sides)
    for pins, side in zip(sides, document["sides"], strict=True):
        alone = make_plan(with_job(INPUTS, pins=pins)).document["best"]
        assert side["candidate"] == {**alone, "why": []}
        assert side["short_bytes"] == 0
    assert document["sides"][1]["asked"] == "recompute=none sharding=fsdp"


def test_a_rank_is_the_candidate_of_that_place() -> None:
    plan = make_plan(INPUTS).document["candidates"]
    document = compare(INPUTS, 1, 4)
    for rank, side in zip((1, 4), document["sides"], strict=True):
        assert side["candidate"]["choice"] == plan[rank - 1]["choice"]
        assert side["candidate"]["memory"] == plan[rank - 1]["memory"]
        assert side["asked"] == f"candidate {rank}"
    with pytest.raises(NoSuchRank, match="there is no candidate 100000: "):
        compare(INPUTS, 1, 100_000)


def test_numbers_come_in_pairs_that_add_up() -> None:
    document = compare(INPUTS, {"recompute": "full"}, {"sharding": "ddp", "recompute": "full"})
    first, second = (side["candidate"] for side in document["sides"])
    memory, time = document["memory"], document["time"]
    assert memory["device_bytes"] == [first["memory"]["device_bytes"], second["memory"]["device_bytes"]]
    for i, candidate in enumerate((first, second)):
        for phase, shown in zip(candidate["memory"]["phases"], memory["phases"], strict=True):
            assert shown["name"] == phase["name"]
            assert shown["bytes"][i] == phase["bytes"] == sum(part[i] for part in shown["parts"].values())
        assert sum(part[i] for part in time["parts"].values()) == pytest.approx(candidate["time"]["step_s"], rel=1e-4)
    # Replicated, 8.19 B parameters and their master copy and moments are eight times what a shard of them is.
    step = next(phase for phase in memory["phases"] if phase["name"] == "step")
    whole = 8_190_735_360 * 4
    assert step["parts"]["moment1"] == [pytest.approx(whole / 8, rel=0.001), whole]
    assert document["sides"][1]["short_bytes"] > 0
    assert document["sentence"].endswith("only A fits")


def test_what_differs_is_named_knob_by_knob() -> None:
    document = compare(INPUTS, {"recompute": "full", "gpus": 8}, {"recompute": "full", "gpus": 4})
    first, second = (side["candidate"]["choice"] for side in document["sides"])
    knobs = {entry["knob"]: entry["values"] for entry in document["differs"]}
    assert (knobs["dp_shard"], first["sharding"], second["sharding"]) == ([8, 4], "fsdp", "fsdp")
    # Eight sequences a step on half the ranks: twice as many on each, in one pass or in two.
    assert [c["micro_batch"] * c["grad_accum"] for c in (first, second)] == [1, 2]
    assert knobs.keys() <= {"dp_shard", "micro_batch", "grad_accum"}


def test_an_asked_list_is_written_as_it_is_pinned() -> None:
    document = compare(INPUTS, {"recompute": "full", "offload": ["activations"]}, 1)
    assert document["sides"][0]["asked"] == "recompute=full offload=activations"


def test_the_sentence_says_bytes_and_time() -> None:
    document = compare(INPUTS, {"recompute": "full", "sharding": "fsdp"}, {"recompute": "none", "sharding": "fsdp"})
    first, second = (side["candidate"] for side in document["sides"])
    gib = (second["memory"]["device_bytes"] - first["memory"]["device_bytes"]) / GIB
    less = 1 - second["time"]["step_s"] / first["time"]["step_s"]
    assert document["sentence"].startswith(f"B takes {gib:.1f} GiB more per GPU and {less:.0%} less time per step (")
    assert document["sentence"].endswith("both fit")
    same = compare(INPUTS, 1, 1)
    assert same["differs"] == []
    assert same["sentence"] == "B takes 0.0 GiB less per GPU and the same time per step; both fit"


def test_unknown_rates_leave_the_time_out() -> None:
    from dataclasses import replace

    document = compare(replace(INPUTS, profile=None), {"recompute": "full"}, {"recompute": "none"})
    assert document["time"] is None
    assert "per step" not in document["sentence"]


def test_what_is_refused() -> None:
    with pytest.raises(PinError):
        compare(INPUTS, {"recompute": "half"}, 1)
    with pytest.raises(RefusedJob, match="no run is possible"):
        compare(INPUTS, {"sharding": "none", "gpus": "8"}, 1)


def test_the_longest_sequence_is_what_is_compared() -> None:
    job = {**JOB, "model": "Qwen/Qwen3-0.6B", "machine": "1xRTX4090", "global_batch": 1, "goal": "longest"}
    inputs = inputs_of(job, stack=dict(newest_known()))
    document = compare(inputs, 1, {"recompute": "none"})
    assert document["job"]["seq_len"] == make_plan(inputs).document["longest"] > 8192
    assert [side["candidate"]["fits"] for side in document["sides"]] == [True, False]
