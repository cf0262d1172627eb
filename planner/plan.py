"""Plan: the `trlfit.plan/1` document as a typed model, for its JSON Schema and for reading plan.json back."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from planner.job import MAX_GLOBAL_BATCH, Job
from planner.machine import Machine
from planner.memory.optimizers import find_optimizer
from planner.stack import Stack

MAX_RANKS = 2**20


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", serialize_by_alias=True, populate_by_name=True)


class PlannedJob(Job):
    """The job as resolved, with where each value came from."""

    origin: dict[str, str] = Field(default_factory=dict, description="Field -> default, file name, flag, or planner.")


class Knobs(_Document):
    """One value for every knob."""

    method: Literal["full", "lora", "qlora"]
    loss_path: Literal["full_logits", "chunked_fp32", "chunked", "fused", "liger"]
    recompute: Literal["none", "full", "selective", "every_2", "every_3", "every_4"]
    offload: list[Literal["activations", "optimizer", "params"]]
    sharding: Literal["none", "ddp", "fsdp", "fsdp_no_reshard", "hsdp", "zero1", "zero2", "zero3", "fsdp1"]
    cp: int = Field(ge=1, le=MAX_RANKS)
    sp: int = Field(ge=1, le=MAX_RANKS)
    tp: int = Field(ge=1, le=MAX_RANKS)
    dp_shard: int = Field(ge=1, le=MAX_RANKS)
    dp_replicate: int = Field(ge=1, le=MAX_RANKS)
    micro_batch: int = Field(ge=1, le=MAX_GLOBAL_BATCH)
    grad_accum: int = Field(ge=1, le=MAX_GLOBAL_BATCH)
    optimizer: str
    weights: Literal["fp32", "bf16", "fp16"]
    mixed_precision: Literal["bf16", "fp16", "no"]
    attention: Literal["sdpa", "flash_attention_2", "eager"]
    precision: str
    packing: bool

    @field_validator("optimizer")
    @classmethod
    def _optimizer_is_known(cls, value: str) -> str:
        find_optimizer(value)
        return value


class HostBytes(_Document):
    """Host memory of one node."""

    pinned: int = Field(description="Page-locked for offload while training.")
    pageable: int = Field(description="Not page-locked, for offload while training.")
    load: int = Field(description="Copies of weights while the model is loaded.")
    save: int = Field(description="Gathered for a checkpoint, beside what training holds.")
    processes: int = Field(description="The Python processes before they load a model.")
    peak: int = Field(description="The most at any time.")


class PhaseBytes(_Document):
    """One phase at its worst moment."""

    name: Literal["load", "forward", "loss", "backward", "step", "evaluate", "save"]
    bytes: int
    parts: dict[str, int] = Field(description="Part -> bytes; parts of size zero are left out.")


class RoleBytes(_Document):
    """Bytes per parameter of the five roles, and the ranks each is divided by."""

    weights: float
    gradients: float
    master: float
    moment1: float
    moment2: float
    whole_weights: float = Field(
        default=0, description="Of the weights, what every rank keeps whole: a 4-bit base's scales."
    )
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
    steps: int | None = Field(default=None, description="Optimizer steps of the whole run.")
    finish_s: float | None = Field(default=None, description="Seconds of the whole run, data and saving left out.")
    gpu_hours: float | None = None
    energy_kwh: float | None = Field(
        default=None, description="At most: the power limit of every card of the run for as long as it takes."
    )
    cost: float | None = Field(default=None, description="GPU-hours times price_per_hour of the job.")
    unknown: str | None = Field(default=None, description="Why the steps are not known.")


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
    flags: str = Field(description="What to add to the command line; in brackets what to drop from it, or to wait for.")
    sentence: str
    candidate: PlannedCandidate


class PlannedRoute(_Document):
    """One precision route below 16 bits, offered or not; never taken by itself."""

    route: str
    name: str
    offered: bool = Field(description="Card, packages and job can run it.")
    why_not: str = Field(description="What keeps it away; empty where it is offered.")
    gain: float | None = Field(description="Share of the best plan's step that it saves; negative is slower.")
    step_s: float | None
    loss: str = Field(description="The price: what is known of the loss against bf16.")


class StairStep(_Document):
    """The longest sequence with one more lever allowed."""

    lever: str
    tokens: int
    device_bytes: int | None = None
    stops: str = Field(default="", description="By what the next length fails.")
    choice: Knobs | None


class PlannedLever(_Document):
    """One change of a knob of the chosen plan, and what it would do."""

    lever: str
    change: str = Field(description="What is set otherwise, in words.")
    alters: Literal["nothing", "numerics", "method"]
    fits: bool
    freed_bytes: int = Field(description="Of the card at the peak; negative where it takes more.")
    extra_s: float | None = Field(description="Seconds per step more; negative where it is faster.")
    extra_share: float | None
    short_bytes: int
    sentence: str
    choice: Knobs


class Binding(_Document):
    """What the chosen plan runs into: the phase of the peak, and what a step waits for."""

    phase: str
    device_bytes: int
    capacity_bytes: int | None
    taken_bytes: int = Field(description="Of the card, by its driver and by other processes.")
    headroom_bytes: int | None
    parts: dict[str, int] = Field(description="Largest parts of that phase.")
    resource: str | None = Field(description="What a step waits for most.")
    resources: dict[str, float] = Field(
        description="Share of the step that waits for compute, memory, link, host_link, launches, host."
    )


class PlannedFix(_Document):
    """The smallest change that makes a near miss fit."""

    change: str
    alters: Literal["nothing", "numerics", "method"]
    freed_bytes: int
    device_bytes: int
    step_s: float | None
    sentence: str
    choice: Knobs


class ExplainedMiss(_Document):
    """By what the near miss of the same position fails."""

    short_bytes: int
    phase: str
    fix: PlannedFix | None = Field(description="None where no one or two changes of a knob are enough.")


class ComparedRelease(_Document):
    """The chosen run under another TRL."""

    trl: str
    loss_path: str
    fits: bool
    extra_bytes: int
    extra_s: float | None
    sentence: str


class LadderRung(_Document):
    """One lever more for a job of which nothing fits."""

    lever: str
    alters: Literal["nothing", "numerics", "method"]
    flags: str = Field(description="What to add to the command line; empty where the planner does it by itself.")
    fits: bool
    device_bytes: int | None
    short_bytes: int | None
    step_s: float | None
    sentence: str
    choice: Knobs | None


class PlannedExplanation(_Document):
    """`trlfit plan --explain`."""

    binds: Binding | None
    levers: list[PlannedLever]
    releases: list[ComparedRelease]
    near_misses: list[ExplainedMiss]
    ladder: list[LadderRung]


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
    routes: list[PlannedRoute] = Field(default=[], description="Precision routes below 16 bits.")
    judged: int = Field(description="Candidates whose memory was simulated.")
    notes: list[str] = Field(default=[], description="What the evidence behind the numbers has to say for itself.")
    longest: int | None = Field(default=None, description="Goal longest: tokens.")
    staircase: list[StairStep] | None = None
    explanation: PlannedExplanation | None = Field(default=None, description="With --explain.")

    def job_alone(self) -> Job:
        """The job without origins."""
        data: dict[str, Any] = self.job.model_dump(mode="json", exclude={"origin"})
        return Job.model_validate(data)
