"""Memory: one optimizer step simulated phase by phase on one rank; the peak is found, not summed.

At every moment: what is at rest + what is saved + the transient of the moment. Forward stacks saved tensors up, the
loss comes on top, backward walks the layers down while gradients rise, the step holds its own work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from planner.architecture import Architecture
from planner.blocks import Block, Blocks, parameter_blocks
from planner.choice import FSDP2, ZERO, Choice, Method
from planner.coefficients import Coefficients, LayerBytes
from planner.device_memory import DeviceBytes, device_bytes
from planner.formula import ActivationOptions
from planner.hardware import Hardware
from planner.loss_memory import LossBytes, loss_bytes
from planner.optimizers import find_optimizer
from planner.sharding_memory import ShardingBytes, sharding_bytes
from planner.states import (
    DTYPE_BYTES,
    Roles,
    compute_bytes,
    frozen_roles,
    residual_bytes,
    trainable_roles,
    uses_autocast,
)

PARTS = (
    "weights", "gradients", "master", "moment1", "moment2", "saved_activations", "recompute", "loss", "gather",
    "buckets", "casts", "offload_buffers", "context", "slack",
)
"""Names of the parts of a phase, in the order they are drawn."""

OFFLOAD_BANDS = 4
"""Layer inputs alive on the card at once while checkpoints are offloaded (TRL's long-context profile of Qwen3-4B)."""

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
    """Bytes per logit of the full-logits path in this TRL release."""
    head_in_tail_group: bool = True
    """accelerate >= 1.14 wraps final norm and head as one FSDP2 group that stays gathered."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase at its worst moment."""

    name: str
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


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
    roles: dict[str, Roles]
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
    _layers: dict[tuple[object, ...], tuple[Coefficients, _Evaluated]] = field(default_factory=dict, init=False)
    _blocks: dict[Method, Blocks] = field(default_factory=dict, init=False)

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
            adapter_bytes=2 if choice.method == "qlora" else 4,
            attention=choice.attention,
            masked=(padded or choice.packing) and choice.attention != "flash_attention_2",
        )

    def evaluated(self, choice: Choice) -> tuple[Coefficients, _Evaluated]:
        """Coefficients and their values at this choice's tokens, cached."""
        options = self.activation_options(choice)
        key = (options, choice.micro_batch, choice.cp, choice.sp)
        hit = self._layers.get(key)
        if hit is None:
            coefficients = self.source(self.job.architecture, options)
            tokens = rank_tokens(self.job, choice)
            hit = (coefficients, _evaluate(coefficients, tokens, self.job.seq_len))
            self._layers[key] = hit
        return hit


def rank_tokens(job: MemoryJob, choice: Choice) -> int:
    """Tokens of one micro-batch on one rank."""
    rows = choice.micro_batch * job.rows_per_sequence
    return rows * -(-job.seq_len // (choice.cp * choice.sp))


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Layer bytes at one token count: per kind (saved, boundary, selective, forward, recompute, backward)."""

    kinds: tuple[tuple[int, int, int, int, int, int], ...]
    model_saved: int
    final_norm: int


def _evaluate(coefficients: Coefficients, tokens: int, sequence: int) -> _Evaluated:
    def values(layer: LayerBytes) -> tuple[int, int, int, int, int, int]:
        return (
            layer.saved.at(tokens, sequence), layer.boundary.at(tokens, sequence),
            layer.selective.at(tokens, sequence), layer.forward_transient.at(tokens, sequence),
            layer.recompute_extra.at(tokens, sequence), layer.backward_transient.at(tokens, sequence),
        )

    return _Evaluated(
        tuple(values(layer) for layer in coefficients.layers),
        coefficients.model_saved.at(tokens, sequence),
        coefficients.final_norm_saved.at(tokens, sequence),
    )


def _held(block: Block, trained: Roles, adapter: Roles, frozen: Roles, quantised: Roles) -> dict[str, float]:
    """Bytes at rest of one block by part, gradients included."""

    def both(role: str, ranks: str) -> float:
        return (
            block.trained * getattr(trained, role) / getattr(trained, ranks)
            + block.adapter * getattr(adapter, role) / getattr(adapter, ranks)
        )

    return {
        "weights": both("weights", "weights_ranks")
        + block.frozen * frozen.weights / frozen.weights_ranks
        + block.quantised * quantised.weights / quantised.weights_ranks,
        "gradients": both("gradients", "gradients_ranks"),
        "master": both("master", "optimizer_ranks"),
        "moment1": both("moment1", "optimizer_ranks"),
        "moment2": both("moment2", "optimizer_ranks"),
    }


def recomputed_layers(recompute: str, num_layers: int) -> list[bool]:
    """Which layers are recomputed: every n-th means index % n == 0, as transformers applies it."""
    if recompute.startswith("every_"):
        n = int(recompute.removeprefix("every_"))
        return [index % n == 0 for index in range(num_layers)]
    return [recompute in ("full", "selective")] * num_layers


def _loss(model: MemoryModel, choice: Choice, tokens: int) -> LossBytes:
    job, arch = model.job, model.job.architecture
    if not job.scores_vocabulary:
        return LossBytes(0, 0, "one score per sequence", "trl reward_trainer.py")
    head_bytes = DTYPE_BYTES[choice.weights]
    if choice.sharding in FSDP2 or choice.sharding in ZERO or choice.sharding == "fsdp1":
        head_bytes = compute_bytes(choice)
    logit = job.full_logits_bytes if choice.micro_batch * job.rows_per_sequence > 1 else 12.0
    return loss_bytes(
        choice.loss_path, tokens=tokens, vocab=arch.vocab, hidden=arch.hidden,
        hidden_bytes=residual_bytes(choice), head_bytes=head_bytes, compute_bytes=compute_bytes(choice),
        head_trains=choice.method == "full", bytes_per_logit=logit, autocast=uses_autocast(choice),
        softcap=arch.logit_softcap is not None,
    )


def _estimate(model: MemoryModel, choice: Choice) -> MemoryEstimate:
    job, arch = model.job, model.job.architecture
    blocks = model.blocks(choice.method)
    roles = {
        "trained": trainable_roles(choice), "adapters": trainable_roles(choice, adapter=True),
        "frozen": frozen_roles(choice),
        "quantised": frozen_roles(choice, quantised=job.quantization if choice.method == "qlora" else None),
    }
    held = _held(blocks.total, *roles.values())
    if job.reference_model:
        held["weights"] += blocks.num_parameters * DTYPE_BYTES[choice.weights] / roles["frozen"].weights_ranks
    coefficients, at = model.evaluated(choice)
    tokens = rank_tokens(job, choice)
    loss = _loss(model, choice, tokens)
    shard = sharding_bytes(choice, arch, blocks, roles["trained"], job.seq_len, job.head_in_tail_group)
    walk = _Walk(model, choice, blocks, roles, held, at, loss, shard)
    phases = walk.phases()
    peak = max(phases, key=lambda phase: phase.bytes)
    activations = sum(peak.parts.get(part, 0) for part in ("saved_activations", "recompute", "loss"))
    device = device_bytes(choice, model.hardware, peak.bytes)
    return _verdict(model, choice, coefficients, phases, peak, activations, device, roles, held, at)


def _verdict(
    model: MemoryModel, choice: Choice, coefficients: Coefficients, phases: list[Phase], peak: Phase,
    activations: int, device: DeviceBytes, roles: dict[str, Roles], held: dict[str, float], at: _Evaluated,
) -> MemoryEstimate:
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
        allocated_bytes=device.allocated_bytes, reserved_bytes=device.reserved_bytes,
        device_bytes=device.total_bytes, low_bytes=device.allocated_bytes - spread,
        high_bytes=device.allocated_bytes + spread, device_high_bytes=device_high, capacity_bytes=capacity,
        headroom_bytes=headroom, fits=fits and host_fits, host_pinned_bytes=pinned, host_pageable_bytes=pageable,
        host_fits=host_fits, peak_phase=peak.name, evidence=coefficients.evidence, phases=tuple(phases), roles=roles,
    )


def _host(model: MemoryModel, choice: Choice, held: dict[str, float], at: _Evaluated) -> tuple[int, int]:
    """(pinned, pageable) host bytes of one node."""
    ranks = min(choice.num_gpus, model.hardware.gpus_per_node)
    pinned = pageable = 0
    if "activations" in choice.offload:
        order = model.job.architecture.order
        pinned += ranks * sum(at.kinds[index][1] for index in order)
    if "optimizer" in choice.offload:
        pinned += int(ranks * (held["master"] + held["moment1"] + held["moment2"]))
    if "params" in choice.offload:
        pinned += int(ranks * (held["weights"] + held["gradients"]))
    return pinned, pageable


class _Walk:
    """The walk through one optimizer step; every phase returns its worst moment."""

    def __init__(
        self, model: MemoryModel, choice: Choice, blocks: Blocks, roles: dict[str, Roles], held: dict[str, float],
        at: _Evaluated, loss: LossBytes, shard: ShardingBytes,
    ) -> None:
        self.model, self.choice, self.blocks, self.loss, self.shard = model, choice, blocks, loss, shard
        self.at = at
        self.order = model.job.architecture.order
        offloaded = choice.offload
        self.rest: dict[str, float] = {part: held[part] for part in ("weights", "master", "moment1", "moment2")}
        self.gradients_full = held["gradients"]
        if "optimizer" in offloaded:
            self.rest |= {"master": 0.0, "moment1": 0.0, "moment2": 0.0}
        if "params" in offloaded:
            self.rest["weights"] = 0.0
            self.gradients_full = 0.0
        grads = [_held(block, *roles.values())["gradients"] for block in blocks.kinds]
        scale = 0.0 if "params" in offloaded else 1.0
        self.layer_gradients = [g * scale for g in grads]
        tail = _held(blocks.final_norm + blocks.head, *roles.values())["gradients"]
        embedding = _held(blocks.embedding, *roles.values())["gradients"]
        tied = model.job.architecture.tied
        self.tail_gradients = (tail + (embedding if tied else 0.0)) * scale
        self.embedding_gradients = embedding * scale
        self.recomputed = recomputed_layers(choice.recompute, len(self.order))
        self.kept = self._kept()
        self.accumulates = choice.grad_accum > 1

    def _kept(self) -> list[int]:
        """Bytes that each layer keeps on the card from forward to backward."""
        column = {"selective": 2}.get(self.choice.recompute, 1)
        kept = [
            self.at.kinds[kind][column if recomputed else 0]
            for kind, recomputed in zip(self.order, self.recomputed, strict=True)
        ]
        if "activations" in self.choice.offload:
            bands = min(OFFLOAD_BANDS, len(kept))
            kept = [0] * (len(kept) - bands) + kept[len(kept) - bands :]
        return kept

    def _phase(self, name: str, **parts: float) -> Phase:
        merged = {part: self.rest.get(part, 0.0) + parts.pop(part, 0.0) for part in tuple(self.rest)}
        merged |= parts
        return Phase(name, {part: int(merged.get(part, 0.0)) for part in PARTS})

    def phases(self) -> list[Phase]:
        """Every phase of one optimizer step, in order."""
        step = self._step()
        return [self._load(), self._forward(), self._loss(), self._backward(), step, self._save()]

    def _load(self) -> Phase:
        parts = {part: 0.0 for part in ("master", "moment1", "moment2")}
        phase = Phase("load", {part: 0 for part in PARTS} | {"weights": int(self.rest["weights"])})
        phase.parts |= {part: int(value) for part, value in parts.items()}
        phase.parts["gather"] = self.shard.load_bytes
        return phase

    def _persisting(self) -> float:
        """Gradients that live through forward: those of earlier micro-batches."""
        if not self.accumulates:
            return 0.0
        return self.gradients_full

    def _casts(self, layers_done: int, *, backward: bool) -> float:
        """Low-precision copies that autocast makes of fp32 weights, up to layer ``layers_done``."""
        if not uses_autocast(self.choice) or self.choice.weights != "fp32":
            return 0.0
        weights = 0
        for index, kind in enumerate(self.order[:layers_done]):
            # Forward: the cache lives until autocast ends. Backward: a recomputed layer kept no copy.
            if not backward or not self.recomputed[index]:
                weights += self.blocks.cast_weights[kind]
        return 2.0 * weights

    def _forward(self) -> Phase:
        best = 0.0
        worst = (0, 0.0, 0)
        saved = self.at.model_saved
        for index, kind in enumerate(self.order):
            transient = self.at.kinds[kind][3]
            live = saved + transient + self.shard.layer_gather[kind] + self._casts_step * (index + 1)
            if live >= best:
                best, worst = live, (saved, float(transient), index)
            saved += self.kept[index]
        base_saved, transient, index = worst
        return self._phase(
            "forward", gradients=self._persisting(), saved_activations=base_saved, recompute=transient,
            gather=self.shard.layer_gather[self.order[index]] + self.shard.root_forward,
            casts=self._casts(index + 1, backward=False), buckets=self.shard.rest_buckets,
        )

    @property
    def _casts_step(self) -> float:
        if not uses_autocast(self.choice) or self.choice.weights != "fp32":
            return 0.0
        return 2.0 * max(self.blocks.cast_weights, default=0)

    def _loss(self) -> Phase:
        saved = self.at.model_saved + sum(self.kept) + self.at.final_norm
        forward = self.loss.forward + self._casts(len(self.order), backward=False)
        backward = self.loss.backward + self._casts(len(self.order), backward=True)
        loss, casts = (
            (self.loss.backward, backward - self.loss.backward) if backward >= forward
            else (self.loss.forward, forward - self.loss.forward)
        )
        return self._phase(
            "loss", gradients=self._persisting(), saved_activations=saved, loss=loss, gather=self.shard.root_loss,
            casts=casts, buckets=self.shard.rest_buckets,
        )

    def _backward(self) -> Phase:
        persisting = self._persisting()
        best = -1.0
        worst: tuple[float, float, float, int, int] = (0.0, 0.0, 0.0, 0, 0)
        gradients = 0.0 if self.accumulates else self.tail_gradients
        saved = float(self.at.model_saved + sum(self.kept))
        casts = self._casts(len(self.order), backward=True)
        for index in range(len(self.order) - 1, -1, -1):
            kind = self.order[index]
            recomputed = self.recomputed[index]
            transient = self.at.kinds[kind][4 if recomputed else 5]
            live = saved + gradients + transient + self.shard.layer_gather[kind] + self.shard.layer_reduce[kind] + casts
            if live > best:
                best = live
                worst = (saved, gradients, casts, index, transient)
            saved -= self.kept[index]
            if not recomputed and casts:
                casts -= 2.0 * self.blocks.cast_weights[kind]
            if not self.accumulates:
                gradients += self.layer_gradients[kind]
        # The embedding's gradient comes last; tied to the head, it is added to one that exists.
        if gradients + self.embedding_gradients > best and not self.accumulates:
            worst = (0.0, gradients + self.embedding_gradients, 0.0, 0, 0)
        saved, gradients, casts, index, transient = worst
        kind = self.order[index] if self.order else 0
        return self._phase(
            "backward", gradients=persisting + gradients, saved_activations=saved, recompute=transient,
            gather=self.shard.layer_gather[kind] + self.shard.root_backward, casts=casts,
            buckets=self.shard.rest_buckets + self.shard.layer_reduce[kind],
        )

    def _step(self) -> Phase:
        optimizer = find_optimizer(self.choice.optimizer)
        work = optimizer.step_transient * self.gradients_full + self.shard.step_bytes
        if "optimizer" in self.choice.offload:
            work = 0.0
        return self._phase(
            "step", gradients=self.gradients_full, recompute=work, buckets=self.shard.rest_buckets
        )

    def _save(self) -> Phase:
        return self._phase("save", gather=self.shard.save_bytes, buckets=self.shard.rest_buckets)
