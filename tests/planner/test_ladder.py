"""The ladder of a job that does not fit: each rung the model's own, and what adds up only ever helps."""

from __future__ import annotations

from typing import Any

import pytest

from planner.advice.ladder import Rung, ladder
from planner.problem import with_job
from planner.search.levers import free_levers
from planner.search.search import search
from profiles.releases import newest_known
from tests.planner.replay import inputs_of, problem_of

BITSANDBYTES = {**newest_known(), "bitsandbytes": "0.50.0"}
TIGHT: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "machine": "1xRTX4090", "seq_len": 4096, "global_batch": 4}
GIB = 2**30


def rungs(stack: dict[str, str] | None = None, **changes: Any) -> dict[str, Rung]:
    return {rung.lever: rung for rung in ladder(inputs_of({**TIGHT, **changes}, stack=stack or BITSANDBYTES))}


def test_the_order_of_the_levers() -> None:
    old = {**BITSANDBYTES, "trl": "1.12.0"}
    found = rungs(old, machine="2xRTX4090", seq_len=65_536, pins={"offload": []})
    assert list(found) == [
        "no lever",
        "loss path",
        "recompute",
        "offload",
        "split over cards",
        "newer TRL",
        "no pins",
        "numerics",
        "lora",
        "qlora",
        "more GPUs",
        "another card",
        "fewer tokens",
    ]


def test_levers_of_one_value_are_left_out() -> None:
    """TRL 1.16 has one way to compute its loss, and one card shares nothing."""
    assert list(rungs())[:4] == ["no lever", "recompute", "offload", "states on the host"]
    assert not {"loss path", "split over cards", "newer TRL", "no pins"} & set(rungs())


@pytest.mark.parametrize(
    "changes",
    [{}, {"method": "lora", "seq_len": 262_144, "global_batch": 1}, {"machine": "2xT4", "seq_len": 1_048_576}],
)
def test_what_adds_up_only_ever_helps(changes: dict[str, Any]) -> None:
    own = [rung for rung in rungs(**changes).values() if not rung.flags]
    short = [rung.to_json()["short_bytes"] for rung in own]
    assert short == sorted(short, reverse=True)
    assert all(size > 0 for size in short)
    # All levers of the planner together are the job as it was asked.
    p = problem_of({**TIGHT, **changes}, stack=BITSANDBYTES)
    closest = search(p.judge, p.options, "fastest").near_misses[0]
    assert own[-1].candidate is not None
    assert own[-1].candidate.choice == closest.choice


def test_every_rung_is_the_models_own_answer() -> None:
    for rung in rungs().values():
        data = rung.to_json()
        if rung.candidate is None:
            continue
        memory = rung.problem.judge.memory.estimate(rung.candidate.choice)
        assert data["fits"] == memory.fits == (data["short_bytes"] == 0)
        assert data["device_bytes"] == pytest.approx(memory.device_bytes, abs=128)
        assert ("fits with" in data["sentence"]) == memory.fits


def test_8_billion_parameters_on_24_gb_by_hand() -> None:
    """16 bytes of 8.03 B parameters are 119.7 GiB; 24 GB is short of about a hundred whatever is recomputed."""
    found = rungs()
    short = found["offload"].to_json()["short_bytes"] / GIB
    assert 119.7 - 24 < short < 119.7
    assert found["lora"].to_json()["fits"] and found["qlora"].to_json()["fits"]
    # bf16 weights and gradients, moments of 8 bits: 6 bytes, 44.9 GiB.
    assert 44.9 - 24 < found["numerics"].to_json()["short_bytes"] / GIB < 44.9


def test_a_pin_is_dropped_where_its_lever_comes() -> None:
    found = rungs(method="lora", pins={"recompute": "none", "micro_batch": 4})
    assert found["no lever"].candidate is not None
    assert found["recompute"].flags == "(drop --pin recompute=none)"
    assert found["recompute"].candidate is not None
    assert found["recompute"].candidate.choice.recompute != "none"
    assert found["recompute"].candidate.choice.micro_batch == 4


def test_a_dropped_list_is_written_as_it_is_pinned() -> None:
    found = rungs(machine="1xT4", pins={"recompute": "full", "offload": ["activations"]})
    assert found["offload"].flags == "(drop --pin offload=activations)"


def test_what_is_refused_says_why() -> None:
    found = rungs(newest_known() | {}, pins={"recompute": "none"})
    qlora = found["qlora"].to_json()
    assert (qlora["device_bytes"], qlora["fits"], qlora["choice"]) == (None, False, None)
    assert "bitsandbytes" in qlora["sentence"]


def test_all_together_comes_where_nothing_alone_is_enough() -> None:
    found = rungs(model="Qwen/Qwen2.5-72B", pins={"offload": []})
    assert found["all together"].to_json()["fits"]
    assert [lever for lever, rung in found.items() if rung.to_json()["fits"]] == ["all together"]


def test_growing_freedom() -> None:
    inputs = inputs_of({**TIGHT, "machine": "2xRTX4090"}, stack={**BITSANDBYTES, "trl": "1.12.0"})
    steps = list(free_levers(inputs, ("recompute", "loss path", "offload", "split over cards")))
    assert [lever for lever, _ in steps] == ["no lever", "recompute", "loss path", "offload", "split over cards"]
    sizes = [len(pins) for _, pins in steps]
    assert sizes == [5, 4, 3, 2, 0]
    assert steps[0][1] == {"recompute": "none", "offload": [], "cp": 1, "sp": 1, "loss_path": "full_logits"}
    pinned = with_job(inputs, pins={"recompute": "full", "gpus": 2})
    last = list(free_levers(pinned, ("recompute",)))
    assert last[0][1]["recompute"] == "full"
    assert last[1][1] == {"offload": [], "cp": 1, "sp": 1, "loss_path": "full_logits", "gpus": 2}
