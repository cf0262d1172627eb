"""Replay of recorded runs: a row of tests/planner/data becomes the planner's own values, nothing asked of the machine.

Tests, benchmarks and docs/accuracy.md all replay through this module, so that they tell one story.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from planner.architecture import Architecture
from planner.choice import Choice
from planner.config.reader import read_architecture
from planner.hardware import Hardware
from planner.job import Job
from planner.machine import Machine
from planner.memory.coefficients import Coefficients
from planner.memory.coefficients_json import CoefficientDocument, coefficients_of, shape_hash
from planner.memory.formula import ActivationOptions, formula_coefficients
from planner.memory.model import MemoryEstimate, MemoryModel
from planner.memory.parts import CoefficientSource, MemoryJob
from planner.memory.states import RoleTable, trainable_roles
from planner.named_machine import named_machine as machine_of
from planner.problem import PlanInput, Problem, groups_head, layer_work_of, make_problem
from planner.stack import Stack
from planner.time.step import TimeEstimate, nothing_traced
from profiles.cards import find_card
from profiles.coefficients import find_coefficients
from profiles.models import find_model
from tests.planner.readings import readings_of

DATA = Path(__file__).with_name("data")
PROBES = DATA / "probes.jsonl"
Row = dict[str, Any]

Tier = Literal["formula", "best", "probed"]
"""Where coefficients come from: closed forms alone; what a plan finds without asking a training Python, bundled traces
before closed forms; the same once `trlfit probe` has traced what the row asks for."""
TIERS: tuple[Tier, ...] = get_args(Tier)


@cache
def _bundled_document(shape: str) -> CoefficientDocument | None:
    data = find_coefficients(shape)
    return None if data is None else CoefficientDocument.from_json(data)


@cache
def probed_documents() -> dict[str, CoefficientDocument]:
    """Shape -> what `trlfit probe` said of it, as recorded."""
    lines = PROBES.read_text(encoding="utf-8").splitlines() if PROBES.is_file() else []
    documents = [CoefficientDocument.from_json(json.loads(line)) for line in lines]
    return {document.shape: document for document in documents}


def bundled_coefficients(architecture: Architecture, options: ActivationOptions) -> Coefficients:
    """Bundled traces, else closed forms: what a plan without a trace of its own is made of."""
    document = _bundled_document(shape_hash(architecture))
    found = None if document is None else coefficients_of(document, architecture, options, [])
    return found or formula_coefficients(architecture, options)


def probed_coefficients(architecture: Architecture, options: ActivationOptions) -> Coefficients:
    """Bundled traces, recorded probes, else closed forms."""
    found = bundled_coefficients(architecture, options)
    document = probed_documents().get(shape_hash(architecture))
    if found.evidence == "formula" and document is not None:
        found = coefficients_of(document, architecture, options, []) or found
    return found


SOURCES: dict[Tier, CoefficientSource] = {
    "formula": formula_coefficients,
    "best": bundled_coefficients,
    "probed": probed_coefficients,
}


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
    return machine_of(find_card(name), int(count), nodes)


def inputs_of(
    job: dict[str, Any],
    *,
    stack: dict[str, str] | None = None,
    nodes: int = 1,
    machine: Machine | None = None,
    architecture: Architecture | None = None,
) -> PlanInput:
    """Everything resolved for a job, on the machine and for the bundled model that it names unless others are given."""
    parsed = Job.model_validate({**job, "nodes": nodes})
    cards = machine.usable_cards if machine else None
    named = parsed.machine.partition("x")[2] if cards is None else (cards[0].card_id if cards else None)
    return PlanInput(
        job=parsed,
        machine=machine or named_machine(parsed.machine, nodes),
        stack=Stack(versions=stack or {}),
        architecture=architecture or bundled(parsed.model),
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
    for reading in readings_of(row["id"]):
        pins |= reading.pins
    gpus = int(job["machine"].partition("x")[0]) * job.get("nodes", 1)
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
        dp_shard=pins.get("dp_shard", 1 if replicated else ranks // pins.get("dp_replicate", 1)),
        dp_replicate=pins.get("dp_replicate", ranks if replicated else ranks // pins.get("dp_shard", ranks)),
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
        mean = next((r.mean_tokens for r in readings_of(self.row["id"]) if r.mean_tokens), None)
        tokens = (mean or self.row["job"]["seq_len"]) * c.micro_batch * c.grad_accum / (c.cp * c.sp)
        return float(tokens / measured["tokens_per_s_per_gpu"])


@dataclass
class ReadMemory(MemoryModel):
    """Memory under readings of a source that no knob can say."""

    adapters_fp32: bool = False
    residual_fp32: bool = False

    def roles(self, choice: Choice) -> RoleTable:
        """As planned, adapters in fp32 where they are read so."""
        table = super().roles(choice)
        if not self.adapters_fp32:
            return table
        return replace(table, adapters=trainable_roles(replace(choice, method="lora"), adapter=True))

    def activation_options(self, choice: Choice) -> ActivationOptions:
        """As planned, in the dtypes that are read."""
        options = super().activation_options(choice)
        return replace(
            options,
            adapter_bytes=4 if self.adapters_fp32 else options.adapter_bytes,
            residual_bytes=4 if self.residual_fp32 else options.residual_bytes,
        )


def measured_problem(row: Row, seq_len: int | None = None, tier: Tier = "best") -> Problem:
    """The planner's view of a measured row, at another length if asked.

    Published rows are benchmarks with rows of one length, so no padding mask is made unless a row or a reading says
    ``padded``; none says that it ran with expandable segments, which written runs do. A row may state its model's
    ``config``; without it the model is a bundled one.
    """
    job = {key: value for key, value in row["job"].items() if key not in ("pins", "stack")}
    readings = readings_of(row["id"])
    model = job.setdefault("model", row["id"])
    for reading in readings:
        if reading.lora_dropout is not None:
            job["lora"] = job["lora"] | {"dropout": reading.lora_dropout}
    config = row.get("config")
    inputs = inputs_of(
        job | ({"seq_len": seq_len} if seq_len else {}),
        stack=row["job"].get("stack", {}),
        nodes=job.get("nodes", 1),
        architecture=None if config is None else read_architecture(config, model=model, origin="config.json"),
    )
    problem = make_problem(inputs)
    planned = problem.judge.memory
    memory = ReadMemory(
        job=replace(
            planned.job,
            padded=row.get("padded", False) or any(reading.padded for reading in readings),
            expandable_segments=row.get("expandable_segments", False),
        ),
        hardware=planned.hardware,
        reserve=planned.reserve,
        source=SOURCES[tier],
        adapters_fp32=any(reading.adapters_fp32 for reading in readings),
        residual_fp32=any(reading.residual_fp32 for reading in readings),
    )
    mean = next((reading.mean_tokens for reading in readings if reading.mean_tokens), None)
    time = replace(
        problem.judge.time,
        job=replace(memory.job, seq_len=mean) if mean and not seq_len else memory.job,
        layer_work=nothing_traced if any(r.fused_adapters for r in readings) else layer_work_of(memory),
    )
    return replace(problem, judge=replace(problem.judge, memory=memory, time=time))


def replay(row: Row, seq_len: int | None = None, tier: Tier = "best") -> Replay:
    """What the planner says of a measured row."""
    problem, choice = measured_problem(row, seq_len, tier), choice_of(row)
    memory = problem.judge.memory.estimate(choice)
    return Replay(row=row, choice=choice, memory=memory, time=problem.judge.time.estimate(choice))


def longest_length(row: Row, *, first_step: bool | None = None, tier: Tier = "best") -> int:
    """The longest multiple of 512 tokens whose predicted peak the whole card holds, reserve and interval aside.

    Args:
        row: a measured row.
        first_step: no states of AdamW yet, as under an optimizer without any; None is as the row is read.
        tier: where coefficients come from.
    """
    if first_step is None:
        first_step = any(reading.first_step for reading in readings_of(row["id"]))
    choice = replace(choice_of(row), optimizer="sgd") if first_step else choice_of(row)
    low, high = 2, 2**12
    while high - low > 1:
        middle = (low + high) // 2
        problem = measured_problem(row, middle * 512, tier)
        memory = problem.judge.memory.estimate(choice)
        assert memory.capacity_bytes is not None
        usable = memory.capacity_bytes - problem.judge.memory.hardware.others_bytes(choice.num_gpus)
        low, high = (middle, high) if memory.device_bytes <= usable else (low, middle)
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


def as_traced(row: Row, options: ActivationOptions) -> ActivationOptions:
    """``options`` with the attention kernels that a traced row ran: a CPU's unless it says whose."""
    return replace(options, mask_bias=row.get("kernels") == "cuda")


def traced_model(row: Row, tier: Tier = "formula") -> MemoryModel:
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
            head_in_tail_group=groups_head(Stack(versions=job.get("stack", {}))),
        ),
        hardware=H100_WITHOUT_RATES,
        reserve=0.05,
        source=lambda architecture, options: SOURCES[tier](architecture, as_traced(row, options)),
    )


def tensor_bytes(memory: MemoryEstimate) -> dict[str, int]:
    """Phase -> bytes of tensors alone: without the context and the allocator's slack."""
    return {phase.name: phase.bytes - phase.parts["context"] - phase.parts["slack"] for phase in memory.phases}


def traced_peak(row: Row, tier: Tier = "formula") -> int:
    """Predicted bytes of tensors at the highest phase of a traced row."""
    return max(tensor_bytes(traced_model(row, tier).estimate(choice_of(row))).values())


def traced_evidence(row: Row, tier: Tier) -> str:
    """What the prediction of a traced row rests on."""
    return traced_model(row, tier).estimate(choice_of(row)).evidence


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie, by nearest rank from above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
