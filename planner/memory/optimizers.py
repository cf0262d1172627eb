"""Optimizers by their Hugging Face ``optim`` name: bytes of state, bytes of work, what they need.

State bytes measured with the CPU allocator over one step of each (torch 2.13, torchao 0.18, bitsandbytes 0.50);
sources: transformers/training_args.py OptimizerNames, the optimizers' own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Memory behaviour of one optimizer, per element of the tensors it updates."""

    name: str
    moment1: float | None
    """Bytes per element of the first state; None: as wide as the parameter."""
    moment2: float | None
    """Bytes per element of the second state; None: as wide as the parameter."""
    step_transient: float = 0.0
    """Bytes per *all* elements that ``step()`` holds at once, as a share of the parameter's width."""
    needs: str | None = None
    """Package that provides it."""
    numerics: bool = False
    """Alters the training's numerics against AdamW with full-width states."""
    device: Literal["any", "cuda"] = "any"
    note: str = ""

    @property
    def foreach(self) -> bool:
        """One kernel per operation over all parameters instead of one per parameter group."""
        return self.step_transient > 0

    def moved_bytes(self, *, weights: float, gradients: float, master: float, moment1: float, moment2: float) -> float:
        """Bytes read and written per element in one step, from the widths of what it holds.

        One fused kernel reads the gradient and reads and writes everything else. The foreach implementation makes a
        pass per operation (torch/optim/adam.py, _multi_tensor_adam): decay, lerp, mul, addcmul, sqrt, div, add, addcdiv
        touch the weight four times, the first state and the gradient three times, the second state five times and a
        temporary six times.
        """
        if self.foreach:
            return 4.0 * weights + 2.0 * master + 3.0 * (moment1 + gradients) + 5.0 * moment2 + 6.0 * weights
        return 2.0 * (weights + master + moment1 + moment2) + gradients

    def state_bytes(self, parameter_bytes: int) -> tuple[float, float]:
        """(first, second) state bytes per element for parameters of ``parameter_bytes`` width."""
        first = parameter_bytes if self.moment1 is None else self.moment1
        second = parameter_bytes if self.moment2 is None else self.moment2
        return float(first), float(second)


OPTIMIZERS: dict[str, Optimizer] = {
    o.name: o
    for o in (
        Optimizer(name="adamw_torch_fused", moment1=None, moment2=None),
        Optimizer(
            name="adamw_torch",
            moment1=None,
            moment2=None,
            step_transient=1.0,
            note="the foreach implementation holds one more copy of all local parameters during step()",
        ),
        Optimizer(name="adamw_torch_8bit", moment1=1.02, moment2=1.02, needs="torchao", numerics=True),
        Optimizer(name="adamw_torch_4bit", moment1=0.53, moment2=0.53, needs="torchao", numerics=True),
        Optimizer(
            name="adamw_bnb_8bit",
            moment1=1.015,
            moment2=1.015,
            needs="bitsandbytes",
            numerics=True,
            device="cuda",
        ),
        Optimizer(
            name="paged_adamw_8bit",
            moment1=1.015,
            moment2=1.015,
            needs="bitsandbytes",
            numerics=True,
            device="cuda",
            note="states in unified memory; counted as resident",
        ),
        Optimizer(name="paged_adamw_32bit", moment1=4, moment2=4, needs="bitsandbytes", device="cuda"),
        Optimizer(
            name="lion_32bit",
            moment1=4,
            moment2=0,
            needs="bitsandbytes",
            numerics=True,
            device="cuda",
        ),
        Optimizer(
            name="lion_8bit",
            moment1=1.02,
            moment2=0,
            needs="bitsandbytes",
            numerics=True,
            device="cuda",
        ),
        Optimizer(
            name="adafactor",
            moment1=0,
            moment2=0.02,
            numerics=True,
            note="row and column sums only",
        ),
        Optimizer(name="rmsprop", moment1=0, moment2=None, numerics=True),
        Optimizer(name="adagrad", moment1=0, moment2=None, numerics=True, note="allocated at construction"),
        Optimizer(name="sgd", moment1=0, moment2=0, numerics=True),
    )
}

ALIASES = {
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_hf": "adamw_torch",
    "paged_adamw": "paged_adamw_32bit",
}


def find_optimizer(name: str) -> Optimizer:
    """The optimizer called ``name``.

    Raises:
        ValueError: its memory is not known here; the message lists the known ones.
    """
    optimizer = OPTIMIZERS.get(ALIASES.get(name, name))
    if optimizer is None:
        raise ValueError(f"optimizer {name!r} is not known; known: {', '.join(sorted(OPTIMIZERS))}")
    return optimizer
