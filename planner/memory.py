"""Memory: the simulated step of one choice, turned into peaks, an interval and a verdict against the card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.architecture import Architecture
from planner.blocks import Blocks, parameter_blocks
from planner.choice import FSDP2, ZERO, Choice, Method
from planner.coefficients import Coefficients
from planner.device_memory import device_bytes
from planner.formula import ActivationOptions
from planner.hardware import Hardware
from planner.loss_memory import LossBytes, loss_bytes
from planner.phases import ActivationsAt, HeldBytes, Phase, Walk, activations_at, held_bytes
from planner.sharding_memory import sharding_bytes
from planner.states import DTYPE_BYTES, RoleTable, compute_bytes, residual_bytes, role_table, uses_autocast

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
    device_high_bytes: int
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
    """Memory of any choice for one job on one machine. Pure; caches what candidates share."""

    job: MemoryJob
    hardware: Hardware
    reserve: float
    source: CoefficientSource
    _layers: dict[tuple[object, ...], tuple[Coefficients, ActivationsAt]] = field(
        default_factory=dict[tuple[object, ...], tuple[Coefficients, ActivationsAt]], init=False
    )
    _blocks: dict[Method, Blocks] = field(default_factory=dict[Method, Blocks], init=False)

    def blocks(self, method: Method) -> Blocks:
        """Parameters by part and fate under ``method``, cached."""
        found = self._blocks.get(method)
        if found is None:
            found = parameter_blocks(self.job.architecture, method, self.job.lora_r, self.job.lora_targets)
            self._blocks[method] = found
        return found

    def estimate(self, choice: Choice) -> MemoryEstimate:
        """Simulate one optimizer step of ``choice``.

        Raises:
            ValueError: an optimizer or loss path that this model does not know.
        """
        return _estimate(self, choice)

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
            # Only autocast leaves fp32 adapters beside a low-precision stream; FSDP2 and ZeRO cast them first.
            adapter_bytes=4 if choice.method == "lora" and uses_autocast(choice) else compute_bytes(choice),
            attention=choice.attention,
            masked=(padded or choice.packing) and choice.attention != "flash_attention_2",
        )

    def evaluated(self, choice: Choice) -> tuple[Coefficients, ActivationsAt]:
        """Coefficients and their values at this choice's tokens, cached."""
        options = self.activation_options(choice)
        key = (options, choice.micro_batch, choice.cp, choice.sp)
        hit = self._layers.get(key)
        if hit is None:
            coefficients = self.source(self.job.architecture, options)
            tokens = rank_tokens(self.job, choice)
            hit = (coefficients, activations_at(coefficients, tokens, self.job.seq_len))
            self._layers[key] = hit
        return hit


def rank_tokens(job: MemoryJob, choice: Choice) -> int:
    """Tokens of one micro-batch on one rank."""
    rows = choice.micro_batch * job.rows_per_sequence
    return rows * -(-job.seq_len // (choice.cp * choice.sp))


def _loss(model: MemoryModel, choice: Choice, tokens: int) -> LossBytes:
    job, arch = model.job, model.job.architecture
    if not job.scores_vocabulary:
        return LossBytes(0, 0, "one score per sequence", "trl reward_trainer.py")
    head_bytes = DTYPE_BYTES[choice.weights]
    if choice.sharding in FSDP2 or choice.sharding in ZERO or choice.sharding == "fsdp1":
        head_bytes = compute_bytes(choice)
    batched = choice.micro_batch * job.rows_per_sequence > 1
    logit = job.full_logits_bytes_batched if batched else job.full_logits_bytes
    return loss_bytes(
        choice.loss_path,
        tokens=tokens,
        vocab=arch.vocab,
        hidden=arch.hidden,
        hidden_bytes=residual_bytes(choice),
        head_bytes=head_bytes,
        compute_bytes=compute_bytes(choice),
        head_trains=choice.method == "full",
        bytes_per_logit=logit,
        autocast=uses_autocast(choice),
        softcap=arch.logit_softcap is not None,
    )


def _estimate(model: MemoryModel, choice: Choice) -> MemoryEstimate:
    job, arch = model.job, model.job.architecture
    blocks = model.blocks(choice.method)
    roles = role_table(choice, job.quantization)
    held = held_bytes(blocks.total, roles)
    if job.reference_model:
        copy = blocks.num_parameters * DTYPE_BYTES[choice.weights] / roles.frozen.weights_ranks
        held = replace(held, weights=held.weights + copy)
    coefficients, at = model.evaluated(choice)
    loss = _loss(model, choice, rank_tokens(job, choice))
    shard = sharding_bytes(choice, arch, blocks, roles.trained, job.seq_len, job.head_in_tail_group)
    phases = Walk(arch, choice, blocks, roles, held, at, loss, shard).phases()
    return _verdict(model, choice, coefficients, phases, roles, held, at)


def _verdict(
    model: MemoryModel,
    choice: Choice,
    coefficients: Coefficients,
    phases: list[Phase],
    roles: RoleTable,
    held: HeldBytes,
    at: ActivationsAt,
) -> MemoryEstimate:
    peak = max(phases, key=lambda phase: phase.bytes)
    activations = sum(peak.parts[part] for part in ("saved_activations", "recompute", "loss"))
    device = device_bytes(choice, model.hardware, peak.bytes)
    # States are counted exactly; only what depends on tokens and kernels is uncertain, never less than 2 %.
    spread = max(int(coefficients.relative_error * activations), peak.bytes // 50)
    capacity = model.hardware.capacity_bytes
    headroom = None
    fits = True
    device_high = device.total_bytes + spread
    if capacity is not None:
        others = model.hardware.others_bytes(choice.num_gpus)
        headroom = int(capacity * (1 - model.reserve)) - others - device.total_bytes
        fits = headroom >= 0 and device_high <= capacity - others
    pinned, pageable = _host(model, choice, held, at)
    available = model.hardware.host_available_bytes
    host_fits = available is None or pinned + pageable <= available
    for phase in phases:
        phase.parts["context"] = device.context_bytes
        phase.parts["slack"] = device.slack_bytes if phase is peak else 0
    return MemoryEstimate(
        allocated_bytes=device.allocated_bytes,
        reserved_bytes=device.reserved_bytes,
        device_bytes=device.total_bytes,
        low_bytes=device.allocated_bytes - spread,
        high_bytes=device.allocated_bytes + spread,
        device_high_bytes=device_high,
        capacity_bytes=capacity,
        headroom_bytes=headroom,
        fits=fits and host_fits,
        host_pinned_bytes=pinned,
        host_pageable_bytes=pageable,
        host_fits=host_fits,
        peak_phase=peak.name,
        evidence=coefficients.evidence,
        phases=tuple(phases),
        roles=roles,
    )


def _host(model: MemoryModel, choice: Choice, held: HeldBytes, at: ActivationsAt) -> tuple[int, int]:
    """(pinned, pageable) host bytes of one node."""
    ranks = min(choice.num_gpus, model.hardware.gpus_per_node)
    pinned = pageable = 0
    if "activations" in choice.offload:
        order = model.job.architecture.order
        pinned += ranks * sum(at.kinds[index].boundary for index in order)
    if "optimizer" in choice.offload:
        pinned += int(ranks * (held.master + held.moment1 + held.moment2))
    if "params" in choice.offload:
        pinned += int(ranks * (held.weights + held.gradients))
    return pinned, pageable
