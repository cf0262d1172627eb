"""Coefficients: bytes per layer kind as affine functions of tokens. The seam between evidence and simulation.

Closed forms (``planner.memory.formula``) make them without torch; a trace of the real classes or a measured probe makes
the same values with better evidence. The simulation (``planner.memory.model``) does not know which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Evidence = Literal["formula", "traced", "measured"]


@dataclass(frozen=True, slots=True)
class Affine:
    """Bytes as a function of one rank's tokens."""

    per_token: float = 0.0
    constant: float = 0.0
    per_token_pair: float = 0.0
    """Bytes per (token, position of its sequence): a materialised mask or score matrix."""

    def at(self, tokens: int, sequence: int) -> int:
        """Bytes at ``tokens`` tokens on this rank, in sequences of ``sequence`` tokens."""
        return int(self.per_token * tokens + self.constant + self.per_token_pair * tokens * sequence)

    def __add__(self, other: Affine) -> Affine:
        return Affine(
            self.per_token + other.per_token,
            self.constant + other.constant,
            self.per_token_pair + other.per_token_pair,
        )


ZERO = Affine()


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest of several moments, each affine: weight gradients decide at few tokens, activations at many."""

    moments: tuple[Affine, ...]

    def at(self, tokens: int, sequence: int) -> int:
        """Bytes of the highest moment at ``tokens`` tokens in sequences of ``sequence``."""
        return max(moment.at(tokens, sequence) for moment in self.moments)


@dataclass(frozen=True, slots=True)
class Windowed:
    """Bytes of a layer with a sliding window, which needs no mask while the sequence is shorter than the window."""

    window: int
    shorter: Affine | Highest
    """Sequences of fewer than ``window`` tokens."""
    longer: Affine | Highest

    def at(self, tokens: int, sequence: int) -> int:
        """Bytes at ``tokens`` tokens in sequences of ``sequence``."""
        return (self.shorter if sequence < self.window else self.longer).at(tokens, sequence)


Bytes = Affine | Highest | Windowed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeBytes:
    """One decoder layer under one way of recomputing: what one rank allocates, weights and gradients at rest aside."""

    kept: Bytes
    """From the layer's forward to its backward, its input included where autograd or the checkpoint holds it."""
    forward: Bytes
    """Highest extra allocation while the layer runs forward, above what is live when it starts."""
    backward: Bytes
    """Highest extra allocation while the layer runs backward, above what is live when its backward starts (``kept``
    included there), the gradients of its own weights that exist at that moment included."""
    attention_backward: Bytes
    """The same, at the highest moment of the attention block alone: what context parallelism's ring comes on top of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One decoder layer of one kind under each way of recomputing."""

    none: ModeBytes
    full: ModeBytes
    selective: ModeBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """What one decoder layer runs in forward and backward, recompute included; FLOPs and bytes, not allocations."""

    matmul_flops: Affine = ZERO
    """Dense products; under eager attention those of the scores too, per token pair."""
    expert_flops: Affine = ZERO
    attention_flops: Affine = ZERO
    """Causal kernels: half of the square."""
    masked_attention_flops: Affine = ZERO
    """Kernels that read a mask: the whole square."""
    elementwise_bytes: Affine = ZERO
    """Read and written by everything else."""
    launches: Affine = ZERO
    """Kernels, whatever the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """``OperatorWork`` of one kind under each way of recomputing."""

    none: OperatorWork
    full: OperatorWork
    selective: OperatorWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """All activation terms of one architecture under one set of options."""

    layers: tuple[LayerBytes, ...]
    """In the order of ``Architecture.kinds``."""
    model_saved: Bytes
    """Kept outside the layers: embedding output that no layer keeps, rotary tables, masks, input ids."""
    model_saved_none: Bytes | None = None
    """``model_saved`` where no layer is recomputed, None when it is the same. No checkpoint holds the mask there; and
    under adapters the first layer, whose input needs no gradient, keeps less than the others: that is taken off."""
    final_norm_saved: Bytes
    """Kept by the final normalisation, its output (the hidden states that the loss reads) included."""
    evidence: Evidence
    relative_error: float
    """Half-width of the interval as a share of the predicted peak, from a stated comparison."""
    source: str
    """One sentence: where the numbers come from, and for which versions."""
    work: tuple[LayerWork, ...] = ()
    """In the order of ``Architecture.kinds``; empty where nothing was traced."""
