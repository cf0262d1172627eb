"""Phases: the walk through one optimizer step on one rank; every phase at its worst moment.

At every moment: what is at rest + what is saved + the transient of the moment. Forward stacks saved tensors up, the
loss comes on top, backward walks the layers down while gradients rise, the step holds its own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from planner.choice import FSDP2, ZERO, Choice
from planner.memory.activations import ActivationsAt, LayerAt, mode_of, outside_layers
from planner.memory.blocks import Block, Blocks
from planner.memory.depth import Depth
from planner.memory.loss import LossBytes
from planner.memory.optimizers import find_optimizer
from planner.memory.sharding import NOTHING_BESIDE, ZERO_BUCKET_ELEMENTS, ShardingBytes
from planner.memory.states import RoleTable, uses_autocast

PARTS = (
    "weights",
    "gradients",
    "master",
    "moment1",
    "moment2",
    "saved_activations",
    "recompute",
    "loss",
    "gather",
    "buckets",
    "casts",
    "offload_buffers",
    "context",
    "slack",
)
"""Names of the parts of a phase, in the order they are drawn."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase at its worst moment."""

    name: str
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes at rest of some parameters by role, gradients included, on one rank."""

    weights: float
    gradients: float
    master: float
    moment1: float
    moment2: float


def held_bytes(block: Block, roles: RoleTable) -> HeldBytes:
    """What ``block`` holds at rest."""
    t, a, trained, adapter = roles.trained, roles.adapters, block.trained, block.adapter
    frozen = block.frozen * roles.frozen.weights / roles.frozen.weights_ranks
    quantised = block.quantised * roles.quantised.weights_here
    return HeldBytes(
        weights=trained * t.weights / t.weights_ranks + adapter * a.weights / a.weights_ranks + frozen + quantised,
        gradients=trained * t.gradients / t.gradients_ranks + adapter * a.gradients / a.gradients_ranks,
        master=(trained * t.master + adapter * a.master) / t.optimizer_ranks,
        moment1=(trained * t.moment1 + adapter * a.moment1) / t.optimizer_ranks,
        moment2=(trained * t.moment2 + adapter * a.moment2) / t.optimizer_ranks,
    )


class Moment(NamedTuple):
    """The parts of a phase's worst moment that are not at rest."""

    gradients: float = 0.0
    saved_activations: float = 0.0
    recompute: float = 0.0
    loss: float = 0.0
    gather: float = 0.0
    buckets: float = 0.0
    casts: float = 0.0


@dataclass(frozen=True, slots=True)
class States:
    """What is at rest on the card, and gradients by part of the model; shared by all candidates with these states."""

    rest: dict[str, float]
    """By role; gradients among them where one buffer holds them for good."""
    rest_bytes: float
    all_gradients: float
    layer_gradients: tuple[float, ...]
    embedding_gradients: float
    tail_gradients: float
    """Final norm and head, the tied embedding included."""
    cast_bytes: tuple[float, ...]
    """Low-precision copies of one layer of each kind under autocast."""
    step_bytes: float
    """The optimizer's own copies during its step."""


def resident_states(choice: Choice, blocks: Blocks, roles: RoleTable, held: HeldBytes, *, tied: bool) -> States:
    """States under ``choice``, less what it offloads."""
    on_card = 0.0 if "params" in choice.offload else 1.0
    states = 0.0 if "optimizer" in choice.offload else 1.0
    rest = {
        "weights": held.weights * on_card,
        "master": held.master * states,
        "moment1": held.moment1 * states,
        "moment2": held.moment2 * states,
    }
    # DeepSpeed keeps the gradients of an offloaded optimizer on the host (stage3.py: grad_partitions_flat_buffer;
    # stage_1_and_2.py: async_inplace_copy_grad_to_fp32_buffer_from_gpu).
    gradients_here = states if choice.sharding in ZERO else on_card
    every = held.gradients * gradients_here
    embedding = held_bytes(blocks.embedding, roles).gradients * gradients_here
    tail = held_bytes(blocks.final_norm + blocks.head, roles).gradients * gradients_here
    layers = tuple(held_bytes(block, roles).gradients * gradients_here for block in blocks.kinds)
    # Under FSDP2 the embedding's gradient is whole at the end, under FSDP1 that of head and final norm too:
    # sharding_memory counts them.
    if choice.sharding == "fsdp1":
        tail = 0.0
    elif choice.sharding in FSDP2:
        embedding = 0.0
    elif tied:
        tail += embedding
    if choice.sharding == "zero2":
        # The rank with the head makes room for all its gradients when the first bucket is reduced
        # (copy_grads_in_partition).
        tail = every if blocks.total.trainable > ZERO_BUCKET_ELEMENTS else 0.0
        embedding, layers = 0.0, (0.0,) * len(layers)
    elif choice.sharding == "zero3":
        # One buffer, made with the optimizer (_setup_for_real_optimizer).
        rest["gradients"] = every
        every, embedding, tail, layers = 0.0, 0.0, 0.0, (0.0,) * len(layers)
    casts = 2.0 if uses_autocast(choice) and choice.weights == "fp32" else 0.0
    # Beside a low-precision base PEFT holds adapters in fp32 too; those of a quantised base are bf16.
    adapter_casts = 2.0 if uses_autocast(choice) and roles.adapters.weights == 4 else 0.0
    return States(
        rest=rest,
        rest_bytes=sum(rest.values()),
        all_gradients=every,
        layer_gradients=layers,
        embedding_gradients=embedding,
        tail_gradients=tail,
        cast_bytes=tuple(
            casts * weights + adapter_casts * adapters
            for weights, adapters in zip(blocks.cast_weights, blocks.cast_adapters, strict=True)
        ),
        # States on the host are updated there. An optimizer of master copies works in their width.
        step_bytes=find_optimizer(choice.optimizer).step_transient * (held.master or held.gradients) * on_card * states,
    )


class LayerWalk(NamedTuple):
    """Forward and backward through the layers at one micro-batch."""

    forward: Moment
    forward_bytes: float
    """All of ``forward`` together."""
    backward: Moment
    backward_bytes: float
    saved: float
    """Kept by the whole model when the loss begins."""


class _Station(NamedTuple):
    """A layer where the peak can be, with all that is live there whatever the tokens."""

    shape: int
    kept_layers: tuple[int, ...]
    """Layers of each shape whose saved tensors are there."""
    gradients: float
    gather: float
    ring: float
    """Per row of the micro-batch."""
    buckets: float
    casts: float
    copy: float = 0.0
    """Forward: gathered before the layer runs, and gone then."""


class LayerWalker:
    """The walk through the layers whatever the loss and the optimizer, ready for any micro-batch."""

    __slots__ = ("_backward", "_depth", "_forward", "_last", "backward_casts", "forward_casts")

    def __init__(self, depth: Depth, states: States, shard: ShardingBytes, *, tied: bool, accumulates: bool) -> None:
        """Work out what does not depend on tokens.

        Args:
            depth: which layers behave alike.
            states: gradients and casts by part.
            shard: gathers, buffers and rings of the sharding.
            tied: head and embedding are one matrix.
            accumulates: gradients of earlier micro-batches live through the whole step.
        """
        self._depth = depth
        kinds = [shape.kind for shape in depth.shapes]
        gather, ring = [float(shard.layer_gather[k]) for k in kinds], [float(shard.ring[k]) for k in kinds]
        casts = [states.cast_bytes[k] for k in kinds]
        # Layers without recompute save their copies for backward; a recomputed layer kept none.
        held = [0.0 if shape.recompute != "none" else cast for cast, shape in zip(casts, depth.shapes, strict=True)]
        added = [0.0 if accumulates else states.layer_gradients[k] for k in kinds]
        persisting, tail = (states.all_gradients, 0.0) if accumulates else (0.0, states.tail_gradients)
        made, buckets = tail + _times(depth.totals, added), float(shard.rest_buckets)
        back = buckets + shard.backward_buckets
        self.forward_casts, self.backward_casts = _times(depth.totals, casts), _times(depth.totals, held)
        # Autocast's copies of the weights used so far stay cached.
        forward: list[_Station] = []
        for s, n, place in depth.forward:
            beside = shard.beside[place] if shard.beside else NOTHING_BESIDE
            whole, of_casts = gather[s] + shard.root_forward + beside.forward_gather, _times(n, casts) + casts[s]
            forward.append(_Station(s, n, persisting, whole, ring[s], buckets, of_casts, beside.forward_copy))
        self._forward = tuple(forward)
        backward: list[_Station] = []
        for s, before, place in depth.backward:
            kept = (*before[:s], before[s] + 1, *before[s + 1 :])
            gradients, reduced = persisting + made - _times(kept, added), back + shard.layer_reduce[kinds[s]]
            beside = shard.beside[place] if shard.beside else NOTHING_BESIDE
            whole, of_casts = gather[s] + shard.root_backward + beside.backward_gather, _times(kept, held)
            reduced += beside.reduced
            if shard.inputs_stay:
                kept = _with_stayed(kept, depth.totals)
            backward.append(_Station(s, kept, gradients, whole, ring[s], reduced, of_casts))
        self._backward = tuple(backward)
        # The embedding's gradient comes last. Tied to the head, it is added out of place to the one that exists: both
        # and their sum live at once. One that accumulates is there already.
        last = persisting or made + states.embedding_gradients * (2.0 if tied else 1.0)
        whole = shard.root_backward if shard.last_gather is None else shard.last_gather
        self._last = Moment(gradients=last + shard.last_gradients, gather=whole, buckets=back + shard.last_reduce)

    def at(self, at: ActivationsAt, rows: int) -> LayerWalk:
        """The worst moments of forward and backward at ``rows`` sequences on this rank."""
        shapes = self._depth.shapes
        base = outside_layers(at, (shape.recompute for shape in shapes))
        modes = [mode_of(at, shape.kind, shape.recompute) for shape in shapes]
        kept = [mode.kept if shape.on_card else 0 for mode, shape in zip(modes, shapes, strict=True)]
        highest, worst = -1.0, (self._forward[0], 0.0, 0.0, 0.0)
        for station in self._forward:
            shape, before, gradients, gather, ring, buckets, casts, copy = station
            saved = base + _times(before, kept)
            transient: float = modes[shape].forward
            gather += ring * rows
            if copy:
                transient, gather = _arriving(transient, gather, copy - ring * rows, at.kinds[shapes[shape].kind])
            live = gradients + saved + transient + gather + buckets + casts
            if live > highest:
                highest, worst = live, (station, saved, transient, gather)
        forward = _moment(*worst)
        highest_back, worst_back = sum(self._last) if self._last.gradients or self._last.buckets else -1.0, None
        for station in self._backward:
            shape, before, gradients, gather, ring, buckets, casts, _ = station
            saved = base + _times(before, kept)
            _, _, transient, at_attention = modes[shape]
            # The ring's buffers live with the attention block, not with the MLP.
            if ring and at_attention + ring * rows > transient:
                transient, gather = at_attention, gather + ring * rows
            live = gradients + saved + transient + gather + buckets + casts
            if live > highest_back:
                highest_back, worst_back = live, (station, saved, transient, gather)
        backward = _moment(*worst_back) if worst_back else self._last
        saved = base + _times(self._depth.totals, kept) + at.final_norm
        return LayerWalk(forward, highest, backward, highest_back, saved)

    def evaluation(self, at: ActivationsAt, rows: int, loss: LossBytes, shard: ShardingBytes) -> Moment:
        """The worst moment of a forward pass that keeps nothing for backward, its loss included.

        No gradient exists: the trainer drops them after every step, and evaluation comes after one. A layer without
        autograd runs as a checkpointed one does, whose only kept tensor is its input. Autocast caches all the same.
        """
        hidden = at.model_saved + at.final_norm
        moments = [Moment(0.0, hidden, 0.0, loss.forward, shard.root_loss, shard.rest_buckets, self.forward_casts)]
        for shape, _, _, gather, ring, buckets, casts, copy in self._forward:
            layer = at.kinds[self._depth.shapes[shape].kind]
            kept = at.model_saved + layer.full.kept
            transient: float = layer.full.forward
            gather += ring * rows
            if copy:
                transient, gather = _arriving(transient, gather, copy - ring * rows, layer)
            moments.append(Moment(0.0, kept, transient, 0.0, gather, buckets, casts))
        return max(moments, key=sum)


def _arriving(transient: float, gather: float, more: float, layer: LayerAt) -> tuple[float, float]:
    """(working set, gathered) of a layer's forward, or of the moment before it when its weights have just arrived.

    What it reads is there by then: the one tensor that a recomputed layer keeps. ``more`` is gathered then than later.
    """
    before = layer.full.kept
    return (before, gather + more) if before + more > transient else (transient, gather)


def _with_stayed(kept: tuple[int, ...], totals: tuple[int, ...]) -> tuple[int, ...]:
    """``kept`` layers, and twice those that backward has left behind: their inputs and the gradients of these.

    The gradient that arrives at the layer in work is the input gradient of the one before, and counted with the layer.
    """
    behind = [total - here for total, here in zip(totals, kept, strict=True)]
    stayed = [2 * number for number in behind]
    nearest = next((shape for shape, number in enumerate(behind) if number), None)
    if nearest is not None:
        stayed[nearest] -= 1
    return tuple(here + more for here, more in zip(kept, stayed, strict=True))


def _moment(station: _Station, saved: float, transient: float, gather: float) -> Moment:
    return Moment(station.gradients, saved, transient, 0.0, gather, station.buckets, station.casts)


def _times(counts: tuple[int, ...], sizes: list[float] | list[int]) -> float:
    """Bytes of ``counts`` layers of each shape."""
    if len(counts) == 1:
        return counts[0] * sizes[0]
    return float(sum(map(mul, counts, sizes)))


def loss_moment(
    walker: LayerWalker, layers: LayerWalk, loss: LossBytes, shard: ShardingBytes, persisting: float
) -> Moment:
    """The loss forward or backward, whichever is higher, on top of everything that is saved."""
    after = shard.root_loss if shard.loss_backward is None else shard.loss_backward
    forward, backward = walker.forward_casts, walker.backward_casts
    moments = [
        (loss.forward, shard.root_loss, 0, forward),
        (loss.backward, after + (0 if loss.at_head else shard.loss_ahead), 0, backward),
        (loss.at_head, after + shard.loss_ahead, 0, backward),
    ]
    if shard.beside:
        moments += [(0, shard.root_loss + shard.loss_copy, 0, 0), (0, shard.tail_gather, shard.tail_reduce, 0)]
    size, gather, reduced, casts = max(moments, key=sum)
    return Moment(persisting, layers.saved, 0.0, size, gather, shard.rest_buckets + reduced, casts)


def step_moment(choice: Choice, states: States, shard: ShardingBytes) -> Moment:
    """The optimizer's own copies; on the host when its states are offloaded."""
    here = 0 if "optimizer" in choice.offload else 1
    # Stage 1 lets go of the gradients that other ranks update (stage_1_and_2.py: step, free_grad_in_param_list).
    gradients = states.all_gradients / (choice.shard_ranks if choice.sharding == "zero1" else 1)
    work = max(states.step_bytes, shard.step_copy * here) + shard.step_bytes * here
    if shard.step_gather > work:
        return Moment(gradients=gradients, gather=shard.step_gather, buckets=shard.rest_buckets)
    return Moment(gradients=gradients, recompute=work, buckets=shard.rest_buckets)


def phases(states: States, shard: ShardingBytes, moments: dict[str, Moment]) -> list[Phase]:
    """Every phase from loading to saving, part by part.

    Args:
        states: what is at rest.
        shard: what loading and saving gather.
        moments: the worst moment of forward, loss, backward and step.
    """
    load = Phase("load", dict.fromkeys(PARTS, 0))
    load.parts["weights"], load.parts["gather"] = int(states.rest["weights"]), shard.load_bytes
    save = Moment(gather=shard.save_bytes, buckets=shard.rest_buckets)
    found = [load]
    for name, moment in {**moments, "save": save}.items():
        merged = {**states.rest, **moment._asdict()}
        merged["gradients"] += states.rest.get("gradients", 0.0)
        found.append(Phase(name, {part: int(merged.get(part, 0.0)) for part in PARTS}))
    return found
