"""Phases: the walk through one optimizer step on one rank; every phase at its worst moment.

At every moment: what is at rest + what is saved + the transient of the moment. Forward stacks saved tensors up, the
loss comes on top, backward walks the layers down while gradients rise, the step holds its own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from planner.blocks import Block, Blocks
from planner.choice import FSDP2, Choice
from planner.coefficients import Coefficients, ModeBytes
from planner.depth import Depth
from planner.loss_memory import LossBytes
from planner.optimizers import find_optimizer
from planner.sharding_memory import ShardingBytes
from planner.states import RoleTable, uses_autocast

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


class ModeAt(NamedTuple):
    """``ModeBytes`` at one token count."""

    kept: int
    forward: int
    backward: int
    attention_backward: int


class LayerAt(NamedTuple):
    """``LayerBytes`` at one token count."""

    none: ModeAt
    full: ModeAt
    selective: ModeAt


@dataclass(frozen=True, slots=True)
class ActivationsAt:
    """All coefficients at one token count; layers in the order of ``Architecture.kinds``."""

    kinds: tuple[LayerAt, ...]
    model_saved: int
    final_norm: int


def activations_at(coefficients: Coefficients, tokens: int, sequence: int) -> ActivationsAt:
    """Evaluate ``coefficients`` for one rank's ``tokens`` in sequences of ``sequence`` tokens."""

    def mode(b: ModeBytes) -> ModeAt:
        return ModeAt(*(a.at(tokens, sequence) for a in (b.kept, b.forward, b.backward, b.attention_backward)))

    return ActivationsAt(
        tuple(LayerAt(mode(b.none), mode(b.full), mode(b.selective)) for b in coefficients.layers),
        coefficients.model_saved.at(tokens, sequence),
        coefficients.final_norm_saved.at(tokens, sequence),
    )


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
    quantised = block.quantised * roles.quantised.weights / roles.quantised.weights_ranks
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
    embedding = held_bytes(blocks.embedding, roles).gradients * on_card
    tail = held_bytes(blocks.final_norm + blocks.head, roles).gradients * on_card
    casts = 2.0 if uses_autocast(choice) and choice.weights == "fp32" else 0.0
    return States(
        rest=rest,
        rest_bytes=sum(rest.values()),
        all_gradients=held.gradients * on_card,
        layer_gradients=tuple(held_bytes(block, roles).gradients * on_card for block in blocks.kinds),
        embedding_gradients=embedding,
        # Under FSDP2 a tied embedding's gradient stays whole until the end: sharding_memory counts it.
        tail_gradients=tail + (embedding if tied and choice.sharding not in FSDP2 else 0.0),
        cast_bytes=tuple(casts * weights for weights in blocks.cast_weights),
        # States on the host are updated there.
        step_bytes=find_optimizer(choice.optimizer).step_transient * held.gradients * on_card * states,
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


class LayerWalker:
    """The walk through the layers whatever the loss and the optimizer, ready for any micro-batch."""

    __slots__ = (
        "_backward",
        "_depth",
        "_forward",
        "_last",
        "backward_casts",
        "forward_casts",
    )

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
        self.forward_casts, self.backward_casts = _times(depth.totals, casts), _times(depth.totals, held)
        # Autocast's copies of the weights used so far stay cached.
        self._forward = tuple(
            _Station(s, n, persisting, gather[s] + shard.root_forward, ring[s], buckets, _times(n, casts) + casts[s])
            for s, n in depth.forward
        )
        backward: list[_Station] = []
        for s, before in depth.backward:
            kept = (*before[:s], before[s] + 1, *before[s + 1 :])
            gradients, reduced = persisting + made - _times(kept, added), buckets + shard.layer_reduce[kinds[s]]
            whole = gather[s] + shard.root_backward
            backward.append(_Station(s, kept, gradients, whole, ring[s], reduced, _times(kept, held)))
        self._backward = tuple(backward)
        # The embedding's gradient comes last. Tied to the head, it is added out of place to the one that exists: both
        # and their sum live at once. One that accumulates is there already.
        last = 0.0 if accumulates else made + states.embedding_gradients * (2.0 if tied else 1.0)
        self._last = Moment(gradients=last, gather=shard.root_backward, buckets=shard.rest_buckets)

    def at(self, at: ActivationsAt, rows: int) -> LayerWalk:
        """The worst moments of forward and backward at ``rows`` sequences on this rank."""
        shapes, base = self._depth.shapes, at.model_saved
        modes = [_mode(at, shape.kind, shape.recompute) for shape in shapes]
        kept = [mode.kept if shape.on_card else 0 for mode, shape in zip(modes, shapes, strict=True)]
        highest, worst = -1.0, (self._forward[0], 0.0, 0, 0.0)
        for station in self._forward:
            shape, before, gradients, gather, ring, buckets, casts = station
            saved = base + _times(before, kept)
            transient, gather = modes[shape].forward, gather + ring * rows
            live = gradients + saved + transient + gather + buckets + casts
            if live > highest:
                highest, worst = live, (station, saved, transient, gather)
        forward = _moment(*worst)
        highest_back, worst_back = sum(self._last) if self._last.gradients else -1.0, None
        for station in self._backward:
            shape, before, gradients, gather, ring, buckets, casts = station
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


def _moment(station: _Station, saved: float, transient: float, gather: float) -> Moment:
    return Moment(station.gradients, saved, transient, 0.0, gather, station.buckets, station.casts)


def _mode(at: ActivationsAt, kind: int, recompute: str) -> ModeAt:
    layer = at.kinds[kind]
    if recompute == "none":
        return layer.none
    return layer.selective if recompute == "selective" else layer.full


def _times(counts: tuple[int, ...], sizes: list[float] | list[int]) -> float:
    """Bytes of ``counts`` layers of each shape."""
    if len(counts) == 1:
        return counts[0] * sizes[0]
    return float(sum(map(mul, counts, sizes)))


def loss_moment(
    walker: LayerWalker, layers: LayerWalk, loss: LossBytes, shard: ShardingBytes, persisting: float
) -> Moment:
    """The loss forward or backward, whichever is higher, on top of everything that is saved."""
    size, casts = loss.backward, walker.backward_casts
    if loss.forward + walker.forward_casts >= size + casts:
        size, casts = loss.forward, walker.forward_casts
    return Moment(persisting, layers.saved, 0.0, size, shard.root_loss, shard.rest_buckets, casts)


def step_moment(choice: Choice, states: States, shard: ShardingBytes) -> Moment:
    """The optimizer's own copies; on the host when its states are offloaded."""
    partition = 0 if "optimizer" in choice.offload else shard.step_bytes
    return Moment(gradients=states.all_gradients, recompute=states.step_bytes + partition, buckets=shard.rest_buckets)


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
        found.append(Phase(name, {part: int(merged.get(part, 0.0)) for part in PARTS}))
    return found
