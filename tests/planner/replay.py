"""Replay of recorded runs: a row of tests/planner/data becomes the planner's own values, nothing asked of the machine.

Every reading of what a source leaves open is here, so that tests, benchmarks and docs/accuracy.md tell one story.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from planner.architecture import Architecture
from planner.choice import Choice
from planner.coefficients import Coefficients
from planner.config_reader import read_architecture
from planner.formula import ActivationOptions, formula_coefficients
from planner.hardware import Hardware
from planner.job import Job
from planner.machine import Card, Machine
from planner.memory import MemoryEstimate, MemoryJob, MemoryModel
from planner.problem import PlanInput, Problem, make_problem
from planner.stack import Stack
from planner.step_time import TimeEstimate
from profiles.cards import find_card
from profiles.models import find_model

DATA = Path(__file__).with_name("data")
Row = dict[str, Any]

BF16_UNDER_FSDP2 = "its own accelerate config says mixed_precision bf16, so FSDP2 holds fp32 shards"
READINGS: dict[str, tuple[dict[str, str], str]] = {
    "trl-long-qwen8b-1m-8xh100": ({"mixed_precision": "bf16"}, BF16_UNDER_FSDP2),
    "trl-long-qwen8b-1m-nooffload-oom": ({"mixed_precision": "bf16"}, BF16_UNDER_FSDP2),
    "acc-fsdp2-fixed": ({"mixed_precision": "bf16"}, "the benchmark's script says mixed_precision bf16"),
}
"""Row id -> knobs that the row leaves out and its source states, and where."""


@cache
def rows(name: str) -> tuple[Row, ...]:
    """All rows of ``data/NAME.jsonl``."""
    text = (DATA / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines() if line)


@cache
def bundled(model_id: str) -> Architecture:
    """A bundled model's architecture."""
    model = find_model(model_id)
    assert model is not None, f"{model_id} is not bundled"
    return read_architecture(model.config, model=model.name, origin="bundled")


def named_machine(spec: str, nodes: int = 1) -> Machine:
    """``8xH100-80GB`` as a machine nobody else uses."""
    count, _, name = spec.partition("x")
    profile = find_card(name)
    cards = [
        Card(
            index=index,
            name=profile.product_name,
            card_id=profile.id,
            total_bytes=profile.nvml_bytes,
            free_bytes=profile.nvml_bytes,
            compute_capability=profile.compute_capability,
            nvlink_peers=[i for i in range(int(count)) if i != index and profile.nvlink == "all"],
        )
        for index in range(int(count))
    ]
    return Machine(origin="named", spec=spec, cards=cards, nodes=nodes)


def inputs_of(
    job: dict[str, Any], *, stack: dict[str, str] | None = None, nodes: int = 1, machine: Machine | None = None
) -> PlanInput:
    """Everything resolved for a job, on the machine that it names unless another is given."""
    parsed = Job.model_validate({**job, "nodes": nodes})
    cards = machine.usable_cards if machine else None
    named = parsed.machine.partition("x")[2] if cards is None else (cards[0].card_id if cards else None)
    return PlanInput(
        job=parsed,
        machine=machine or named_machine(parsed.machine, nodes),
        stack=Stack(versions=stack or {}),
        architecture=bundled(parsed.model),
        profile=find_card(named) if named else None,
        source=formula_coefficients,
    )


def problem_of(
    job: dict[str, Any], *, stack: dict[str, str] | None = None, nodes: int = 1, machine: Machine | None = None
) -> Problem:
    """The planner's view of a job."""
    return make_problem(inputs_of(job, stack=stack, nodes=nodes, machine=machine))


def choice_of(row: Row) -> Choice:
    """The knobs of a row; what it leaves out is what its library did by default."""
    job = row["job"]
    pins = {knob: value for knob, value in job["pins"].items() if value is not None}
    pins |= READINGS.get(row["id"], ({}, ""))[0]
    gpus = int(job["machine"].partition("x")[0])
    sharding, cp, sp = pins["sharding"], pins.get("cp", 1), pins.get("sp", 1)
    ranks = gpus // (cp * sp)
    replicated = sharding in ("none", "ddp")
    return Choice(
        method=job["method"],
        loss_path=pins["loss_path"],
        recompute=pins["recompute"],
        offload=frozenset(pins["offload"]),
        sharding=sharding,
        cp=cp,
        sp=sp,
        dp_shard=1 if replicated else ranks,
        dp_replicate=ranks if replicated else 1,
        micro_batch=pins["micro_batch"],
        grad_accum=pins["grad_accum"],
        optimizer=pins["optimizer"],
        weights=pins["weights"],
        # Autocast over bf16 weights changes nothing on one card; over several it would make fp32 shards of them, which
        # the published peaks of pure bf16 runs exclude.
        mixed_precision=pins.get("mixed_precision", "bf16" if sharding == "none" else "no"),
        attention=pins["attention"],
        packing=job.get("data", {}).get("packing", False),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One measured row beside what the planner says of it."""

    row: Row
    choice: Choice
    memory: MemoryEstimate
    time: TimeEstimate | None

    @property
    def single_gpu(self) -> bool:
        """One rank only."""
        return self.choice.num_gpus == 1

    @property
    def predicted_bytes(self) -> int:
        """The metric that the row measured; rows that do not say which are compared with allocated."""
        reserved = self.row["measured"].get("metric") == "max_reserved"
        return self.memory.reserved_bytes if reserved else self.memory.allocated_bytes

    @property
    def error(self) -> float | None:
        """Predicted over seen less one, None where the row holds no bytes."""
        seen = self.row["measured"].get("bytes")
        return None if seen is None else self.predicted_bytes / seen - 1

    @property
    def seen_step_s(self) -> float | None:
        """Seconds per step as recorded, or from tokens per second."""
        measured, c = self.row["measured"], self.choice
        if "step_s" in measured:
            return float(measured["step_s"])
        if "tokens_per_s_per_gpu" not in measured:
            return None
        tokens = self.row["job"]["seq_len"] * c.micro_batch * c.grad_accum / (c.cp * c.sp)
        return float(tokens / measured["tokens_per_s_per_gpu"])


def measured_problem(row: Row, seq_len: int | None = None) -> Problem:
    """The planner's view of a measured row, at another length if asked.

    Published rows are benchmarks with rows of one length, so no padding mask is made.
    """
    job = {key: value for key, value in row["job"].items() if key not in ("pins", "stack")}
    problem = problem_of(job | ({"seq_len": seq_len} if seq_len else {}), stack=row["job"]["stack"])
    model = problem.judge.memory
    model.job = problem.judge.time.job = replace(model.job, padded=False)
    return problem


def replay(row: Row, seq_len: int | None = None) -> Replay:
    """What the planner says of a measured row."""
    problem, choice = measured_problem(row, seq_len), choice_of(row)
    memory = problem.judge.memory.estimate(choice)
    return Replay(row=row, choice=choice, memory=memory, time=problem.judge.time.estimate(choice))


def longest_length(row: Row, optimizer: str | None = None) -> int:
    """The longest multiple of 512 tokens whose predicted peak the whole card holds, reserve and interval aside.

    Args:
        row: a measured row.
        optimizer: another than the row's.
    """
    choice = choice_of(row) if optimizer is None else replace(choice_of(row), optimizer=optimizer)
    low, high = 2, 2**12
    while high - low > 1:
        middle = (low + high) // 2
        memory = measured_problem(row, middle * 512).judge.memory.estimate(choice)
        assert memory.capacity_bytes is not None
        low, high = (middle, high) if memory.device_bytes <= memory.capacity_bytes else (low, middle)
    return low * 512


H100_WITHOUT_RATES = Hardware(
    device="cuda",
    name="H100-80GB",
    gpus_per_node=1,
    capacity_bytes=80 * 2**30,
    compute_capability="9.0",
    matmul_flops=None,
    fp32_flops=None,
    bandwidth=None,
    link=None,
    host_link=None,
)


def cpu_kernel_coefficients(architecture: Architecture, options: ActivationOptions) -> Coefficients:
    """Closed forms as the traces saw them: the CPU's attention kernel reads the mask and makes no bias of it."""
    return formula_coefficients(architecture, replace(options, mask_bias=False))


def traced_model(row: Row) -> MemoryModel:
    """The memory model of a traced row."""
    job, lora = row["job"], row["job"].get("lora", {})
    targets = lora.get("target_modules", "all-linear")
    return MemoryModel(
        job=MemoryJob(
            architecture=read_architecture(row["config"], model=row["id"], origin="config.json"),
            seq_len=job["seq_len"],
            lora_r=lora.get("r", 16),
            lora_targets=targets if isinstance(targets, str) else tuple(targets),
            padded=False,
        ),
        hardware=H100_WITHOUT_RATES,
        reserve=0.05,
        source=cpu_kernel_coefficients,
    )


def tensor_bytes(memory: MemoryEstimate) -> dict[str, int]:
    """Phase -> bytes of tensors alone: without the context and the allocator's slack."""
    return {phase.name: phase.bytes - phase.parts["context"] - phase.parts["slack"] for phase in memory.phases}


def traced_peak(row: Row) -> int:
    """Predicted bytes of tensors at the highest phase of a traced row."""
    return max(tensor_bytes(traced_model(row).estimate(choice_of(row))).values())


def eager_peak(row: Row) -> int:
    """The predicted peak without the prefetched layer, which an eager trace never gathers ahead.

    ``layer_gather`` holds two layers in the compute dtype, the one in use and the next; of each phase that has it, half
    is taken out.
    """
    model, choice = traced_model(row), choice_of(row)
    one_layer = 0 if choice.sharding == "fsdp_no_reshard" else max(model.shard_of(choice).layer_gather) // 2
    tensors = tensor_bytes(model.estimate(choice))
    return max(size - (one_layer if name in ("forward", "backward") else 0) for name, size in tensors.items())


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie, by nearest rank from above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
