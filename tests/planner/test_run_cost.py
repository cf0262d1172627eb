"""Steps, time to finish, GPU-hours, energy and cost of a run, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.job import Job
from planner.planning import make_plan
from planner.time.run_cost import run_cost, run_length
from planner.time.step import TIME_PARTS, TimeEstimate
from tests.planner.replay import inputs_of

TIME = TimeEstimate(2.0, 1.6, 2.4, 1000.0, 125.0, 0.4, (2.0, *[0.0] * (len(TIME_PARTS) - 1)))


def job(**values: Any) -> Job:
    return Job.model_validate({"model": "Qwen/Qwen3-8B", "global_batch": 8, **values})


@pytest.mark.parametrize(
    ("values", "rows", "steps"),
    [
        # 1,001 rows in batches of 8 are 126 steps an epoch, the last of one row; three epochs unless asked.
        ({}, 1001, 378),
        ({"trl": {"num_train_epochs": 1}}, 1001, 126),
        ({"trl": {"num_train_epochs": 0.5}}, 1001, 63),
        ({"trl": {"num_train_epochs": 2}}, 3, 2),
        ({"trl": {"max_steps": 40, "num_train_epochs": 9}}, 1001, 40),
        ({"trl": {"max_steps": 40}, "data": {"packing": True}}, None, 40),
        ({"trl": {"max_steps": -1}}, 8, 3),
        # YAML 1.1 reads a number without a point as text: ten epochs of 126 steps, and a billion steps.
        ({"trl": {"num_train_epochs": "1e1"}}, 1001, 1260),
        ({"trl": {"max_steps": "1e9"}}, 1001, 10**9),
    ],
)
def test_steps_as_the_trainer_counts_them(values: dict[str, Any], rows: int | None, steps: int) -> None:
    found = run_length(job(**values), rows)
    assert (found.steps, found.unknown) == (steps, None)


@pytest.mark.parametrize(
    ("values", "rows", "why"),
    [
        ({}, None, "rows"),
        ({"data": {"packing": True}}, 1000, "packed"),
        ({"trainer": "grpo", "trl": {"max_steps": 10}}, 1000, "generates"),
        ({"trl": {"max_steps": "1e300"}}, None, "64 bits"),
    ],
)
def test_what_is_not_known_says_so(values: dict[str, Any], rows: int | None, why: str) -> None:
    found = run_length(job(**values), rows)
    assert found.steps is None
    assert why in (found.unknown or "")
    cost = run_cost(TIME, found, num_gpus=8, power_w=700, price_per_hour=2.5)
    assert cost == {**dict.fromkeys(("steps", "finish_s", "gpu_hours", "energy_kwh", "cost")), "unknown": found.unknown}


def test_a_run_of_900_steps() -> None:
    """900 steps of 2 s on 8 cards of 700 W: half an hour, 4 GPU-hours, at most 2.8 kWh, 10 at 2.50 an hour."""
    length = run_length(job(trl={"max_steps": 900}), None)
    found = run_cost(TIME, length, num_gpus=8, power_w=700, price_per_hour=2.5)
    assert found == {
        "steps": 900,
        "finish_s": 1800.0,
        "gpu_hours": 4.0,
        "energy_kwh": 2.8,
        "cost": 10.0,
        "unknown": None,
    }
    unknown = run_cost(TIME, length, num_gpus=8, power_w=None, price_per_hour=None)
    assert (unknown["energy_kwh"], unknown["cost"]) == (None, None)


def test_every_candidate_of_a_plan_has_them() -> None:
    asked = {
        "model": "Qwen/Qwen3-8B",
        "machine": "8xH100-80GB",
        "trl": {"num_train_epochs": 2},
        "price_per_hour": 3,
    }
    inputs = replace(inputs_of(asked, stack={"trl": "1.16.0"}), data_rows=8000)
    for candidate in make_plan(inputs).document["candidates"]:
        time = candidate["time"]
        assert time["steps"] == 2000
        assert time["finish_s"] == pytest.approx(2000 * time["step_s"], rel=1e-3)
        assert time["gpu_hours"] == pytest.approx(time["finish_s"] * candidate["num_gpus"] / 3600, rel=1e-3)
        assert time["energy_kwh"] == pytest.approx(0.7 * time["gpu_hours"], rel=1e-3)
        assert time["cost"] == pytest.approx(3 * time["gpu_hours"], rel=1e-3)
