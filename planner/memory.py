"""Memory: the simulated step of one choice, turned into peaks, an interval and a verdict against the card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.architecture import Architecture
from planner.blocks import Blocks, parameter_blocks
from planner.choice import FSDP2, ZERO, Choice, Method
from planner.coefficients import Coefficients
from planner.device_memory import device_model
from planner.formula import ActivationOptions
from planner.frame import MemoryFrame, Shared, Verdict
from planner.hardware import Hardware
from planner.loss_memory import LossBytes, loss_bytes
from planner.phases import (
    ActivationsAt,
    HeldBytes,
    Phase,
    States,
    activations_at,
    held_bytes,
    resident_states,
)
from planner.sharding_memory import ShardingBytes, sharding_bytes
from planner.states import (
    DTYPE_BYTES,
    RoleTable,
    adapter_bytes,
    compute_bytes,
    residual_bytes,
    role_table,
    trainable_roles,
    uses_autocast,
)

CoefficientSource = Callable[[Architecture, ActivationOptions], Coefficients]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryJob:
    """What the memory of every candidate of one job depends on besides the choice."""

    architecture: Architecture
    seq_len: int
    lora_r: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: bool = False
    quantization: str = "nf4"
    rows_per_sequence: int = 1
    """Rows that one training example makes: 2 for preference pairs (chosen and rejected)."""
    padded: bool = True
    """Rows differ in length, so a batch above one carries a padding mask."""
    reference_model: bool = False
    """A frozen copy of the model is held beside the policy (DPO, KTO without adapters)."""
    scores_vocabulary: bool = True
    """The loss goes through the vocabulary head; a reward model's scalar head does not."""
    full_logits_bytes: float = 12.0
    """Bytes per logit of the full-logits path in this TRL release, one row per batch."""
    full_logits_bytes_batched: float = 12.0
    """The same with two rows or more."""
    head_in_tail_group: bool = True
    """accelerate >= 1.14 wraps final norm and head as one FSDP2 group that stays gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peaks of one choice on one rank, with the interval and the evidence."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int
    capacity_bytes: int | None
    headroom_bytes: int | None
    """Capacity less the reserve, less ``device_bytes``; negative when it does not fit."""
    fits: bool
    host_pinned_bytes: int
    host_pageable_bytes: int
    host_fits: bool
    peak_phase: str
    evidence: str
    phases: tuple[Phase, ...]
    roles: RoleTable
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        """The phase that decides."""
        return next(phase for phase in self.phases if phase.name == self.peak_phase)


@dataclass(slots=True)
class MemoryModel:
    """Memory of any choice for one job on one machine. Pure; keeps what candidates share."""

    job: MemoryJob
    hardware: Hardware
    reserve: float
    source: CoefficientSource
    usable_bytes: int = field(init=False)
    """Capacity less the reserve."""
    shared: Shared = field(default_factory=Shared, init=False)
    _blocks: dict[Method, Blocks] = field(default_factory=dict[Method, Blocks], init=False)

    def __post_init__(self) -> None:
        self.usable_bytes = int((self.hardware.capacity_bytes or 0) * (1 - self.reserve))

    def blocks(self, method: Method) -> Blocks:
        """Parameters by part and fate under ``method``, cached."""
        found = self._blocks.get(method)
        if found is None:
            found = parameter_blocks(self.job.architecture, method, self.job.lora_r, self.job.lora_targets)
            self._blocks[method] = found
        return found

    def frame(self, choice: Choice) -> MemoryFrame:
        """``choice`` at any micro-batch and accumulation.

        Raises:
            ValueError: an optimizer that this model does not know.
        """
        return MemoryFrame(self, choice)

    def estimate(self, choice: Choice) -> MemoryEstimate:
        """Simulate one optimizer step of ``choice``.

        Raises:
            ValueError: an optimizer or loss path that this model does not know.
        """
        frame = self.frame(choice)
        found = frame.phases(choice.micro_batch, choice.grad_accum)
        peak = max(found, key=lambda phase: phase.bytes)
        verdict = frame.verdict(choice.micro_batch, choice.grad_accum)
        device = device_model(choice, self.hardware).at(peak.bytes)
        pinned, pageable = frame.host(choice.micro_batch)
        for phase in found:
            phase.parts["context"] = device.context_bytes
            phase.parts["slack"] = device.slack_bytes if phase is peak else 0
        return MemoryEstimate(
            allocated_bytes=device.allocated_bytes,
            reserved_bytes=device.reserved_bytes,
            device_bytes=device.total_bytes,
            low_bytes=device.allocated_bytes - verdict.spread_bytes,
            high_bytes=device.allocated_bytes + verdict.spread_bytes,
            capacity_bytes=self.hardware.capacity_bytes,
            headroom_bytes=verdict.headroom_bytes,
            fits=verdict.fits,
            host_pinned_bytes=pinned,
            host_pageable_bytes=pageable,
            host_fits=verdict.host_fits,
            peak_phase=peak.name,
            evidence=self.coefficients(choice).evidence,
            phases=tuple(found),
            roles=role_table(choice, self.job.quantization),
        )

    def verdict(self, choice: Choice) -> Verdict:
        """Whether ``choice`` fits, without the parts."""
        return self.frame(choice).verdict(choice.micro_batch, choice.grad_accum)

    def coefficients(self, choice: Choice) -> Coefficients:
        """The coefficients that ``choice`` is priced with."""
        return self.frame(choice).activations(choice.micro_batch)[0]

    def states_of(self, choice: Choice) -> tuple[States, HeldBytes]:
        """What ``choice`` holds at rest, on the card and altogether."""
        blocks, roles = self.blocks(choice.method), role_table(choice, self.job.quantization)
        held = held_bytes(blocks.total, roles)
        if self.job.reference_model:
            copy = blocks.num_parameters * DTYPE_BYTES[choice.weights] / roles.frozen.weights_ranks
            held = replace(held, weights=held.weights + copy)
        return resident_states(choice, blocks, roles, held, tied=self.job.architecture.tied), held

    def activations_of(self, choice: Choice) -> tuple[Coefficients, ActivationsAt]:
        """Coefficients of ``choice`` and their values at its micro-batch."""
        coefficients = self.source(self.job.architecture, self.activation_options(choice))
        return coefficients, activations_at(coefficients, rank_tokens(self.job, choice), self.job.seq_len)

    def shard_of(self, choice: Choice) -> ShardingBytes:
        """What the sharding of ``choice`` adds."""
        blocks, roles, job = self.blocks(choice.method), trainable_roles(choice), self.job
        return sharding_bytes(choice, job.architecture, blocks, roles, job.seq_len, job.head_in_tail_group)

    def loss_of(self, choice: Choice) -> LossBytes:
        """What the loss of ``choice`` allocates."""
        job, arch = self.job, self.job.architecture
        if not job.scores_vocabulary:
            return LossBytes(0, 0, "one score per sequence", "trl reward_trainer.py")
        gathered = choice.sharding in FSDP2 or choice.sharding in ZERO or choice.sharding == "fsdp1"
        batched = choice.micro_batch * job.rows_per_sequence > 1
        return loss_bytes(
            choice.loss_path,
            tokens=rank_tokens(job, choice),
            vocab=arch.vocab,
            hidden=arch.hidden,
            hidden_bytes=residual_bytes(choice),
            head_bytes=compute_bytes(choice) if gathered else DTYPE_BYTES[choice.weights],
            compute_bytes=compute_bytes(choice),
            head_trains=choice.method == "full",
            bytes_per_logit=job.full_logits_bytes_batched if batched else job.full_logits_bytes,
            autocast=uses_autocast(choice),
            softcap=arch.logit_softcap is not None,
        )

    def activation_options(self, choice: Choice) -> ActivationOptions:
        """The options under which coefficients for ``choice`` are asked."""
        full = choice.method == "full"
        targets = self.job.lora_targets
        padded = self.job.padded and choice.micro_batch * self.job.rows_per_sequence > 1
        return ActivationOptions(
            residual_bytes=residual_bytes(choice),
            compute_bytes=compute_bytes(choice),
            trains_base=full,
            lora_targets=None if full else targets,
            lora_r=0 if full else self.job.lora_r,
            lora_dropout=self.job.lora_dropout and not full,
            adapter_bytes=adapter_bytes(choice),
            attention=choice.attention,
            masked=(padded or choice.packing) and choice.attention != "flash_attention_2",
            quantised=choice.method == "qlora",
            mask_bias=self.hardware.device == "cuda",
        )


def rank_tokens(job: MemoryJob, choice: Choice) -> int:
    """Tokens of one micro-batch on one rank."""
    rows = choice.micro_batch * job.rows_per_sequence
    return rows * -(-job.seq_len // (choice.cp * choice.sp))
