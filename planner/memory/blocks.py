"""Parameter blocks: what trains, what is frozen, what is quantised, per part of the model and method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.architecture import Architecture, LayerKind
from planner.choice import Method
from planner.memory.adapters import adapter_parameters, lora_modules, outer_lora_modules


@dataclass(frozen=True, slots=True)
class Block:
    """Parameters of one part of the model by what happens to them."""

    trained: int = 0
    frozen: int = 0
    """Frozen and kept in the dtype they were loaded in."""
    quantised: int = 0
    """Frozen and stored in 4 or 8 bits."""
    adapter: int = 0

    @property
    def trainable(self) -> int:
        """Parameters with gradients and optimizer states."""
        return self.trained + self.adapter

    def __add__(self, other: Block) -> Block:
        return Block(
            self.trained + other.trained,
            self.frozen + other.frozen,
            self.quantised + other.quantised,
            self.adapter + other.adapter,
        )

    def times(self, count: int) -> Block:
        """``count`` such blocks."""
        return Block(self.trained * count, self.frozen * count, self.quantised * count, self.adapter * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The whole model, part by part."""

    embedding: Block
    kinds: tuple[Block, ...]
    """One layer of each kind, in the order of ``Architecture.kinds``."""
    final_norm: Block
    head: Block
    """Zero when the head is the embedding."""
    other: Block
    cast_weights: tuple[int, ...]
    """Weights of the linears of one layer of each kind: what autocast copies to low precision."""
    cast_adapters: tuple[int, ...]
    """The same of its adapters; stacked experts have theirs multiplied through views, which autocast does not cache."""
    total: Block

    @property
    def num_parameters(self) -> int:
        """All parameters that live on the device, adapters included."""
        t = self.total
        return t.trained + t.frozen + t.quantised + t.adapter


@lru_cache(maxsize=64)
def parameter_blocks(
    architecture: Architecture, method: Method, lora_r: int, lora_targets: str | tuple[str, ...]
) -> Blocks:
    """Split the model's parameters by ``method``.

    Under LoRA the base is frozen; under QLoRA every linear of the decoder layers is quantised, while embedding, head
    and norms keep their dtype (bitsandbytes replaces nn.Linear modules, lm_head excepted).
    """
    full = method == "full"
    adapters = lora_modules(architecture, lora_targets) if not full else tuple(() for _ in architecture.kinds)

    def plain(count: int) -> Block:
        return Block(trained=count) if full else Block(frozen=count)

    kinds: list[Block] = []
    cast_adapters: list[int] = []
    for kind, modules in zip(architecture.kinds, adapters, strict=True):
        adapter = adapter_parameters(modules, lora_r)
        block = plain(kind.num_parameters)
        if method == "qlora":
            quantised = _quantisable(kind)
            block = Block(frozen=kind.num_parameters - quantised, quantised=quantised)
        kinds.append(block + Block(adapter=adapter))
        plain_linears = (m for m in modules if m.role != "experts")
        cast_adapters.append(adapter_parameters(plain_linears, lora_r))
    embedding = plain(architecture.embedding_parameters)
    final_norm = plain(architecture.final_norm_parameters)
    head = plain(architecture.head_parameters)
    other = plain(architecture.other_parameters) + Block(frozen=architecture.vision_parameters)
    if full and architecture.vision_parameters:
        other = plain(architecture.other_parameters + architecture.vision_parameters)
    if not full:
        outer = outer_lora_modules(architecture, lora_targets)
        other = other + Block(adapter=adapter_parameters(outer, lora_r))
    total = embedding + final_norm + head + other
    for index in architecture.order:
        total = total + kinds[index]
    return Blocks(
        embedding=embedding,
        kinds=tuple(kinds),
        final_norm=final_norm,
        head=head,
        other=other,
        cast_adapters=tuple(cast_adapters),
        cast_weights=tuple(sum(m.num_weights for m in k.linears) + _expert_parameters(k) for k in architecture.kinds),
        total=total,
    )


def _quantisable(kind: LayerKind) -> int:
    return sum(m.num_weights for m in kind.linears)


def _expert_parameters(kind: LayerKind) -> int:
    return kind.experts.num_parameters if kind.experts else 0
