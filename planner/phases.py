"""Phases: the walk through one optimizer step on one rank; every phase at its worst moment.

At every moment: what is at rest + what is saved + the transient of the moment. Forward stacks saved tensors up, the
loss comes on top, backward walks the layers down while gradients rise, the step holds its own work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.blocks import Block, Blocks
from planner.choice import FSDP2, Choice
from planner.coefficients import Coefficients, ModeBytes
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

OFFLOAD_BANDS = 4
"""Layer inputs alive on the card at once while checkpoints are offloaded (TRL's long-context profile of Qwen3-4B)."""


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


def recomputed_layers(recompute: str, num_layers: int) -> list[bool]:
    """Which layers are recomputed: every n-th means index % n == 0, as transformers applies it."""
    if recompute.startswith("every_"):
        n = int(recompute.removeprefix("every_"))
        return [index % n == 0 for index in range(num_layers)]
    return [recompute in ("full", "selective")] * num_layers


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers that behave alike."""

    kind: int
    count: int
    kept: int
    """Bytes that one of these layers keeps on the card from forward to backward."""
    mode: ModeAt
    """Extra bytes of one of these layers while it runs."""
    recomputed: bool


def layer_runs(order: tuple[int, ...], choice: Choice, at: ActivationsAt) -> tuple[Run, ...]:
    """The decoder as runs of like layers: inside one, everything is affine in depth, so only its ends can be a peak."""
    again = recomputed_layers(choice.recompute, len(order))
    first_kept = len(order) - OFFLOAD_BANDS if "activations" in choice.offload else 0
    runs: list[Run] = []
    for index, (kind, recomputed) in enumerate(zip(order, again, strict=True)):
        layer = at.kinds[kind]
        mode = layer.none
        if recomputed:
            mode = layer.selective if choice.recompute == "selective" else layer.full
        kept = mode.kept if index >= first_kept else 0
        last = runs[-1] if runs else None
        if last is not None and (last.kind, last.kept, last.recomputed) == (kind, kept, recomputed):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Run(kind, 1, kept, mode, recomputed))
    return tuple(runs)


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
    )


class Walk:
    """One optimizer step of one choice; ``moments()`` finds the worst moment of every phase."""

    __slots__ = ("all_kept", "at", "choice", "loss", "persisting", "runs", "shard", "states", "tied")

    def __init__(
        self,
        choice: Choice,
        states: States,
        runs: tuple[Run, ...],
        at: ActivationsAt,
        loss: LossBytes,
        shard: ShardingBytes,
        *,
        tied: bool,
    ) -> None:
        self.choice, self.states, self.runs, self.tied = choice, states, runs, tied
        self.at, self.loss, self.shard = at, loss, shard
        # With accumulation the gradients of earlier micro-batches live through the whole step.
        self.persisting = states.all_gradients if choice.grad_accum > 1 else 0.0
        self.all_kept = float(sum(run.kept * run.count for run in runs))

    def moments(self) -> dict[str, Moment]:
        """Worst moment of each phase between loading and saving."""
        return {"forward": self.forward(), "loss": self.at_loss(), "backward": self.backward(), "step": self.step()}

    def peak_bytes(self) -> int:
        """Bytes of the highest phase."""
        highest = max(sum(moment) for moment in (self.forward(), self.at_loss(), self.backward(), self.step()))
        return int(self.states.rest_bytes + highest)

    def phases(self) -> list[Phase]:
        """Every phase of one optimizer step, in order, part by part."""
        load = Phase("load", dict.fromkeys(PARTS, 0))
        load.parts["weights"], load.parts["gather"] = int(self.states.rest["weights"]), self.shard.load_bytes
        save = Moment(gather=self.shard.save_bytes, buckets=self.shard.rest_buckets)
        found = [load]
        for name, moment in {**self.moments(), "save": save}.items():
            merged = {**self.states.rest, **moment._asdict()}
            found.append(Phase(name, {part: int(merged.get(part, 0.0)) for part in PARTS}))
        return found

    def forward(self) -> Moment:
        """Saved tensors stack up; autocast's copies of the weights used so far stay cached."""
        highest = -1.0
        worst = (0.0, 0.0, 0.0, 0.0)
        saved, casts = float(self.at.model_saved), 0.0
        for run in self.runs:
            # Saved tensors and copies only grow inside a run, so its last layer is its worst.
            saved += run.kept * (run.count - 1)
            casts += self.states.cast_bytes[run.kind] * run.count
            transient, gather = (
                float(run.mode.forward),
                float(self.shard.layer_gather[run.kind] + self.shard.ring[run.kind]),
            )
            live = saved + transient + gather + casts
            if live > highest:
                highest, worst = live, (saved, transient, casts, gather)
            saved += run.kept
        saved, transient, casts, gather = worst
        return Moment(
            gradients=self.persisting,
            saved_activations=saved,
            recompute=transient,
            gather=gather + self.shard.root_forward,
            casts=casts,
            buckets=self.shard.rest_buckets,
        )

    def _backward_casts(self) -> float:
        """Copies that layers without recompute saved; a recomputed layer kept none."""
        return sum(self.states.cast_bytes[run.kind] * run.count for run in self.runs if not run.recomputed)

    def at_loss(self) -> Moment:
        """The loss forward and backward, on top of everything that is saved."""
        forward_casts = sum(self.states.cast_bytes[run.kind] * run.count for run in self.runs)
        backward_casts = self._backward_casts()
        in_forward = self.loss.forward + forward_casts >= self.loss.backward + backward_casts
        return Moment(
            gradients=self.persisting,
            saved_activations=self.at.model_saved + self.all_kept + self.at.final_norm,
            loss=self.loss.forward if in_forward else self.loss.backward,
            gather=self.shard.root_loss,
            casts=forward_casts if in_forward else backward_casts,
            buckets=self.shard.rest_buckets,
        )

    def backward(self) -> Moment:
        """Layers from the last to the first: saved tensors fall while gradients rise."""
        accumulates = self.persisting > 0
        gradients = 0.0 if accumulates else self.states.tail_gradients
        saved, casts = self.at.model_saved + self.all_kept, self._backward_casts()
        highest = -1.0
        worst = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        for run in reversed(self.runs):
            kind, transient, gather = run.kind, float(run.mode.backward), float(self.shard.layer_gather[run.kind])
            # The ring's buffers live with the attention block, not with the MLP.
            if run.mode.attention_backward + self.shard.ring[kind] > transient:
                transient, gather = float(run.mode.attention_backward), gather + self.shard.ring[kind]
            reduced = float(self.shard.layer_reduce[kind])
            added = 0.0 if accumulates else self.states.layer_gradients[kind]
            freed = 0.0 if run.recomputed else self.states.cast_bytes[kind]
            # Inside a run everything is affine in depth: its first or its last layer is its worst.
            for depth in {0, run.count - 1}:
                here = (saved - run.kept * depth, gradients + added * depth, transient, casts - freed * depth)
                live = sum(here) + gather + reduced
                if live > highest:
                    highest, worst = live, (*here, gather, reduced)
            saved -= run.kept * run.count
            gradients += added * run.count
            casts -= freed * run.count
        # The embedding's gradient comes last. Tied to the head, it is added out of place to the one that exists:
        # both and their sum live at once.
        last = gradients + self.states.embedding_gradients * (2.0 if self.tied else 1.0)
        if last > highest and not accumulates:
            worst = (0.0, last, 0.0, 0.0, 0.0, 0.0)
        saved, gradients, transient, casts, gather, reduced = worst
        return Moment(
            gradients=self.persisting + gradients,
            saved_activations=saved,
            recompute=transient,
            gather=gather + self.shard.root_backward,
            casts=casts,
            buckets=self.shard.rest_buckets + reduced,
        )

    def step(self) -> Moment:
        """The optimizer's own copies; on the host when its states are offloaded."""
        work = find_optimizer(self.choice.optimizer).step_transient * self.states.all_gradients + self.shard.step_bytes
        if "optimizer" in self.choice.offload:
            work = 0.0
        return Moment(gradients=self.states.all_gradients, recompute=work, buckets=self.shard.rest_buckets)
