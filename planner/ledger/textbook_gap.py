"""Where one choice differs from the textbook count, part by part, and why.

The textbook: 2 bytes of weights, 2 of gradients, 4 of a master copy and 4 + 4 of moments for a parameter that trains, a
ZeRO stage that divides them, and 17 saved tensors of (batch x seq x hidden) in a layer, one where it is recomputed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.choice import FSDP2, ZERO, Choice
from planner.ledger.textbook import FIRST_STAGE, SAVED_TENSORS
from planner.memory.depth import OFFLOAD_BANDS, recomputed_layers
from planner.memory.model import MemoryEstimate, MemoryModel
from planner.memory.parts import rank_tokens

STAGES = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp_no_reshard": 2}
"""Sharding -> the ZeRO stage that it is called in textbooks; all others divide everything, stage 3."""
ROLES = {"weights": "weights", "gradients": "gradient", "master": "master", "moment1": "moment1", "moment2": "moment2"}
WIDTHS = {"weights": 2, "gradients": 2, "master": 4, "moment1": 4, "moment2": 4}
NOT_IN_TEXTBOOK = ("recompute", "loss", "gather", "buckets", "casts", "offload_buffers", "context", "slack")
OUTSIDE_A_STEP = ("load", "save")
SMALLEST = 0.002
"""Differences below this share of the larger count are not worth a line."""


class Reason(NamedTuple):
    """Why a part is what it is."""

    why: str
    source: str


class Difference(NamedTuple):
    """One part on one card, as the textbook and as this stack count it."""

    part: str
    textbook_bytes: int
    bytes: int
    reason: Reason

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        sizes = {"textbook_bytes": self.textbook_bytes, "bytes": self.bytes}
        return {"part": self.part, **sizes, "why": self.reason.why, "source": self.reason.source}


def stage_of(choice: Choice) -> int:
    """The ZeRO stage of a textbook that the sharding comes closest to."""
    return STAGES.get(choice.sharding, 3)


def textbook_gap(model: MemoryModel, choice: Choice, memory: MemoryEstimate) -> dict[str, Any]:
    """Both counts of ``choice`` on one card, and every part in which they differ."""
    book = _textbook_parts(model, choice)
    here = _parts_here(model, choice, memory)
    least = SMALLEST * max(sum(book.values()), memory.allocated_bytes)
    found = [
        Difference(part, book.get(part, 0), here[part], _reason(part, model, choice, memory))
        for part in here
        if abs(here[part] - book.get(part, 0)) > least
    ]
    states = sum(book[role] for role in ROLES)
    return {
        "stage": stage_of(choice),
        "states_bytes": states,
        "activations_bytes": book["saved_activations"],
        "total_bytes": states + book["saved_activations"],
        "differences": [difference.to_json() for difference in found],
    }


def _textbook_parts(model: MemoryModel, choice: Choice) -> dict[str, int]:
    blocks, arch, stage = model.blocks(choice.method), model.job.architecture, stage_of(choice)
    parts: dict[str, int] = {}
    for role, name in ROLES.items():
        count = blocks.num_parameters if role == "weights" else blocks.total.trainable
        parts[role] = -(-WIDTHS[role] * count // (choice.shard_ranks if stage >= FIRST_STAGE[name] else 1))
    layers = recomputed_layers(choice.recompute, arch.num_layers)
    tensors = sum(SAVED_TENSORS if mode == "none" else 1 for mode in layers)
    parts["saved_activations"] = tensors * arch.hidden * 2 * rank_tokens(model.job, choice)
    return parts


def _parts_here(model: MemoryModel, choice: Choice, memory: MemoryEstimate) -> dict[str, int]:
    """Roles on the card, and every other part in the phase of a step where it is largest."""
    _, held = model.states_of(choice)
    parts = {role: 0 if _on_host(role, choice) else int(getattr(held, role)) for role in ROLES}
    for part in ("saved_activations", *NOT_IN_TEXTBOOK):
        parts[part] = max(phase.parts.get(part, 0) for phase in memory.phases if phase.name not in OUTSIDE_A_STEP)
    return parts


def _on_host(role: str, choice: Choice) -> bool:
    with_optimizer = role in ("master", "moment1", "moment2") or (role == "gradients" and choice.sharding in ZERO)
    return ("optimizer" if with_optimizer else "params") in choice.offload


def _reason(part: str, model: MemoryModel, choice: Choice, memory: MemoryEstimate) -> Reason:
    if part in ROLES:
        return _reason_of_role(part, model, choice)
    zero, several = choice.sharding in ZERO, choice.num_gpus > 1
    if part == "saved_activations":
        if "activations" in choice.offload:
            return Reason(f"checkpoints go to the host; {OFFLOAD_BANDS} layers of them are here", "torch save_on_cpu")
        return Reason(
            "counted on the real layers: their dtypes, heads, widths and kernels, not 17 times hidden",
            "the model's class in transformers",
        )
    if part == "gather":
        ring = "; keys and values of the whole sequence" if choice.cp > 1 else ""
        if zero:
            return Reason("stage 3 keeps up to a billion parameters gathered", "deepspeed/runtime/zero/config.py")
        return Reason(
            f"2 bytes: the layer in use and the next, in the loss the whole head{ring}",
            "torch fully_shard; trl/trainer/utils.py full_tensor",
        )
    if part == "buckets":
        if zero:
            return Reason("a bucket of 500 million elements or fewer, and its copy", "deepspeed/runtime/zero")
        if choice.sharding == "ddp":
            return Reason("gradients a second time, in buckets", "torch DistributedDataParallel")
        return Reason("what the layer before reduces stays until its turn", "torch fully_shard, reduce_scatter_states")
    if part == "recompute":
        worst = max(memory.phases, key=lambda phase: phase.parts.get("recompute", 0)).name
        if worst == "step":
            return Reason("what the optimizer copies in its step", "torch.optim; deepspeed/runtime/zero")
        return Reason("the tensors of the one layer at work", "the model's class in transformers")
    if part == "loss":
        return Reason(f"the loss ({choice.loss_path}), at which the textbook does not arrive", "trl/trainer")
    if part == "casts":
        return Reason("2-byte copies of fp32 weights that autocast keeps", "torch.autocast")
    if part == "offload_buffers":
        return Reason("room for one gradient on its way to the host", "deepspeed/runtime/zero/stage_1_and_2.py")
    if part == "context":
        return Reason("CUDA" + (" and NCCL" if several else "") + ", seen by NVML only", "not measured on this card")
    return Reason("what the allocator reserves beyond tensors", "torch CUDACachingAllocator")


def _reason_of_role(role: str, model: MemoryModel, choice: Choice) -> Reason:
    if _on_host(role, choice):
        return Reason("on the host", "planner/memory/host.py")
    sharded_fp32 = (choice.sharding in FSDP2 or choice.sharding == "fsdp1") and choice.mixed_precision != "no"
    if role == "weights":
        if model.job.reference_model:
            return Reason("with the frozen reference model beside the policy", "trl/trainer: ref_model")
        if choice.method == "qlora":
            return Reason("4 bits and a scale for 64 weights; embeddings and head not", "bitsandbytes quantize_4bit")
        if choice.method == "lora":
            return Reason("the frozen base as it was loaded", "trl/trainer/utils.py create_model_from_path")
        if sharded_fp32:
            return Reason("accelerate makes fp32 shards of what trains", "accelerate/utils/fsdp_utils.py")
        if choice.sharding == "fsdp_no_reshard":
            return Reason("divided at rest", "torch fully_shard")
        return Reason("TRL loads in fp32 unless told otherwise", "trl/trainer/utils.py create_model_from_path")
    if role == "gradients":
        return Reason("a gradient has the dtype of its weight", "torch.autograd")
    if role == "master":
        if choice.weights == "fp32" or sharded_fp32:
            return Reason("none: the weights are fp32 themselves", "torch.optim")
        if choice.method == "qlora":
            return Reason("none: adapters of a quantised base are bf16", "trl/trainer/sft_trainer.py")
        return Reason("none: pure bf16 trains its weights in place, 8 bytes in all", "torch.optim")
    if choice.optimizer != "adamw_torch_fused":
        return Reason(f"the states of {choice.optimizer}", "planner/memory/optimizers.py")
    return Reason("moments have the dtype of their weight", "torch.optim.AdamW, zeros_like")
