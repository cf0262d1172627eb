"""What measuring children are asked: on which device, how much of it, which job at which depths and lengths."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import EnvironmentLacks, UsageError
from launcher.run_text.run_spec import RunSpec
from launcher.run_text.training_script import CLASSES, adapter_settings
from launcher.run_text.trl_arguments import config_sections, yarn
from planner.choice import Choice
from planner.job import Job, rows_per_example
from planner.machine import BUSY_BYTES, Card, Machine
from planner.machine_hardware import cards_by_room
from planner.measured.probes import first_layers, probe_depths
from planner.memory.coefficients_json import option_key, shape_hash
from planner.memory.model import MemoryModel
from planner.problem import PlanInput, Problem, scored_beside
from planner.units import GIB

TRAINERS = ("sft", "dpo", "kto", "reward")
"""Whose jobs a probe runs: a step of the others waits for what they generate, of a length that nobody knows."""
MARGIN_SHARE = {"cuda": 0.05, "cpu": 0.10}
MARGIN_BYTES = GIB
"""Of the free memory a probe leaves this share, and never less than this."""
LEAST_TOKENS = 16
"""Of the shorter of two lengths: below it a step is all launches, and two lengths tell nothing apart."""
HANDING_OVER_S = 2.0
"""Before a limit, so that what was measured is handed over."""
START_S = 20.0
"""Loading torch and TRL; a guess, said as such."""
WARM_STEPS = 2
"""Of a cell: AdamW's states are there after the first."""
TIMED_STEPS = {"cuda": 7, "cpu": 4}
ROUNDS = {"cuda": 1, "cpu": 3}
"""Times that all cells run, one after the other; medians are over all rounds. A CPU is never alone."""
WHOLE_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where a probe runs and what it may take."""

    device: str
    cards: tuple[Card, ...]
    """Visible cards, emptiest first; empty on the CPU."""
    memory_bytes: int
    used_bytes: int
    """Already taken on the first card."""
    environment: dict[str, str]

    @property
    def place(self) -> str:
        """``card 0 (NVIDIA H200)`` or ``the host``."""
        return f"card {self.cards[0].index} ({self.cards[0].name})" if self.cards else "the host"


def room_of(machine: Machine, *, several: bool = False) -> Room:
    """The free memory of this machine less a margin.

    Args:
        machine: read live.
        several: all idle cards, for what runs between them; else the emptiest card alone.

    Raises:
        UsageError: the machine is not this one.
        EnvironmentLacks: others leave less than the margin.
    """
    if machine.origin not in ("nvml", "cpu"):
        raise UsageError(
            f"--machine {machine.spec}: only the machine here can be measured; say local or cpu, or bring what was"
            " measured there with --export and --import"
        )
    if not machine.usable_cards:
        assert machine.host is not None
        free = machine.host.available_bytes
        return Room(device="cpu", cards=(), memory_bytes=less_margin(free, "cpu", "the host"), used_bytes=0,
                    environment={"CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    cards = cards_by_room(machine)
    chosen = [card for card in cards if card.used_bytes < BUSY_BYTES] if several else cards[:1]
    free = min((less_margin(card.free_bytes, "cuda", f"card {card.index}") for card in chosen), default=0)
    return Room(
        device="cuda",
        cards=tuple(chosen),
        memory_bytes=free,
        # What the driver keeps for itself is in no total that CUDA tells.
        used_bytes=chosen[0].used_bytes if chosen else 0,
        environment=card_environment(chosen),
    )


def card_environment(cards: Sequence[Card]) -> dict[str, str]:
    """The variables under which a child sees these cards alone, in their order."""
    visible = ",".join(card.uuid or str(card.physical_index if card.physical_index is not None else card.index)
                       for card in cards)  # fmt: skip
    return {
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # As written runs set it.
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    }


def less_margin(free: int, device: str, where: str) -> int:
    """Of ``free`` bytes, what a probe may take.

    Raises:
        EnvironmentLacks: nothing.
    """
    left = free - max(MARGIN_BYTES, int(MARGIN_SHARE[device] * free))
    if left <= 0:
        raise EnvironmentLacks(f"{where} has {free / GIB:.1f} GiB free, of which a probe leaves {MARGIN_BYTES // GIB};"
                               " nothing is measured")  # fmt: skip
    return left


def check_job(job: Job, *, whole: bool = False) -> None:
    """Raise for a job that no probe runs, whatever the model.

    Raises:
        UsageError: what it would have to be.
    """
    if job.trainer not in TRAINERS:
        raise UsageError(
            f"--trainer {job.trainer}: random weights generate no answers of a known length; a probe runs"
            f" {', '.join(TRAINERS)}, and --rates measures the machine"
        )
    if not whole and job.seq_len < 2 * LEAST_TOKENS:
        raise UsageError(f"--seq-len {job.seq_len}: a probe needs rows of {2 * LEAST_TOKENS} tokens or more")


def check_probed(inputs: PlanInput, choice: Choice) -> None:
    """Raise where no probe can run the job.

    Raises:
        UsageError: what and why.
    """
    if choice.method == "qlora":
        raise UsageError("--method qlora: random weights are not quantised; probe --method lora, or --rates")
    if choice.precision != "bf16":
        raise UsageError(f"--pin precision={choice.precision}: a probe measures bf16; try it with --route")
    if inputs.architecture.remote_code:
        raise UsageError(f"model {inputs.architecture.model}: code of its own is not run by a probe; --rates measures")
    if not inputs.architecture.config:
        raise UsageError(f"model {inputs.architecture.model}: there is no config.json to build it from")


def job_cells(inputs: PlanInput, choice: Choice) -> list[dict[str, int]]:
    """Two depths at two lengths, the job's own and half of it; the smallest first.

    Raises:
        UsageError: the model has no two depths.
    """
    length = inputs.job.seq_len
    depths = probe_depths(inputs.architecture, choice.recompute)
    if depths[0] == depths[1]:
        raise UsageError(
            f"model {inputs.architecture.model}: {depths[0]} layers of different kinds leave no second depth; --whole"
            " runs all of it"
        )
    return [{"layers": layers, "sequence": tokens} for layers in depths for tokens in (length // 2, length)]


def run_spec(inputs: PlanInput, choice: Choice) -> RunSpec:
    """The run that would be written."""
    return RunSpec(
        job=inputs.job,
        choice=choice,
        architecture=inputs.architecture,
        stack=inputs.stack,
        machine=inputs.machine,
        plan_json="",
        python=inputs.stack.python,
    )


def job_request(
    inputs: PlanInput,
    choice: Choice,
    room: Room,
    cells: list[dict[str, int]],
    *,
    limit_s: float,
    whole: bool = False,
) -> dict[str, Any]:
    """What ``measure_job.py`` is asked.

    Args:
        inputs: job, model and stack.
        choice: one rank's knobs.
        room: device and limit.
        cells: depths and lengths.
        limit_s: no cell is begun that would not be done by then.
        whole: the plan itself, three steps of it.

    Raises:
        UsageError: a setting that no run could be written with.
    """
    job, spec = inputs.job, run_spec(inputs, choice)
    arguments = {name: value for section in config_sections(spec) for name, value in section.values.items()}
    loading = arguments.pop("model_init_kwargs")
    assert isinstance(loading, dict)
    for name in ("eval_strategy", "eval_steps", "per_device_eval_batch_size", "save_steps", "save_total_limit"):
        arguments.pop(name, None)
    rope = yarn(spec)
    changes = {"rope_parameters": rope, "max_position_embeddings": job.seq_len} if rope is not None else {}
    pair = rows_per_example(job.trainer)
    return {
        "trainer": CLASSES[job.trainer],
        "device": room.device,
        "memory_bytes": room.memory_bytes,
        "used_bytes": room.used_bytes,
        "config": inputs.architecture.config,
        "config_changes": changes,
        "dtype": loading["dtype"],
        "attention": choice.attention,
        "lora": adapter_settings(job) if choice.method != "full" else None,
        "arguments": arguments,
        "rows": choice.micro_batch,
        "rows_per_example": pair,
        "ragged": not job.data.packing and choice.micro_batch * pair > 1,
        "packing": choice.packing,
        "cells": cells,
        "warm_steps": 1 if whole else WARM_STEPS,
        "timed_steps": WHOLE_STEPS - 1 if whole else TIMED_STEPS[room.device],
        # One clock for all processes of the machine; loading torch counts too.
        "deadline": time.monotonic() + limit_s - HANDING_OVER_S,
        "rounds": 1 if whole else ROUNDS[room.device],
    }


def job_facts(problem: Problem, choice: Choice) -> dict[str, Any]:
    """What a measurement is found by again."""
    memory, architecture = problem.judge.memory, problem.inputs.architecture
    options = memory.activation_options(choice)
    return {
        "model": architecture.model,
        "trainer": problem.inputs.job.trainer,
        "scored_beside": scored_beside(problem.inputs.job),
        "shape": shape_hash(architecture),
        "vocab": architecture.vocab,
        "tied": architecture.tied,
        "options": option_key(architecture, options),
        "lora_r": options.lora_r,
        "choice": choice.to_json(),
    }


def said_beforehand(problem: Problem, choice: Choice, cells: list[dict[str, int]], steps: int) -> tuple[int, float]:
    """(bytes that the largest cell is thought to take on its device, seconds that all are thought to take)."""
    memory, seconds, most = problem.judge.memory, START_S, 0
    for cell in cells:
        small = first_layers(memory.job.architecture, cell["layers"])
        model = MemoryModel(
            job=replace(memory.job, architecture=small, seq_len=cell["sequence"]),
            hardware=memory.hardware,
            reserve=memory.reserve,
            source=memory.source,
        )
        most = max(most, model.estimate(choice).device_bytes)
        time = replace(problem.judge.time, job=model.job, measured=None).estimate(choice)
        seconds += steps * time.step_s if time else 0.0
    return most, seconds
