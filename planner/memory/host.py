"""Host memory of one node: what loading needs, what offload keeps there, and what saving gathers.

Loading, on every rank that runs ``from_pretrained`` (transformers 5.24)
- Weights of the dtype that they are stored in stay mapped from their file, which the system can drop again. Another
  dtype is a copy: TRL's fp32 of a bf16 checkpoint is 4 bytes a parameter on every rank of DDP, ZeRO-1 and 2, FSDP1 and
  FSDP2. ``fsdp_cpu_ram_efficient_loading`` spares other ranks that on transformers 4 alone: since 5.0 every rank reads
  the weights although the first one's are used (core_model_loading.py asks nothing about ranks; transformers issue
  43749, open; 4.3 bytes a parameter seen on the second rank with 5.24).
- ZeRO-3 hands parameters out one module at a time (``_load_state_dict_into_zero3_model``), one GPU loads straight to
  the card (``device_map="auto"``), and quantised weights go to each rank's card.

Training
- Checkpoints are copied out one tensor each (torch ``save_on_cpu``), pinned.
- ZeRO-1 and 2 pin the master copy, its gradients, a 16-bit copy on its way back to the card and a buffer of one
  parameter; accumulation pins 16-bit gradients as well (stage_1_and_2.py: ``__init__``,
  ``async_accumulate_grad_in_cpu_via_gpu``, ``initialize_optimizer_states``). ZeRO-3 pins fp32 and 16-bit gradients,
  the master copy not (stage3.py: ``_create_fp32_partitions``, ``initialize_optimizer_states``,
  ``grad_partitions_flat_buffer``). The moments of CPU Adam are pageable (cpu_adam.py: ``zeros_like``).
- ZeRO-3 pins offloaded weights twice: each parameter's share while the model is built, and one flat buffer for what
  trains (partition_parameters.py: ``_partition_param``; ``_create_param_groups_fp16_flat_cpu_memory``). torch keeps
  what was pinned and freed.
- FSDP2 pins each parameter's shard and gradient (``_fsdp_param.py``: ``reset_sharded_param``, ``to`` without waiting);
  torch's moments are pageable.

Saving (beside what is there while training)
- FSDP2 gathers the whole model on the first rank, and then all moments (``get_state_dict``, ``save_fsdp_optimizer``).
  ZeRO-3 gathers 16-bit weights there; under ZeRO-1 and 2 every rank copies them (``clone_tensors_for_torch_save``).

torch rounds pinned blocks up to powers of two (ATen/core/CachingHostAllocator.h), so 1.3 GB takes 2 GiB.
tests/launcher/test_host_memory.py compares two processes with this, but for the rounding, which a CPU does not do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from planner.architecture import Architecture
from planner.choice import FSDP2, ZERO, Choice
from planner.memory.blocks import Blocks
from planner.memory.phases import HeldBytes
from planner.memory.sharding import ZERO3_SUB_GROUP_ELEMENTS
from planner.memory.states import DTYPE_BYTES

PROCESS_BYTES = 400 * 2**20
"""Anonymous memory of one Python with torch, transformers and TRL before it loads a model: 314 MiB on a CPU, 2026."""
STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
When = Literal["load", "train", "save"]


class HostPart(NamedTuple):
    """Something that the ranks of one node hold on the host."""

    name: str
    when: When
    tensor_bytes: int
    """What the tensors hold."""
    bytes: int
    """What they take: pinned blocks are powers of two."""
    pinned: bool
    formula: str


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of one node."""

    parts: tuple[HostPart, ...]
    process_bytes: int

    def _of(self, when: When, pinned: bool | None = None) -> int:
        return sum(p.bytes for p in self.parts if p.when == when and pinned in (None, p.pinned))

    @property
    def pinned_bytes(self) -> int:
        """Page-locked while training."""
        return self._of("train", True)

    @property
    def pageable_bytes(self) -> int:
        """Not page-locked while training, the processes themselves left out."""
        return self._of("train", False)

    @property
    def load_bytes(self) -> int:
        """Copies of weights while the model is loaded."""
        return self._of("load")

    @property
    def save_bytes(self) -> int:
        """The most that is gathered for a checkpoint, on top of what training holds."""
        return max((p.bytes for p in self.parts if p.when == "save"), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most at any time, processes included."""
        training = self.pinned_bytes + self.pageable_bytes
        return self.process_bytes + max(self.load_bytes, training + self.save_bytes)


def pinned_block(size: int) -> int:
    """What torch's pinned allocator takes for ``size`` bytes."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


class _Matrix(NamedTuple):
    """Equal parameters of the model, each a tensor of its own."""

    weights: int
    number: int


@lru_cache(maxsize=64)
def _matrices(architecture: Architecture) -> tuple[_Matrix, ...]:
    """The large parameters; norms and biases, which are thousandths, are left out."""

    def each() -> Iterator[_Matrix]:
        for index, kind in enumerate(architecture.kinds):
            layers = architecture.order.count(index)
            for linear in kind.linears:
                yield _Matrix(linear.in_features * linear.out_features, linear.count * layers)
            if kind.experts is not None:
                # Gate and up in one stacked parameter, down in another.
                down = kind.experts.num_experts * kind.experts.hidden * kind.experts.intermediate
                yield _Matrix(down, layers)
                yield _Matrix(kind.experts.num_parameters - down, layers)
        table = architecture.vocab * architecture.hidden
        yield _Matrix(table, 1 if architecture.tied else 2)

    return tuple(each())


def largest_parameter_bytes(choice: Choice, architecture: Architecture) -> int:
    """16-bit bytes of the largest parameter that trains: ZeRO-1 and 2 keep room for it on both sides of an offload.

    ``temp_grad_buffer_for_cpu_offload`` and ``temp_grad_buffer_for_gpu_offload`` (stage_1_and_2.py:653-662). Adapters
    are thousandths of that.
    """
    if "optimizer" not in choice.offload or choice.sharding not in ("zero1", "zero2") or choice.method != "full":
        return 0
    return 2 * max((m.weights for m in _matrices(architecture)), default=0)


def _shards(architecture: Architecture, width: float, ranks: int) -> int:
    """Pinned blocks of one rank's share of every matrix."""
    return sum(m.number * pinned_block(-(-int(m.weights * width) // ranks)) for m in _matrices(architecture))


def _cut(elements: int, width: int, limit: int) -> int:
    """Pinned blocks of ``elements`` in pieces of at most ``limit``."""
    whole, rest = divmod(elements, limit)
    return whole * pinned_block(limit * width) + pinned_block(rest * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The part of a run that shares a host."""

    ranks: int
    fsdp_first_rank_loads: bool = False
    """transformers < 5: other ranks of the node hold no weights while FSDP loads."""
    saves_optimizer: bool = True
    copies: int = 1
    """Models that are loaded: 2 with a reference beside the policy."""


def host_parts(
    choice: Choice, node: Node, architecture: Architecture, blocks: Blocks, held: HeldBytes
) -> tuple[HostPart, ...]:
    """All that does not depend on the micro-batch.

    Args:
        choice: the knobs.
        node: ranks of one node.
        architecture: shapes.
        blocks: parameters by part and fate.
        held: what one rank holds at rest, wherever that is.
    """
    parts = [*_loading(choice, node, architecture), *_saving(choice, node, blocks, held)]
    if "optimizer" in choice.offload and choice.sharding in ZERO:
        parts += _zero_optimizer(choice, node, architecture, blocks, held)
    if "params" in choice.offload and choice.sharding in ZERO:
        parts += _zero_params(choice, node, architecture, blocks, held)
    if "params" in choice.offload and choice.sharding in FSDP2:
        parts += _fsdp_params(choice, node, architecture, blocks, held)
    return tuple(part for part in parts if part.bytes)


def _loading(choice: Choice, node: Node, architecture: Architecture) -> list[HostPart]:
    width = DTYPE_BYTES[choice.weights]
    stored = STORED_BYTES.get(architecture.stored_dtype or "", 2)
    if choice.sharding in ("none", "zero3") or choice.method == "qlora" or width == stored:
        return []
    ranks = 1 if node.fsdp_first_rank_loads and choice.sharding not in ("ddp", "zero1", "zero2") else node.ranks
    size = ranks * node.copies * width * architecture.num_parameters
    times = f"{ranks} ranks x " + (f"{node.copies} models x " if node.copies > 1 else "")
    formula = f"{times}{architecture.num_parameters:,} x {width} B, stored in {stored} B"
    return [HostPart("weights", "load", size, size, False, formula)]


def _saving(choice: Choice, node: Node, blocks: Blocks, held: HeldBytes) -> list[HostPart]:
    total, shards = blocks.num_parameters, choice.shard_ranks
    if choice.sharding in FSDP2 or choice.sharding == "fsdp1":
        model = int(held.weights * shards)
        parts = [HostPart("whole model", "save", model, model, False, "the first rank's copy of all shards")]
        moments = int((held.moment1 + held.moment2) * shards) if node.saves_optimizer else 0
        return [
            *parts,
            HostPart("whole optimizer", "save", moments, moments, False, "the first rank's copy of moments"),
        ]
    if choice.sharding in ZERO and choice.method != "qlora":
        copies = 1 if choice.sharding == "zero3" else node.ranks
        saved = blocks.total.trainable if choice.sharding == "zero3" and choice.method != "full" else total
        formula = f"{copies} x {saved:,} x 2 B"
        return [HostPart("16-bit model", "save", 2 * copies * saved, 2 * copies * saved, False, formula)]
    return []


def _zero_optimizer(
    choice: Choice, node: Node, architecture: Architecture, blocks: Blocks, held: HeldBytes
) -> list[HostPart]:
    ranks, share = node.ranks, -(-blocks.total.trainable // choice.shard_ranks)
    of = f"{ranks} ranks x {share:,} x"

    def part(name: str, width: int, pinned: bool, block: int | None = None) -> HostPart:
        size = ranks * width * share
        return HostPart(name, "train", size, size if block is None else ranks * block, pinned, f"{of} {width} B")

    moments = int(ranks * (held.moment1 + held.moment2))
    states = HostPart("moments", "train", moments, moments, False, f"{of} {moments / (ranks * share):g} B")
    if choice.sharding == "zero3":
        gradients = _cut(share, 4, ZERO3_SUB_GROUP_ELEMENTS)
        return [
            part("master", 4, False),
            states,
            part("gradients", 4, True, gradients),
            part("16-bit gradients", 2, True, pinned_block(2 * share)),
        ]
    largest = largest_parameter_bytes(choice, architecture)
    return [
        part("master", 4, True, pinned_block(4 * share)),
        states,
        part("gradients", 4, True, pinned_block(4 * share)),
        part("16-bit weights", 2, True, pinned_block(2 * share)),
        HostPart(
            "one parameter", "train", ranks * largest, ranks * pinned_block(largest), True, f"{ranks} x {largest:,}"
        ),
    ]


def _zero_params(
    choice: Choice, node: Node, architecture: Architecture, blocks: Blocks, held: HeldBytes
) -> list[HostPart]:
    """Weights that ZeRO-3 keeps: what trains in one flat buffer, and what its making left pinned."""
    ranks, share = node.ranks, -(-blocks.total.trainable // choice.shard_ranks)
    size = int(ranks * held.weights)
    taken = ranks * (pinned_block(2 * share) + _shards(architecture, 2, choice.shard_ranks))
    return [HostPart("weights", "train", size, taken, True, f"{ranks} ranks x {size // ranks:,} B, pinned twice")]


def _fsdp_params(
    choice: Choice, node: Node, architecture: Architecture, blocks: Blocks, held: HeldBytes
) -> list[HostPart]:
    ranks, shards = node.ranks, choice.shard_ranks
    moments = int(ranks * (held.moment1 + held.moment2))
    found = [HostPart("moments", "train", moments, moments, False, f"{ranks} ranks x {moments // ranks:,} B")]
    for name, size, tensors in (("weights", held.weights, blocks.num_parameters), ("gradients", held.gradients, 0)):
        # Adapters are small matrices beside a base of large ones; their blocks are what they hold.
        width = size * shards / (tensors or max(1, blocks.total.trainable))
        whole = choice.method == "full" or name == "weights"
        taken = _shards(architecture, width, shards) if whole else pinned_block(int(size))
        every = int(ranks * size)
        found.append(
            HostPart(name, "train", every, max(every, ranks * taken), True, f"{ranks} ranks x {int(size):,} B")
        )
    return found


def accumulated_part(choice: Choice, node: Node, architecture: Architecture, blocks: Blocks) -> HostPart | None:
    """16-bit gradients that ZeRO-1 and 2 keep between micro-batches of an offloaded optimizer, a tensor a parameter."""
    if "optimizer" not in choice.offload or choice.sharding not in ("zero1", "zero2") or choice.grad_accum == 1:
        return None
    held = 2 * blocks.total.trainable * node.ranks // choice.shard_ranks
    taken = _shards(architecture, 2, 1) * node.ranks // choice.shard_ranks if choice.method == "full" else held
    return HostPart(
        "accumulated gradients", "train", held, max(held, taken), True, "2 B for each parameter of its rank"
    )


def activations_part(choice: Choice, node: Node, kept_bytes: list[int]) -> HostPart | None:
    """Checkpoints on the host: ``kept_bytes`` of every layer of one rank, one block each."""
    if "activations" not in choice.offload:
        return None
    taken = node.ranks * sum(pinned_block(kept) for kept in kept_bytes)
    formula = f"{node.ranks} ranks x {len(kept_bytes)} layers x {max(kept_bytes, default=0):,} B"
    return HostPart("activations", "train", node.ranks * sum(kept_bytes), taken, True, formula)
