"""Plan: the `trlfit.plan/1` document as a typed model, for its JSON Schema and for reading plan.json back."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.job import Job
from planner.machine import Machine
from planner.stack import Stack


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", serialize_by_alias=True, populate_by_name=True)


class PlannedJob(Job):
    """The job as resolved, with where each value came from."""

    origin: dict[str, str] = Field(default_factory=dict, description="Field -> default, file name or flag.")


class Knobs(_Document):
    """One value for every knob."""

    method: Literal["full", "lora", "qlora"]
    loss_path: Literal["full_logits", "chunked_fp32", "chunked", "fused", "liger"]
    recompute: Literal["none", "full", "selective", "every_2", "every_3", "every_4"]
    offload: list[Literal["activations", "optimizer", "params"]]
    sharding: Literal["none", "ddp", "fsdp", "fsdp_no_reshard", "hsdp", "zero1", "zero2", "zero3", "fsdp1"]
    cp: int = Field(ge=1)
    sp: int = Field(ge=1)
    tp: int = Field(ge=1)
    dp_shard: int = Field(ge=1)
    dp_replicate: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    grad_accum: int = Field(ge=1)
    optimizer: str
    weights: Literal["fp32", "bf16", "fp16"]
    mixed_precision: Literal["bf16", "fp16", "no"]
    attention: Literal["sdpa", "flash_attention_2", "eager"]
    precision: str
    packing: bool


class HostBytes(_Document):
    """Host memory of one node that offload takes."""

    pinned: int
    pageable: int


class PhaseBytes(_Document):
    """One phase at its worst moment."""

    name: Literal["load", "forward", "loss", "backward", "step", "save"]
    bytes: int
    parts: dict[str, int] = Field(description="Part -> bytes; parts of size zero are left out.")


class RoleBytes(_Document):
    """Bytes per parameter of the five roles, and the ranks each is divided by."""

    weights: float
    gradients: float
    master: float
    moment1: float
    moment2: float
    divided_by: dict[str, int]


class Memory(_Document):
    """Peak bytes of one GPU."""

    allocated_bytes: int = Field(description="Comparable with torch.cuda.max_memory_allocated().")
    reserved_bytes: int = Field(description="Comparable with torch.cuda.max_memory_reserved().")
    device_bytes: int = Field(description="Comparable with what NVML shows as used by the process.")
    host_bytes: HostBytes
    capacity_bytes: int | None
    headroom_bytes: int | None = Field(description="Capacity less the reserve, other processes and device_bytes.")
    low_bytes: int = Field(description="Lower end of the interval of allocated_bytes.")
    high_bytes: int
    peak_phase: str
    evidence: Literal["formula", "traced", "measured"]
    phases: list[PhaseBytes]
    roles: dict[str, RoleBytes] = Field(description="Per fate of a parameter: trained, frozen, quantised, adapters.")


class Time(_Document):
    """Seconds of one optimizer step."""

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    parts: dict[str, float]
    evidence: Literal["formula", "traced", "measured"]


class PlannedCandidate(_Document):
    """One judged choice."""

    choice: Knobs
    alters: Literal["nothing", "numerics", "method"]
    fits: bool
    num_gpus: int
    cards: list[int] = Field(description="Indices of the cards of one node that the run would use.")
    memory: Memory
    time: Time | None
    why: list[str]
    files: list[str]
    warnings: list[str]


class Rejected(_Document):
    """Combinations that one rule refused."""

    count: int
    example: str
    choice: Knobs


class PlannedChange(_Document):
    """An alteration that would fit, or help; never made by itself."""

    lever: str
    alters: Literal["nothing", "numerics", "method"]
    flags: str = Field(description="What to add to the command line.")
    sentence: str
    candidate: PlannedCandidate


class StairStep(_Document):
    """The longest sequence with one more lever allowed."""

    lever: str
    tokens: int
    choice: Knobs | None


class Parameters(_Document):
    """Exact counts, tied weights once."""

    total: int
    trainable: int
    adapters: int
    active: int


class PlannedArchitecture(_Document):
    """Shapes read from config.json."""

    model: str
    model_type: str
    origin: str
    parameters: Parameters
    groups: dict[str, int]
    layers: int
    layer_kinds: list[str]
    hidden: int
    vocab: int
    tied: bool
    max_positions: int
    notes: list[str]


class Plan(_Document):
    """What `trlfit plan --json` prints. Same inputs, same bytes."""

    schema_: Literal["trlfit.plan/1"] = Field(alias="schema")
    job: PlannedJob
    machine: Machine
    stack: Stack
    architecture: PlannedArchitecture
    best: PlannedCandidate | None
    candidates: list[PlannedCandidate]
    near_misses: list[PlannedCandidate]
    rejected: dict[str, Rejected]
    changes: list[PlannedChange]
    judged: int = Field(description="Candidates whose memory was simulated.")
    longest: int | None = Field(default=None, description="Goal longest: tokens.")
    staircase: list[StairStep] | None = None

    def job_alone(self) -> Job:
        """The job without origins."""
        data: dict[str, Any] = self.job.model_dump(mode="json", exclude={"origin"})
        return Job.model_validate(data)
