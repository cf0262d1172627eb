"""Phases: the walk through one optimizer step on one rank; every phase at its worst moment.

At every moment: what is at rest + what is saved + the transient of the moment. Forward stacks saved tensors up, the
loss comes on top, backward walks the layers down while gradients rise, the step holds its own work.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.architecture import Architecture
from planner.blocks import Block, Blocks
from planner.choice import Choice
from planner.coefficients import Coefficients, LayerBytes
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


@dataclass(frozen=True, slots=True)
class LayerAt:
    """``LayerBytes`` at one token count."""

    saved: int
    boundary: int
    selective: int
    forward: int
    recompute: int
    backward: int


@dataclass(frozen=True, slots=True)
class ActivationsAt:
    """All coefficients at one token count; layers in the order of ``Architecture.kinds``."""

    kinds: tuple[LayerAt, ...]
    model_saved: int
    final_norm: int


def activations_at(coefficients: Coefficients, tokens: int, sequence: int) -> ActivationsAt:
    """Evaluate ``coefficients`` for one rank's ``tokens`` in sequences of ``sequence`` tokens."""

    def layer(b: LayerBytes) -> LayerAt:
        affine = (b.saved, b.boundary, b.selective, b.forward_transient, b.recompute_extra, b.backward_transient)
        return LayerAt(*(a.at(tokens, sequence) for a in affine))

    return ActivationsAt(
        tuple(layer(b) for b in coefficients.layers),
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


class Walk:
    """One optimizer step of one choice; ``phases()`` returns it phase by phase."""

    def __init__(
        self,
        architecture: Architecture,
        choice: Choice,
        blocks: Blocks,
        roles: RoleTable,
        held: HeldBytes,
        at: ActivationsAt,
        loss: LossBytes,
        shard: ShardingBytes,
    ) -> None:
        self.order, self.tied = architecture.order, architecture.tied
        self.choice, self.at, self.loss, self.shard = choice, at, loss, shard
        on_card = 0.0 if "params" in choice.offload else 1.0
        states = 0.0 if "optimizer" in choice.offload else 1.0
        self.rest = {
            "weights": held.weights * on_card,
            "master": held.master * states,
            "moment1": held.moment1 * states,
            "moment2": held.moment2 * states,
        }
        self.all_gradients = held.gradients * on_card
        self.layer_gradients = [held_bytes(block, roles).gradients * on_card for block in blocks.kinds]
        embedding = held_bytes(blocks.embedding, roles).gradients * on_card
        tail = held_bytes(blocks.final_norm + blocks.head, roles).gradients * on_card
        self.embedding_gradients = embedding
        self.tail_gradients = tail + (embedding if self.tied else 0.0)
        self.recomputed = recomputed_layers(choice.recompute, len(self.order))
        self.kept = self._kept()
        # With accumulation the gradients of earlier micro-batches live through the whole step.
        self.persisting = self.all_gradients if choice.grad_accum > 1 else 0.0
        casts = uses_autocast(choice) and choice.weights == "fp32"
        self.cast_bytes = [2.0 * weights if casts else 0.0 for weights in blocks.cast_weights]

    def _kept(self) -> list[int]:
        """Bytes that each layer keeps on the card from forward to backward."""
        selective = self.choice.recompute == "selective"
        kept: list[int] = []
        for kind, recomputed in zip(self.order, self.recomputed, strict=True):
            layer = self.at.kinds[kind]
            kept.append((layer.selective if selective else layer.boundary) if recomputed else layer.saved)
        if "activations" in self.choice.offload:
            first = max(0, len(kept) - OFFLOAD_BANDS)
            kept = [0] * first + kept[first:]
        return kept

    def _phase(self, name: str, **parts: float) -> Phase:
        merged = {**self.rest, **parts}
        return Phase(name, {part: int(merged.get(part, 0.0)) for part in PARTS})

    def phases(self) -> list[Phase]:
        """Every phase of one optimizer step, in order."""
        load = Phase("load", dict.fromkeys(PARTS, 0))
        load.parts["weights"], load.parts["gather"] = int(self.rest["weights"]), self.shard.load_bytes
        save = self._phase("save", gather=self.shard.save_bytes, buckets=self.shard.rest_buckets)
        return [load, self._forward(), self._loss(), self._backward(), self._step(), save]

    def _forward(self) -> Phase:
        """Saved tensors stack up; autocast's copies of the weights used so far stay cached."""
        highest = -1.0
        worst: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        saved, casts = float(self.at.model_saved), 0.0
        for index, kind in enumerate(self.order):
            transient, gather = float(self.at.kinds[kind].forward), float(self.shard.layer_gather[kind])
            casts += self.cast_bytes[kind]
            if saved + transient + gather + casts > highest:
                highest, worst = saved + transient + gather + casts, (saved, transient, casts, gather)
            saved += self.kept[index]
        saved, transient, casts, gather = worst
        return self._phase(
            "forward",
            gradients=self.persisting,
            saved_activations=saved,
            recompute=transient,
            gather=gather + self.shard.root_forward,
            casts=casts,
            buckets=self.shard.rest_buckets,
        )

    def _backward_casts(self) -> float:
        """Copies that layers without recompute saved; a recomputed layer kept none."""
        pairs = zip(self.order, self.recomputed, strict=True)
        return sum(self.cast_bytes[kind] for kind, recomputed in pairs if not recomputed)

    def _loss(self) -> Phase:
        """The loss forward and backward, on top of everything that is saved."""
        forward_casts = sum(self.cast_bytes[kind] for kind in self.order)
        backward_casts = self._backward_casts()
        moments = ((self.loss.forward, forward_casts), (self.loss.backward, backward_casts))
        loss, casts = max(moments, key=sum)
        return self._phase(
            "loss",
            gradients=self.persisting,
            saved_activations=self.at.model_saved + sum(self.kept) + self.at.final_norm,
            loss=loss,
            gather=self.shard.root_loss,
            casts=casts,
            buckets=self.shard.rest_buckets,
        )

    def _backward(self) -> Phase:
        """Layers from the last to the first: saved tensors fall while gradients rise."""
        accumulates = self.persisting > 0
        gradients = 0.0 if accumulates else self.tail_gradients
        saved, casts = float(self.at.model_saved + sum(self.kept)), self._backward_casts()
        highest = -1.0
        worst: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        for index in range(len(self.order) - 1, -1, -1):
            kind, layer = self.order[index], self.at.kinds[self.order[index]]
            transient = float(layer.recompute if self.recomputed[index] else layer.backward)
            gather, reduced = float(self.shard.layer_gather[kind]), float(self.shard.layer_reduce[kind])
            live = saved + gradients + transient + gather + reduced + casts
            if live > highest:
                highest, worst = live, (saved, gradients, transient, casts, gather, reduced)
            saved -= self.kept[index]
            if not self.recomputed[index]:
                casts -= self.cast_bytes[kind]
            if not accumulates:
                gradients += self.layer_gradients[kind]
        # The embedding's gradient comes last. Tied to the head, it is added out of place to the one that exists:
        # both and their sum live at once.
        last = gradients + self.embedding_gradients * (2.0 if self.tied else 1.0)
        if last > highest and not accumulates:
            worst = (0.0, last, 0.0, 0.0, 0, 0)
        saved, gradients, transient, casts, gather, reduced = worst
        return self._phase(
            "backward",
            gradients=self.persisting + gradients,
            saved_activations=saved,
            recompute=transient,
            gather=gather + self.shard.root_backward,
            casts=casts,
            buckets=self.shard.rest_buckets + reduced,
        )

    def _step(self) -> Phase:
        """The optimizer's own copies; on the host when its states are offloaded."""
        work = find_optimizer(self.choice.optimizer).step_transient * self.all_gradients + self.shard.step_bytes
        if "optimizer" in self.choice.offload:
            work = 0.0
        return self._phase("step", gradients=self.all_gradients, recompute=work, buckets=self.shard.rest_buckets)
