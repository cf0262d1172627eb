"""Memory: the simulated step of one choice, turned into peaks, an interval and a verdict against the card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from planner.architecture import Architecture
from planner.blocks import Blocks, parameter_blocks
from planner.choice import FSDP2, ZERO, Choice, Method, OffloadTarget
from planner.coefficients import Coefficients
from planner.device_memory import device_bytes
from planner.formula import ActivationOptions
from planner.hardware import Hardware
from planner.loss_memory import LossBytes, loss_bytes
from planner.phases import (
    ActivationsAt,
    HeldBytes,
    Phase,
    Run,
    States,
    Walk,
    activations_at,
    held_bytes,
    layer_runs,
    resident_states,
)
from planner.sharding_memory import ShardingBytes, sharding_bytes
from planner.states import (
    DTYPE_BYTES,
    RoleTable,
    compute_bytes,
    residual_bytes,
    role_table,
    trainable_roles,
    uses_autocast,
)

_T = TypeVar("_T")
_ACTIVATIONS: frozenset[OffloadTarget] = frozenset({"activations"})

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


class Verdict(NamedTuple):
    """Whether one choice fits, and by how much."""

    device_bytes: int
    spread_bytes: int
    """Half-width of the interval."""
    headroom_bytes: int | None
    fits: bool
    host_fits: bool


@dataclass(slots=True)
class MemoryModel:
    """Memory of any choice for one job on one machine. Pure; caches what candidates share."""

    job: MemoryJob
    hardware: Hardware
    reserve: float
    source: CoefficientSource
    _cache: dict[tuple[object, ...], Any] = field(default_factory=dict[tuple[object, ...], Any], init=False)
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
        walk, held, coefficients, at = self._walk(choice)
        phases = walk.phases()
        peak = max(phases, key=lambda phase: phase.bytes)
        verdict = self.verdict(choice)
        device = device_bytes(choice, self.hardware, peak.bytes)
        pinned, pageable = self._host(choice, held, at)
        for phase in phases:
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
            evidence=coefficients.evidence,
            phases=tuple(phases),
            roles=role_table(choice, self.job.quantization),
        )

    def verdict(self, choice: Choice) -> Verdict:
        """Whether ``choice`` fits, without the parts: what the search asks of every candidate."""
        walk, held, coefficients, at = self._walk(choice)
        moments = walk.moments()
        peak = max(moments.values(), key=sum)
        tensor_bytes = int(walk.states.rest_bytes + sum(peak))
        # States are counted exactly; only what depends on tokens and kernels is uncertain, never less than 2 %.
        activations = peak.saved_activations + peak.recompute + peak.loss
        spread = max(int(coefficients.relative_error * activations), tensor_bytes // 50)
        device = device_bytes(choice, self.hardware, tensor_bytes).total_bytes
        capacity, headroom, fits = self.hardware.capacity_bytes, None, True
        if capacity is not None:
            others = self.hardware.others_bytes(choice.num_gpus)
            headroom = int(capacity * (1 - self.reserve)) - others - device
            fits = headroom >= 0 and device + spread <= capacity - others
        available = self.hardware.host_available_bytes
        host_fits = available is None or sum(self._host(choice, held, at)) <= available
        return Verdict(device, spread, headroom, fits and host_fits, host_fits)

    def _walk(self, choice: Choice) -> tuple[Walk, HeldBytes, Coefficients, ActivationsAt]:
        """The walk of ``choice``, its inputs shared with every candidate that agrees on what they depend on."""
        arch = self.job.architecture
        held_by = (choice.sharding, choice.method, choice.weights, choice.mixed_precision)
        offloaded = choice.offload - _ACTIVATIONS
        states, held = self._cached(
            ("states", held_by, choice.shard_ranks, choice.optimizer, offloaded), self._states_of, choice
        )
        tokens_by = (choice.micro_batch, choice.cp, choice.sp)
        attention = (choice.attention, choice.packing)
        coefficients, at = self._cached(("at", held_by, tokens_by, attention), self._activations_of, choice)
        runs: tuple[Run, ...] = self._cached(
            ("runs", id(at), choice.recompute, "activations" in choice.offload),
            lambda c: layer_runs(arch.order, c, at),
            choice,
        )
        loss = self._cached(("loss", held_by, tokens_by, choice.loss_path), self._loss_of, choice)
        shard = self._cached(("shard", held_by, tokens_by, choice.shard_ranks), self._shard_of, choice)
        return Walk(choice, states, runs, at, loss, shard, tied=arch.tied), held, coefficients, at

    def _cached(self, key: tuple[object, ...], make: Callable[[Choice], _T], choice: Choice) -> _T:
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = make(choice)
        return found

    def _states_of(self, choice: Choice) -> tuple[States, HeldBytes]:
        blocks, roles = self.blocks(choice.method), role_table(choice, self.job.quantization)
        held = held_bytes(blocks.total, roles)
        if self.job.reference_model:
            copy = blocks.num_parameters * DTYPE_BYTES[choice.weights] / roles.frozen.weights_ranks
            held = replace(held, weights=held.weights + copy)
        return resident_states(choice, blocks, roles, held, tied=self.job.architecture.tied), held

    def _activations_of(self, choice: Choice) -> tuple[Coefficients, ActivationsAt]:
        coefficients = self.source(self.job.architecture, self.activation_options(choice))
        return coefficients, activations_at(coefficients, rank_tokens(self.job, choice), self.job.seq_len)

    def _shard_of(self, choice: Choice) -> ShardingBytes:
        blocks, roles = self.blocks(choice.method), trainable_roles(choice)
        job = self.job
        return sharding_bytes(choice, job.architecture, blocks, roles, job.seq_len, job.head_in_tail_group)

    def _loss_of(self, choice: Choice) -> LossBytes:
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

    def _host(self, choice: Choice, held: HeldBytes, at: ActivationsAt) -> tuple[int, int]:
        """(pinned, pageable) host bytes of one node."""
        if not choice.offload:
            return 0, 0
        ranks = min(choice.num_gpus, self.hardware.gpus_per_node)
        pinned = pageable = 0
        if "activations" in choice.offload:
            pinned += ranks * sum(at.kinds[index].full.kept for index in self.job.architecture.order)
        if "optimizer" in choice.offload:
            pinned += int(ranks * (held.master + held.moment1 + held.moment2))
        if "params" in choice.offload:
            pinned += int(ranks * (held.weights + held.gradients))
        return pinned, pageable

    def coefficients(self, choice: Choice) -> Coefficients:
        """The coefficients that ``choice`` is priced with."""
        return self._walk(choice)[2]

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
            mask_bias=self.hardware.device == "cuda",
        )


def rank_tokens(job: MemoryJob, choice: Choice) -> int:
    """Tokens of one micro-batch on one rank."""
    rows = choice.micro_batch * job.rows_per_sequence
    return rows * -(-job.seq_len // (choice.cp * choice.sp))
