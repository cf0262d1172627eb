"""Problem: a resolved job turned into the models, rules and space that the search works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from planner.architecture import Architecture
from planner.choice import ZERO, Attention, Choice, LossPath, Method
from planner.formula import formula_coefficients
from planner.hardware import Hardware
from planner.job import Job
from planner.machine import Machine
from planner.machine_hardware import cpu_hardware, gpu_hardware
from planner.memory import CoefficientSource, MemoryJob, MemoryModel
from planner.pins import parse_pins
from planner.rules import build_context
from planner.search import Judge
from planner.space import SpaceOptions
from planner.stack import Stack
from planner.step_time import TimeModel
from profiles.cards import CardProfile
from profiles.releases import trl_release

PREFERENCE_PAIRS = ("dpo", "reward")
"""Trainers whose rows hold two sequences, chosen and rejected (trl/trainer/dpo_trainer.py, reward_trainer.py)."""
REFERENCE_TRAINERS = ("dpo", "kto", "rloo")
"""Trainers that hold a frozen reference model unless adapters serve as the difference (GRPO's beta defaults to 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """Everything resolved: what `make_plan` needs and nothing else."""

    job: Job
    machine: Machine
    stack: Stack
    architecture: Architecture
    profile: CardProfile | None = None
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Job field -> where its value came from (`--seq-len`, `job.yaml`, `default`)."""
    source: CoefficientSource = formula_coefficients
    top: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One job on one machine, ready to be searched."""

    inputs: PlanInput
    hardware: Hardware
    judge: Judge
    options: SpaceOptions


def hardware_of(inputs: PlanInput, pins: Mapping[str, Any]) -> Hardware:
    """The machine as the models read it; a machine without usable cards trains on its CPU."""
    if inputs.machine.usable_cards:
        return gpu_hardware(inputs.machine, inputs.profile)
    processes = pins.get("gpus")
    if processes is None:
        sizes = [pins[knob] for knob in ("cp", "sp", "tp", "dp_shard", "dp_replicate") if knob in pins]
        processes = 1
        for size in sizes:
            processes *= size
    return cpu_hardware(inputs.machine, processes)


def memory_job(job: Job, architecture: Architecture, stack: Stack) -> MemoryJob:
    """What the memory of every candidate depends on besides its choice."""
    targets = job.lora.target_modules
    release = trl_release(stack.versions.get("trl", ""))
    return MemoryJob(
        architecture=architecture,
        seq_len=job.seq_len,
        lora_r=job.lora.r,
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        lora_dropout=job.lora.dropout > 0,
        quantization=job.quantization,
        rows_per_sequence=2 if job.trainer in PREFERENCE_PAIRS else 1,
        padded=not job.data.packing,
        reference_model=job.trainer in REFERENCE_TRAINERS and job.method == "full",
        scores_vocabulary=job.trainer != "reward",
        full_logits_bytes=release.nll_bytes_per_logit,
        full_logits_bytes_batched=release.nll_bytes_per_logit_batched,
    )


def space_options(
    job: Job, architecture: Architecture, stack: Stack, hardware: Hardware, pins: dict[str, Any]
) -> SpaceOptions:
    """What bounds the space for ``job``."""
    release = trl_release(stack.versions.get("trl", ""))
    loss_paths = tuple(p for p in release.loss_paths_for(job.trainer) if p != "liger" or stack.has("liger-kernel"))
    # Where the stack has a path without full logits, that path is never worse; full logits stay for pins.
    if len(loss_paths) > 1 and loss_paths[0] != "full_logits":
        loss_paths = tuple(p for p in loss_paths if p != "full_logits")
    attentions: list[Attention] = ["sdpa"]
    if any(kind.attention_softcap or kind.attention_sinks for kind in architecture.kinds):
        attentions = ["eager"]
    if hardware.device == "cuda" and (stack.has("flash-attn") or stack.has("kernels")):
        attentions.append("flash_attention_2")
    eight_bit: list[str] = []
    if hardware.device == "cuda" and stack.has("bitsandbytes"):
        eight_bit.append("adamw_bnb_8bit")
    elif stack.has("torchao"):
        eight_bit.append("adamw_torch_8bit")
    return SpaceOptions(
        method=job.method,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        packing=job.data.packing,
        loss_paths=cast("tuple[LossPath, ...]", loss_paths),
        attentions=tuple(attentions),
        optimizers_8bit=tuple(eight_bit),
        allow_numerics="numerics" in job.allow,
        pins=pins,
    )


def make_problem(inputs: PlanInput) -> Problem:
    """Models, rules and space for ``inputs``.

    Raises:
        planner.pins.PinError: a pin names no knob or no value of it.
    """
    job, architecture, stack = inputs.job, inputs.architecture, inputs.stack
    pins = parse_pins(job.pins)
    hardware = hardware_of(inputs, pins)
    shared = memory_job(job, architecture, stack)
    memory = MemoryModel(job=shared, hardware=hardware, reserve=job.reserve, source=inputs.source)
    rules = build_context(
        job,
        architecture,
        stack,
        device=hardware.device,
        gpus_per_node=hardware.gpus_per_node,
        compute_capability=hardware.compute_capability,
    )
    judge = Judge(
        memory=memory,
        time=TimeModel(job=shared, hardware=hardware, blocks_of=memory.blocks),
        rules=rules,
        hardware=hardware,
    )
    options = space_options(job, architecture, stack, hardware, pins)
    return Problem(
        inputs=inputs,
        hardware=hardware,
        judge=judge,
        options=replace(options, min_micro_batch=rules.min_micro_batch),
    )


def with_job(inputs: PlanInput, **changes: Any) -> PlanInput:
    """The same inputs for a changed job; nested documents are replaced whole."""
    return replace(inputs, job=inputs.job.model_copy(update=changes))


def run_file_names(choice: Choice, nodes: int) -> list[str]:
    """Names of the files that writing this choice makes."""
    names = ["train.py", "accelerate.yaml", "command.sh", "job.yaml", "plan.json"]
    if choice.sharding in ZERO:
        names.insert(2, "deepspeed.json")
    if nodes > 1:
        names.append("slurm.sh")
    return names


def method_label(method: Method) -> str:
    """How a method is called in sentences."""
    return {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}[method]
