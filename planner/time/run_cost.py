"""What the whole run takes: optimizer steps, time to finish, GPU-hours, energy and price."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from planner.job import Job
from planner.plan_json import round_significant
from planner.rules.overrides import read_overrides

if TYPE_CHECKING:
    from planner.problem import Problem
    from planner.search.search import Candidate
    from planner.time.step import TimeEstimate

DEFAULT_EPOCHS = 3.0
"""transformers' ``num_train_epochs`` (training_args.py), which TRL's configs keep."""
MOST_STEPS = 2**63 - 1
"""What a job's own integers reach (``planner.job``)."""
GENERATING = ("grpo", "rloo")


@dataclass(frozen=True, slots=True)
class RunLength:
    """How many optimizer steps a job takes, or why nobody knows."""

    steps: int | None
    unknown: str | None


def run_length(job: Job, data_rows: int | None) -> RunLength:
    """Optimizer steps of ``job``, counted as transformers' Trainer counts them.

    Args:
        job: its ``trl`` section may hold ``max_steps`` or ``num_train_epochs``.
        data_rows: examples of the training data, None where they are not known.
    """
    if job.trainer in GENERATING:
        return RunLength(None, f"the time in which {job.trainer} generates is not counted")
    asks = read_overrides(job.trl)
    if asks.max_steps > 0:
        return _counted(asks.max_steps)
    if job.data.packing:
        return RunLength(None, "how many packed sequences the data make is not known; --trl max_steps=N says it")
    if data_rows is None:
        return RunLength(None, "how many rows the data have is not known; --trl max_steps=N says the steps")
    epochs = asks.num_train_epochs if asks.num_train_epochs > 0 else DEFAULT_EPOCHS
    # Accumulation over what is left of an epoch is a step of its own (trainer.py, set_initial_training_values).
    return _counted(epochs * max(1, ceil(data_rows / job.global_batch)))


def _counted(steps: float) -> RunLength:
    if steps > MOST_STEPS:
        return RunLength(None, "more steps are asked for than 64 bits count")
    return RunLength(ceil(steps), None)


def cost_of(problem: Problem, candidate: Candidate) -> dict[str, Any] | None:
    """``run_cost`` of one candidate, None where the card's rates are not known."""
    if candidate.time is None:
        return None
    job = problem.inputs.job
    return run_cost(
        candidate.time,
        run_length(job, problem.inputs.data_rows),
        num_gpus=candidate.choice.num_gpus,
        power_w=problem.hardware.power_w,
        price_per_hour=job.price_per_hour,
    )


def run_cost(
    time: TimeEstimate, length: RunLength, *, num_gpus: int, power_w: float | None, price_per_hour: float | None
) -> dict[str, Any]:
    """``steps``, ``finish_s``, ``gpu_hours``, ``energy_kwh``, ``cost`` and ``unknown``; null where it is not known.

    Args:
        time: of one optimizer step.
        length: steps of the run.
        num_gpus: cards of the run.
        power_w: limit of one card: NVML's, else the data sheet's. Energy is at most that for as long as the run takes;
            hosts, fans and cooling are not in it.
        price_per_hour: of one card, in any currency.
    """
    steps = length.steps
    finish_s = gpu_hours = energy = cost = None
    if steps is not None:
        finish_s = steps * time.step_s
        gpu_hours = finish_s * num_gpus / 3600
        energy = gpu_hours * power_w / 1000 if power_w is not None else None
        cost = gpu_hours * price_per_hour if price_per_hour is not None else None
    return {
        "steps": steps,
        "finish_s": _rounded(finish_s),
        "gpu_hours": _rounded(gpu_hours),
        "energy_kwh": _rounded(energy),
        "cost": _rounded(cost),
        "unknown": length.unknown,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round_significant(value, 4)
