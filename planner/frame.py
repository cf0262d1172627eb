"""Frame: the memory of one choice at any micro-batch and accumulation, which is what the search asks for.

All that does not depend on the micro-batch is worked out once; the rest is shared with every frame that agrees on what
it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from planner.choice import Choice, OffloadTarget
from planner.coefficients import Coefficients
from planner.depth import depth_of
from planner.device_memory import device_model
from planner.loss_memory import LossBytes
from planner.phases import (
    ActivationsAt,
    HeldBytes,
    LayerWalk,
    LayerWalker,
    Moment,
    Phase,
    States,
    loss_moment,
    phases,
    step_moment,
)
from planner.sharding_memory import ShardingBytes

if TYPE_CHECKING:
    from planner.memory import MemoryModel

_ACTIVATIONS: frozenset[OffloadTarget] = frozenset({"activations"})


class Verdict(NamedTuple):
    """Whether one choice fits, and by how much."""

    device_bytes: int
    spread_bytes: int
    """Half-width of the interval."""
    headroom_bytes: int | None
    fits: bool
    host_fits: bool


_Key = tuple[object, ...]


@dataclass(slots=True)
class Shared:
    """What frames have in common, by what it depends on."""

    states: dict[_Key, tuple[States, HeldBytes]] = field(default_factory=dict[_Key, tuple[States, HeldBytes]])
    shards: dict[_Key, ShardingBytes] = field(default_factory=dict[_Key, ShardingBytes])
    activations: dict[_Key, dict[int, tuple[Coefficients, ActivationsAt]]] = field(
        default_factory=dict[_Key, dict[int, tuple[Coefficients, ActivationsAt]]]
    )
    losses: dict[_Key, dict[int, LossBytes]] = field(default_factory=dict[_Key, dict[int, LossBytes]])
    walkers: dict[_Key, dict[bool, LayerWalker]] = field(default_factory=dict[_Key, dict[bool, LayerWalker]])
    walks: dict[_Key, dict[tuple[int, bool], LayerWalk]] = field(
        default_factory=dict[_Key, dict[tuple[int, bool], LayerWalk]]
    )


class MemoryFrame:
    """Memory of one choice at any micro-batch and accumulation."""

    __slots__ = (
        "_activations",
        "_choice",
        "_device",
        "_losses",
        "_model",
        "_walkers",
        "_walks",
        "held",
        "others_bytes",
        "shard",
        "states",
        "step",
        "step_bytes",
    )

    def __init__(self, model: MemoryModel, choice: Choice) -> None:
        self._model, self._choice = model, choice
        hardware, shared = model.hardware, model.shared
        held_by = (choice.sharding, choice.method, choice.weights, choice.mixed_precision)
        ranks, offload = choice.shard_ranks, choice.offload
        states_by = (held_by, ranks, choice.optimizer, offload - _ACTIVATIONS)
        found = shared.states.get(states_by)
        if found is None:
            found = shared.states[states_by] = model.states_of(choice)
        self.states, self.held = found
        sharded_by = (held_by, ranks, choice.cp)
        shard = shared.shards.get(sharded_by)
        if shard is None:
            shard = shared.shards[sharded_by] = model.shard_of(choice)
        self.shard = shard
        seen_by = (held_by, choice.cp, choice.sp, choice.attention, choice.packing)
        self._activations = shared.activations.setdefault(seen_by, {})
        self._losses = shared.losses.setdefault((held_by, choice.cp, choice.sp, choice.loss_path), {})
        walked_by = (sharded_by, choice.recompute, "activations" in offload, "params" in offload)
        self._walkers = shared.walkers.setdefault(walked_by, {})
        self._walks = shared.walks.setdefault((walked_by, seen_by), {})
        self.step = step_moment(choice, self.states, shard)
        self.step_bytes = sum(self.step)
        self._device = device_model(choice, hardware)
        self.others_bytes = hardware.others_bytes(choice.num_gpus)

    def verdict(self, micro_batch: int, grad_accum: int) -> Verdict:
        """Whether the choice fits at this micro-batch and accumulation."""
        tensor_bytes, high = self._peak(micro_batch, grad_accum)
        # States are counted exactly, but never is a peak known better than to 2 %.
        spread = max(high - tensor_bytes, tensor_bytes // 50)
        device = self._device.device_bytes(tensor_bytes)
        model = self._model
        capacity, headroom, fits = model.hardware.capacity_bytes, None, True
        if capacity is not None:
            headroom = model.usable_bytes - self.others_bytes - device
            fits = headroom >= 0 and device + spread <= capacity - self.others_bytes
        host_fits = True
        if self._choice.offload and model.hardware.host_available_bytes is not None:
            host_fits = sum(self.host(micro_batch)) <= model.hardware.host_available_bytes
        return Verdict(device, spread, headroom, fits and host_fits, host_fits)

    def _peak(self, micro_batch: int, grad_accum: int) -> tuple[int, int]:
        """(bytes of tensors at the highest phase, the highest upper end of all phases)."""
        layers, loss = self._moments(micro_batch, grad_accum)
        forward, forward_bytes, backward, backward_bytes, _ = layers
        loss_bytes = sum(loss)
        rest, error = self.states.rest_bytes, self.activations(micro_batch)[0].relative_error
        # Saved tensors, recompute and loss depend on tokens and kernels, and are not counted exactly.
        peak = max(forward_bytes, loss_bytes, backward_bytes, self.step_bytes)
        high = max(
            forward_bytes + error * (forward[1] + forward[2]),
            loss_bytes + error * (loss[1] + loss[3]),
            backward_bytes + error * (backward[1] + backward[2]),
            self.step_bytes,
        )
        return int(rest + peak), int(rest + high)

    def activations(self, micro_batch: int) -> tuple[Coefficients, ActivationsAt]:
        """Coefficients, and their values at this micro-batch."""
        found = self._activations.get(micro_batch)
        if found is None:
            choice = replace(self._choice, micro_batch=micro_batch)
            found = self._activations[micro_batch] = self._model.activations_of(choice)
        return found

    def _moments(self, micro_batch: int, grad_accum: int) -> tuple[LayerWalk, Moment]:
        """Forward and backward through the layers, and the loss between them."""
        accumulates = grad_accum > 1
        walker = self._walkers.get(accumulates)
        if walker is None:
            choice, arch = self._choice, self._model.job.architecture
            depth = depth_of(arch.order, choice.recompute, "activations" in choice.offload)
            walker = LayerWalker(depth, self.states, self.shard, tied=arch.tied, accumulates=accumulates)
            self._walkers[accumulates] = walker
        layers = self._walks.get((micro_batch, accumulates))
        if layers is None:
            layers = walker.at(self.activations(micro_batch)[1], micro_batch)
            self._walks[(micro_batch, accumulates)] = layers
        loss = self._losses.get(micro_batch)
        if loss is None:
            choice = replace(self._choice, micro_batch=micro_batch)
            loss = self._losses[micro_batch] = self._model.loss_of(choice)
        # With accumulation the gradients of earlier micro-batches live through the whole step.
        persisting = self.states.all_gradients if accumulates else 0.0
        return layers, loss_moment(walker, layers, loss, self.shard, persisting)

    def phases(self, micro_batch: int, grad_accum: int) -> list[Phase]:
        """Every phase of one optimizer step, part by part."""
        layers, loss = self._moments(micro_batch, grad_accum)
        moments = {
            "forward": layers.forward,
            "loss": loss,
            "backward": layers.backward,
            "step": self.step,
        }
        return phases(self.states, self.shard, moments)

    def host(self, micro_batch: int) -> tuple[int, int]:
        """(pinned, pageable) host bytes of one node."""
        choice, held = self._choice, self.held
        ranks = min(choice.num_gpus, self._model.hardware.gpus_per_node)
        pinned = pageable = 0
        if "activations" in choice.offload:
            at = self.activations(micro_batch)[1]
            pinned += ranks * sum(at.kinds[index].full.kept for index in self._model.job.architecture.order)
        if "optimizer" in choice.offload:
            pinned += int(ranks * (held.master + held.moment1 + held.moment2))
        if "params" in choice.offload:
            pinned += int(ranks * (held.weights + held.gradients))
        return pinned, pageable
