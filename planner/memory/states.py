"""The five roles: bytes per parameter of weights, gradients, master copy and moments, and what each is divided by.

What is at rest follows the wrapper, not the textbook. Sources: accelerate/utils/fsdp_utils.py (trainable parameters
upcast to fp32 under FSDP2 with mixed precision), deepspeed/runtime/zero (bf16 parameters, fp32 master partition),
torch.optim (states follow the parameter's dtype), peft (adapters kept in fp32 unless quantised or ZeRO).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.choice import FSDP2, SHARDED, ZERO, Choice
from planner.memory.optimizers import find_optimizer

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

QUANTISED_BYTES = {
    # A 4-bit code and one fp32 scale per block of 64.
    "nf4": 0.5 + 4 / 64,
    # The scales themselves in 8 bits, with one fp32 scale per 256 of them.
    "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256),
    # One byte per weight; the fp32 scale per row is below a thousandth.
    "int8": 1.0,
}
"""Bytes per quantised weight (bitsandbytes functional.quantize_4bit, block size 64)."""
CODE_BYTES = {"nf4": 0.5, "nf4-double": 0.5, "int8": 1.0}
"""The codes among them. FSDP and ZeRO-3 cut the packed codes; every cut refers to the whole scales, so each rank keeps
all of them (bitsandbytes/nn/modules.py: ``Params4bit.__torch_function__`` hands ``quant_state`` on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Bytes per parameter of one group, before and after dividing over ranks."""

    weights: float
    gradients: float
    master: float
    moment1: float
    moment2: float
    weights_ranks: int = 1
    gradients_ranks: int = 1
    optimizer_ranks: int = 1
    """Ranks that divide master copy and moments."""
    whole_weights: float = 0.0
    """Of the weights' bytes, those that every rank keeps for all parameters."""

    @property
    def weights_here(self) -> float:
        """Bytes per parameter of the weights on one rank."""
        return (self.weights - self.whole_weights) / self.weights_ranks + self.whole_weights

    def to_json(self) -> dict[str, object]:
        """Roles and divisors as the plan prints them."""
        whole: dict[str, object] = {"whole_weights": self.whole_weights} if self.whole_weights else {}
        return whole | {
            "weights": self.weights,
            "gradients": self.gradients,
            "master": self.master,
            "moment1": self.moment1,
            "moment2": self.moment2,
            "divided_by": {
                "weights": self.weights_ranks,
                "gradients": self.gradients_ranks,
                "master": self.optimizer_ranks,
                "moment1": self.optimizer_ranks,
                "moment2": self.optimizer_ranks,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTable:
    """Roles of every fate a parameter can have under one choice."""

    trained: Roles
    adapters: Roles
    frozen: Roles
    quantised: Roles

    def items(self) -> list[tuple[str, Roles]]:
        """(fate, roles) in a stable order."""
        return [(name, getattr(self, name)) for name in ("trained", "frozen", "quantised", "adapters")]


def compute_bytes(choice: Choice) -> int:
    """Bytes per element inside matmuls."""
    if choice.mixed_precision in ("bf16", "fp16"):
        return 2
    return DTYPE_BYTES[choice.weights]


def residual_bytes(choice: Choice) -> int:
    """Bytes per element of the residual stream.

    Autocast (one GPU, DDP) leaves embeddings and residual sums in the weights' dtype; FSDP and DeepSpeed run the whole
    model in the compute dtype.
    """
    if choice.sharding in SHARDED:
        return compute_bytes(choice)
    return DTYPE_BYTES[choice.weights]


def runs_under_autocast(choice: Choice) -> bool:
    """Whether the forward runs under torch.autocast.

    accelerate's ``prepare_model`` wraps it, for FSDP1 beside the casts of FSDP itself. A model under FSDP2 or DeepSpeed
    goes another way, past that wrapper: its layers compute in the dtype that they are cast to and no operator is
    widened (accelerate/accelerator.py, ``_prepare_fsdp2`` and ``_prepare_deepspeed``).
    """
    return choice.mixed_precision != "no" and choice.sharding in ("none", "ddp", "fsdp1")


def uses_autocast(choice: Choice) -> bool:
    """Whether weights reach the forward as autocast finds them, so that it caches low-precision copies of fp32 ones."""
    return runs_under_autocast(choice) and choice.sharding != "fsdp1"


def adapter_bytes(choice: Choice) -> int:
    """Bytes per element of a LoRA adapter while it multiplies.

    PEFT holds adapters in fp32 and casts their input to that, under autocast as without. Mixed precision of FSDP2 and
    ZeRO casts them first, and TRL makes those of a quantised base bf16. FSDP1 wraps every adapter on its own, so PEFT
    reads the dtype of its shard before the cast.
    """
    if choice.sharding == "fsdp1":
        return int(trainable_roles(choice, adapter=True).weights)
    if choice.method != "lora" or choice.sharding in ZERO:
        return compute_bytes(choice)
    cast = choice.mixed_precision != "no" and choice.sharding not in ("none", "ddp")
    return compute_bytes(choice) if cast else 4


def trainable_roles(choice: Choice, *, adapter: bool = False) -> Roles:
    """Roles of trainable parameters under ``choice``.

    Args:
        choice: the knobs.
        adapter: the parameters are LoRA adapters, whose dtype PEFT decides.
    """
    optimizer = find_optimizer(choice.optimizer)
    ranks = choice.shard_ranks
    if choice.sharding in ZERO:
        first, second = optimizer.state_bytes(4)
        width = compute_bytes(choice)
        return Roles(
            weights=width,
            gradients=width,
            master=4,
            moment1=first,
            moment2=second,
            weights_ranks=ranks if choice.sharding == "zero3" else 1,
            gradients_ranks=ranks if choice.sharding in ("zero2", "zero3") else 1,
            optimizer_ranks=ranks,
        )
    width = DTYPE_BYTES[choice.weights]
    if adapter:
        width = 2 if choice.method == "qlora" else 4
    # accelerate upcasts no model that holds 4-bit parameters (fsdp_utils.py:813-825 @1.15.0).
    upcast = choice.sharding == "fsdp1" or (choice.sharding in FSDP2 and choice.method != "qlora")
    if upcast and choice.mixed_precision != "no":
        width = 4
    first, second = optimizer.state_bytes(width)
    return Roles(
        weights=width,
        gradients=width,
        master=0,
        moment1=first,
        moment2=second,
        weights_ranks=ranks,
        gradients_ranks=ranks,
        optimizer_ranks=ranks,
    )


def frozen_roles(choice: Choice, *, quantised: str | None = None) -> Roles:
    """Roles of frozen parameters: weights alone, in the dtype they were loaded in.

    Args:
        choice: the knobs.
        quantised: key of ``QUANTISED_BYTES`` for weights that QLoRA quantises.
    """
    ranks = choice.shard_ranks if choice.sharding in FSDP2 or choice.sharding in ("zero3", "fsdp1") else 1
    width = QUANTISED_BYTES[quantised] if quantised else float(DTYPE_BYTES[choice.weights])
    scales = width - CODE_BYTES[quantised] if quantised else 0.0
    return Roles(weights=width, gradients=0, master=0, moment1=0, moment2=0, weights_ranks=ranks, whole_weights=scales)


def role_table(choice: Choice, quantization: str) -> RoleTable:
    """Roles of every fate under ``choice``; ``quantization`` is used under QLoRA only."""
    return RoleTable(
        trained=trainable_roles(choice),
        adapters=trainable_roles(choice, adapter=True),
        frozen=frozen_roles(choice),
        quantised=frozen_roles(choice, quantised=quantization if choice.method == "qlora" else None),
    )
