"""The space of candidates: which values each knob may take for a job on a machine, before any rule speaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import isqrt
from typing import Any, Literal

from planner.choice import (
    FSDP2,
    ZERO,
    Alters,
    Attention,
    Choice,
    LossPath,
    Method,
    MixedPrecision,
    OffloadTarget,
    Recompute,
    Weights,
)
from planner.hardware import Hardware

CP_FROM_TOKENS = 8192
"""Shorter sequences are split over cards only when pinned, or when there are fewer of them than cards: the ring costs
more than it frees."""
MAX_MICRO_BATCH = 256
ALONE: dict[str, OffloadTarget] = {"zero2": "optimizer", "zero3": "params"}
"""Sharding -> what it keeps on the host where one GPU leaves it nothing to divide. FSDP2 has no mesh there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """One way to hold weights and optimizer states, and whether it alters what the user asked for."""

    weights: Weights
    mixed_precision: MixedPrecision
    optimizer: str
    alters: Alters


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceOptions:
    """What bounds the space: the job, the stack's abilities, and the pins."""

    method: Method
    seq_len: int
    global_batch: int
    packing: bool
    loss_paths: tuple[LossPath, ...]
    attentions: tuple[Attention, ...]
    optimizers_8bit: tuple[str, ...] = ()
    allow_numerics: bool = False
    min_micro_batch: int = 1
    """The trainer refuses smaller ones (KTO needs two rows for its KL term)."""
    zero_alone: bool = False
    """DeepSpeed is there and the host's memory is known, so that one GPU too may keep states on the host."""
    pins: dict[str, Any] = field(default_factory=dict[str, Any])


def numerics_options(options: SpaceOptions, hardware: Hardware) -> list[Numerics]:
    """Ways to hold weights and states, the unaltered one first.

    TRL trains under bf16 autocast by default, and adapters on a base of 16 bits; a CPU gains no time from either, so
    runs there stay in fp32.
    """
    half: Literal["bf16", "fp16"] = "bf16" if hardware.has_bf16 else "fp16"
    on_cpu = hardware.device == "cpu"
    mixed: MixedPrecision = "no" if on_cpu else half
    usual = Numerics(
        weights="fp32" if options.method == "full" or on_cpu else half,
        mixed_precision=mixed,
        optimizer="adamw_torch_fused",
        alters="nothing",
    )
    out = [usual]
    if hardware.has_bf16 and options.allow_numerics and usual.weights == "fp32":
        smaller: MixedPrecision = "no" if options.method == "full" else "bf16"
        out.append(replace(usual, weights="bf16", mixed_precision=smaller, alters="numerics"))
    if options.allow_numerics:
        for optimizer in options.optimizers_8bit:
            out += [replace(n, optimizer=optimizer, alters="numerics") for n in out if n.optimizer == usual.optimizer]
    return _pinned_numerics(out, options.pins)


def _pinned_numerics(found: list[Numerics], pins: dict[str, Any]) -> list[Numerics]:
    """Numerics that obey the pins. A pin is the user's own word, so what it alone sets alters nothing."""
    knobs = ("weights", "mixed_precision", "optimizer")
    changes: dict[str, Any] = {knob: pins[knob] for knob in knobs if knob in pins}
    if not changes:
        return found
    kept: dict[tuple[str, str, str], Numerics] = {}
    for numerics in found:
        dtypes = (("weights", numerics.weights), ("mixed_precision", numerics.mixed_precision))
        if numerics.alters == "numerics" and any(changes.get(knob, value) != value for knob, value in dtypes):
            continue
        changed = replace(numerics, **changes)
        kept.setdefault((changed.weights, changed.mixed_precision, changed.optimizer), changed)
    return list(kept.values())


def gpu_counts(hardware: Hardware, pins: dict[str, Any], global_batch: int) -> list[int]:
    """Numbers of GPUs to try: powers of two inside a node, what divides the batch, the whole node, then whole nodes.

    Six cards of eight share a batch of 12, which eight do not.
    """
    if "gpus" in pins:
        return [pins["gpus"]]
    sizes = {"cp", "sp", "tp", "dp_shard", "dp_replicate"}
    if sizes <= pins.keys():
        total = 1
        for size in sizes:
            total *= pins[size]
        return [total]
    counts: set[int] = set()
    power = 1
    while power <= hardware.gpus_per_node:
        counts.add(power)
        power *= 2
    counts |= {number for number in range(1, hardware.gpus_per_node + 1) if global_batch % number == 0}
    if hardware.gpus_per_node:
        counts.add(hardware.gpus_per_node)
    for nodes in range(2, hardware.nodes + 1):
        if hardware.nodes % nodes == 0 or nodes == hardware.nodes:
            counts.add(nodes * hardware.gpus_per_node)
    return sorted(counts)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


def _layouts(num_gpus: int, hardware: Hardware, options: SpaceOptions) -> Iterator[dict[str, Any]]:
    """(sharding, sizes) for a number of GPUs."""
    pins = options.pins
    if num_gpus == 1:
        shardings: Iterable[str] = ("none",)
        if options.zero_alone:
            # The states of adapters are small: only their base is worth a host.
            shardings = ("none", "zero2", "zero3") if options.method == "full" else ("none", "zero3")
    else:
        shardings = ("ddp", "fsdp", "fsdp_no_reshard", "hsdp", "zero1", "zero2", "zero3")
    if "sharding" in pins:
        shardings = (pins["sharding"],)
    for sharding in shardings:
        for cp, sp in _sequence_splits(num_gpus, sharding, options):
            tp = pins.get("tp", 1)
            rest = num_gpus // (cp * sp * tp)
            if rest * cp * sp * tp != num_gpus:
                continue
            for shard, replicate in _data_splits(rest, sharding, hardware, pins):
                yield {
                    "sharding": sharding,
                    "cp": cp,
                    "sp": sp,
                    "tp": tp,
                    "dp_shard": shard,
                    "dp_replicate": replicate,
                }


def _sequence_splits(num_gpus: int, sharding: str, options: SpaceOptions) -> list[tuple[int, int]]:
    pins = options.pins
    splits = [(1, 1)]
    if num_gpus > 1 and (options.seq_len >= CP_FROM_TOKENS or options.global_batch < num_gpus):
        if sharding in FSDP2:
            splits += [(d, 1) for d in _divisors(num_gpus) if d > 1]
        if sharding in ZERO:
            splits += [(1, d) for d in _divisors(num_gpus) if d > 1]
    if "cp" in pins or "sp" in pins:
        return [(pins.get("cp", 1), pins.get("sp", 1))]
    return splits


def _data_splits(ranks: int, sharding: str, hardware: Hardware, pins: dict[str, Any]) -> list[tuple[int, int]]:
    """(dp_shard, dp_replicate) whose product is ``ranks``."""
    if sharding in ("none", "ddp"):
        found = [(1, ranks)]
    elif sharding == "hsdp":
        # Shard inside a node, replicate across nodes; inside one node, halves.
        found = [(d, ranks // d) for d in _divisors(ranks) if 1 < d < ranks]
        if hardware.nodes > 1:
            found = [pair for pair in found if pair[0] == hardware.gpus_per_node] or found
    else:
        found = [(ranks, 1)]
    if "dp_shard" in pins or "dp_replicate" in pins:
        shard = pins.get("dp_shard", ranks // pins.get("dp_replicate", 1))
        replicate = pins.get("dp_replicate", ranks // shard if shard else 0)
        return [(shard, replicate)] if shard * replicate == ranks else []
    return found


_ACTIVATIONS: frozenset[OffloadTarget] = frozenset({"activations"})
_OPTIMIZER: frozenset[OffloadTarget] = frozenset({"optimizer"})
_STATES: frozenset[OffloadTarget] = frozenset({"optimizer", "params"})


def _offloads(layout: dict[str, Any], pins: dict[str, Any]) -> list[frozenset[OffloadTarget]]:
    sharding = layout["sharding"]
    found = [pins["offload"]] if "offload" in pins else _free_offloads(sharding)
    if "sharding" in pins or layout["dp_shard"] * layout["cp"] * layout["sp"] > 1 or sharding not in ALONE:
        return found
    return [offload for offload in found if ALONE[sharding] in offload]


def _free_offloads(sharding: str) -> list[frozenset[OffloadTarget]]:
    out: list[frozenset[OffloadTarget]] = [frozenset(), _ACTIVATIONS]
    if sharding in ZERO:
        out += [_OPTIMIZER, _ACTIVATIONS | _OPTIMIZER]
    if sharding == "zero3" or sharding in FSDP2:
        out += [_STATES, _ACTIVATIONS | _STATES]
    return out


def frames(options: SpaceOptions, hardware: Hardware) -> Iterator[tuple[Choice, Alters]]:
    """Every combination of knobs but micro-batch and accumulation, with what it alters.

    Frames are not checked: rules judge them next. They carry the smallest micro-batch that keeps the global batch.
    """
    pins = options.pins
    recomputes: tuple[Recompute, ...] = (
        (pins["recompute"],) if "recompute" in pins else ("none", "selective", "every_4", "every_3", "every_2", "full")
    )
    loss_paths = (pins["loss_path"],) if "loss_path" in pins else options.loss_paths
    attentions = (pins["attention"],) if "attention" in pins else options.attentions
    numerics = numerics_options(options, hardware)
    for num_gpus in gpu_counts(hardware, pins, options.global_batch):
        for layout in _layouts(num_gpus, hardware, options):
            micro, accumulate = _first_batch(options, layout["dp_shard"] * layout["dp_replicate"])
            for held, loss_path, attention, recompute, offload in product(
                numerics, loss_paths, attentions, recomputes, _offloads(layout, pins)
            ):
                if recompute == "none" and "activations" in offload and "offload" not in pins:
                    continue
                choice = Choice(
                    method=options.method,
                    loss_path=loss_path,
                    recompute=recompute,
                    offload=offload,
                    micro_batch=micro,
                    grad_accum=accumulate,
                    optimizer=held.optimizer,
                    weights=held.weights,
                    mixed_precision=held.mixed_precision,
                    attention=attention,
                    precision=pins.get("precision", "bf16"),
                    packing=options.packing,
                    **layout,
                )
                yield choice, held.alters


def _first_batch(options: SpaceOptions, data_parallel: int) -> tuple[int, int]:
    """(micro-batch, accumulation) for a frame; where none keeps the global batch, one that a rule will refuse."""
    pairs = micro_batches(options, data_parallel)
    if pairs:
        return pairs[0]
    micro = options.pins.get("micro_batch", options.min_micro_batch)
    return micro, options.pins.get("grad_accum", max(1, options.global_batch // (data_parallel * micro)))


def micro_batches(options: SpaceOptions, data_parallel: int) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) pairs that keep the global batch exactly, smallest micro-batch first."""
    pins = options.pins
    per_rank, rest = divmod(options.global_batch, data_parallel)
    if "micro_batch" in pins and "grad_accum" in pins:
        return [(pins["micro_batch"], pins["grad_accum"])]
    if rest or per_rank == 0:
        return []
    if "micro_batch" in pins:
        micro = pins["micro_batch"]
        return [(micro, per_rank // micro)] if per_rank % micro == 0 else []
    if "grad_accum" in pins:
        accumulate = pins["grad_accum"]
        return [(per_rank // accumulate, accumulate)] if per_rank % accumulate == 0 else []
    sizes = [d for d in _divisors(per_rank) if options.min_micro_batch <= d <= MAX_MICRO_BATCH]
    return [(d, per_rank // d) for d in sizes]
