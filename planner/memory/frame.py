"""Frame: the memory of one choice at any micro-batch and accumulation, which is what the search asks for.

All that does not depend on the micro-batch is worked out once; the rest is shared with every frame that agrees on what
it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from planner.choice import FSDP2, Choice, OffloadTarget
from planner.memory.activations import ActivationsAt
from planner.memory.coefficients import Coefficients
from planner.memory.depth import depth_of
from planner.memory.host import (
    PROCESS_BYTES,
    HostMemory,
    HostPart,
    Node,
    accumulated_part,
    activations_part,
    host_parts,
)
from planner.memory.loss import LossBytes
from planner.memory.parts import Key, MemoryParts
from planner.memory.phases import (
    LayerWalk,
    LayerWalker,
    Moment,
    Phase,
    loss_moment,
    phases,
    step_moment,
)

if TYPE_CHECKING:
    from planner.memory.correction import Correction

_ACTIVATIONS: frozenset[OffloadTarget] = frozenset({"activations"})


class Verdict(NamedTuple):
    """Whether one choice fits, and by how much."""

    device_bytes: int
    spread_bytes: int
    """Half-width of the interval."""
    headroom_bytes: int | None
    fits: bool
    host_fits: bool


class MemoryFrame:
    """Memory of one choice at any micro-batch and accumulation."""

    __slots__ = (
        "_activations",
        "_choice",
        "_correct",
        "_corrections",
        "_device",
        "_losses",
        "_parts",
        "_states_by",
        "_walkers",
        "_walks",
        "held",
        "others_bytes",
        "reference",
        "shard",
        "states",
        "step",
        "step_bytes",
    )

    def __init__(
        self, parts: MemoryParts, choice: Choice, correct: Callable[[Choice], Correction | None] | None = None
    ) -> None:
        """``correct``: what a probe adds to a choice at a batch; None where nothing was measured."""
        self._parts, self._choice, self._correct = parts, choice, correct
        hardware, shared = parts.hardware, parts.shared
        held_by = (choice.sharding, choice.method, choice.weights, choice.mixed_precision)
        ranks, offload = choice.shard_ranks, choice.offload
        states_by = self._states_by = (held_by, ranks, choice.optimizer, offload - _ACTIVATIONS)
        found = shared.states.get(states_by)
        if found is None:
            found = shared.states[states_by] = parts.states_of(choice)
        self.states, self.held = found
        walks: Key = (choice.recompute,) if choice.sharding == "fsdp1" else ()
        if choice.sharding in FSDP2:
            walks = (choice.recompute == "none", choice.loss_path == "full_logits")
        sharded_by = (held_by, ranks, choice.cp, choice.sp, walks)
        shard = shared.shards.get(sharded_by)
        if shard is None:
            shard = shared.shards[sharded_by] = parts.shard_of(choice)
        self.shard = shard
        seen_by = (held_by, choice.cp, choice.sp, choice.attention, choice.packing)
        self._activations = shared.activations.setdefault(seen_by, {})
        self._losses = shared.losses.setdefault((held_by, choice.cp, choice.sp, choice.loss_path), {})
        walked_by = (sharded_by, choice.recompute, offload)
        self._walkers = shared.walkers.setdefault(walked_by, {})
        self._walks = shared.walks.setdefault((walked_by, seen_by), {})
        self.step = step_moment(choice, self.states, shard)
        self.step_bytes = sum(self.step)
        self.reference = parts.reference_of(choice)
        self._device = parts.device_of(choice)
        self.others_bytes = hardware.others_bytes(choice.num_gpus)
        self._corrections: dict[tuple[int, int], Correction | None] = {}

    def verdict(self, micro_batch: int, grad_accum: int) -> Verdict:
        """Whether the choice fits at this micro-batch and accumulation."""
        tensor_bytes, high = self._peak(micro_batch, grad_accum)
        # States are counted exactly, but never is a peak known better than to 2 %, or to 1.5 after a probe.
        correction = self._correction(micro_batch, grad_accum)
        least = tensor_bytes // 50 if correction is None else int(correction.floor * tensor_bytes)
        spread = max(high - tensor_bytes, least)
        device = self._device.device_bytes(tensor_bytes)
        parts = self._parts
        capacity, headroom, fits = parts.hardware.capacity_bytes, None, True
        if capacity is not None:
            headroom = parts.usable_bytes - self.others_bytes - device
            fits = headroom >= 0 and device + spread <= capacity - self.others_bytes
        host_fits = True
        available = parts.hardware.host_available_bytes
        if available is not None:
            host_fits = self._host_peak(micro_batch, grad_accum) <= available
        return Verdict(device, spread, headroom, fits and host_fits, host_fits)

    def _peak(self, micro_batch: int, grad_accum: int) -> tuple[int, int]:
        """(bytes of tensors at the highest phase, the highest upper end of all phases)."""
        layers, loss = self._moments(micro_batch, grad_accum)
        forward, forward_bytes, backward, backward_bytes, _ = layers
        loss_bytes = sum(loss)
        rest, error = self.states.rest_bytes, self.activations(micro_batch)[0].relative_error
        step_bytes, correction = self.step_bytes, self._correction(micro_batch, grad_accum)
        if correction is not None:
            forward_bytes, loss_bytes = forward_bytes + correction.forward, loss_bytes + correction.loss
            backward_bytes, step_bytes = backward_bytes + correction.backward, step_bytes + correction.step
            error = min(error, correction.error)
        # Saved tensors, recompute and loss depend on tokens and kernels, and are not counted exactly.
        peak = max(forward_bytes, loss_bytes, backward_bytes, step_bytes)
        high = max(
            forward_bytes + error * (forward[1] + forward[2]),
            loss_bytes + error * (loss[1] + loss[3]),
            backward_bytes + error * (backward[1] + backward[2]),
            step_bytes,
        )
        # A batch of training holds all that an evaluation of no more rows does.
        if (self._parts.job.eval_rows or 0) > micro_batch and self._parts.job.evaluates:
            moment = self._evaluation(micro_batch, grad_accum)
            peak = max(peak, sum(moment))
            high = max(high, sum(moment) + error * (moment[1] + moment[2] + moment[3]))
        whole = self.reference.load
        return max(int(rest + peak), whole), max(int(rest + high), whole)

    def _evaluation(self, micro_batch: int, grad_accum: int) -> Moment:
        """The worst moment of an evaluation after a step."""
        rows = self._parts.job.eval_rows or micro_batch
        walker = self._walker(grad_accum > 1)
        return walker.evaluation(self.activations(rows)[1], rows, self._loss(rows), self.shard)

    def activations(self, micro_batch: int) -> tuple[Coefficients, ActivationsAt]:
        """Coefficients, and their values at this micro-batch."""
        found = self._activations.get(micro_batch)
        if found is None:
            choice = replace(self._choice, micro_batch=micro_batch)
            found = self._activations[micro_batch] = self._parts.activations_of(choice)
        return found

    def _correction(self, micro_batch: int, grad_accum: int) -> Correction | None:
        """What a probe adds to the phases at this micro-batch and accumulation."""
        if self._correct is None:
            return None
        key = (micro_batch, grad_accum)
        if key not in self._corrections:
            self._corrections[key] = self._correct(
                replace(self._choice, micro_batch=micro_batch, grad_accum=grad_accum)
            )
        return self._corrections[key]

    def _walker(self, accumulates: bool) -> LayerWalker:
        walker = self._walkers.get(accumulates)
        if walker is None:
            choice, arch = self._choice, self._parts.job.architecture
            offloads, neighbours = "activations" in choice.offload, bool(self.shard.beside)
            depth = depth_of(arch.order, choice.recompute, offloads, neighbours=neighbours)
            walker = LayerWalker(depth, self.states, self.shard, tied=arch.tied, accumulates=accumulates)
            self._walkers[accumulates] = walker
        return walker

    def _loss(self, micro_batch: int) -> LossBytes:
        loss = self._losses.get(micro_batch)
        if loss is None:
            choice = replace(self._choice, micro_batch=micro_batch)
            loss = self._losses[micro_batch] = self._parts.loss_of(choice)
        return loss

    def _moments(self, micro_batch: int, grad_accum: int) -> tuple[LayerWalk, Moment]:
        """Forward and backward through the layers, and the loss between them."""
        accumulates = grad_accum > 1
        walker = self._walker(accumulates)
        layers = self._walks.get((micro_batch, accumulates))
        if layers is None:
            layers = walker.at(self.activations(micro_batch)[1], micro_batch)
            self._walks[(micro_batch, accumulates)] = layers
        # With accumulation the gradients of earlier micro-batches live through the whole step.
        persisting = self.states.all_gradients if accumulates else 0.0
        loss = loss_moment(walker, layers, self._loss(micro_batch), self.shard, persisting)
        if self.reference.in_loss:
            loss = max(loss, *self._reference_forward(walker, layers, micro_batch, persisting), key=sum)
        return layers, loss

    def _reference_forward(
        self, walker: LayerWalker, layers: LayerWalk, micro_batch: int, persisting: float
    ) -> tuple[Moment, Moment]:
        """The reference's layers and its head, after the policy's forward and while all that is kept of that.

        Its weights need gradients by their flag, so autocast keeps copies of them all until its forward is over
        (aten/src/ATen/autocast_mode.cpp: ``cached_cast``); of the policy's only those are left that backward needs.
        """
        at = self.activations(micro_batch)[1]
        layer = max(at.kinds[index].full.forward for index in set(self._parts.job.architecture.order))
        gather, buckets = self.reference.forward_gather, self.shard.rest_buckets
        casts = walker.backward_casts + walker.forward_casts
        return (
            Moment(persisting, layers.saved, layer, 0.0, gather, buckets, casts),
            Moment(persisting, layers.saved, 0.0, self._loss(micro_batch).forward, gather, buckets, casts),
        )

    def phases(self, micro_batch: int, grad_accum: int) -> list[Phase]:
        """Every phase of one optimizer step, part by part."""
        layers, loss = self._moments(micro_batch, grad_accum)
        moments = {
            "forward": layers.forward,
            "loss": loss,
            "backward": layers.backward,
            "step": self.step,
        }
        if self._parts.job.evaluates:
            moments["evaluate"] = self._evaluation(micro_batch, grad_accum)
        found = phases(self.states, self.shard, moments)
        correction = self._correction(micro_batch, grad_accum)
        if correction is not None:
            correction.enter(found)
        load = found[0].parts
        load["gather"] = max(load["gather"], self.reference.load - load["weights"])
        return found

    def _host_peak(self, micro_batch: int, grad_accum: int) -> int:
        """The most that the host of a node holds; worked out once for all choices that agree on what it depends on."""
        key: Key = (self._states_by, self._choice.num_gpus, grad_accum > 1)
        if "activations" in self._choice.offload:
            key = (*key, micro_batch, self._choice.cp, self._choice.sp, self._choice.packing, self._choice.attention)
        peaks = self._parts.shared.host_peaks
        found = peaks.get(key)
        if found is None:
            found = peaks[key] = self.host(micro_batch, grad_accum).peak_bytes
        return found

    def host(self, micro_batch: int, grad_accum: int) -> HostMemory:
        """Host memory of one node."""
        parts = self._parts
        if parts.hardware.device == "cpu":
            # There the card is the host.
            return HostMemory((), 0)
        choice = replace(self._choice, micro_batch=micro_batch, grad_accum=grad_accum)
        job, arch = parts.job, parts.job.architecture
        node = Node(
            ranks=min(choice.num_gpus, parts.hardware.gpus_per_node),
            fsdp_first_rank_loads=job.fsdp_first_rank_loads,
            saves_optimizer=job.saves_optimizer,
            copies=2 if job.reference_model or (job.reference_before and choice.sharding in FSDP2) else 1,
        )
        key = (self._states_by, node.ranks)
        resting = parts.shared.hosts.get(key)
        if resting is None:
            resting = parts.shared.hosts[key] = host_parts(choice, node, arch, parts.blocks(choice.method), self.held)
        varying: list[HostPart | None] = []
        if choice.offload:
            varying.append(accumulated_part(choice, node, arch, parts.blocks(choice.method)))
        if "activations" in choice.offload:
            at = self.activations(micro_batch)[1]
            varying.append(activations_part(choice, node, [at.kinds[index].full.kept for index in arch.order]))
        more = tuple(part for part in varying if part is not None)
        return HostMemory(resting + more, node.ranks * PROCESS_BYTES)
