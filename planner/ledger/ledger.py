"""The ledger: every byte of one choice, by parameter group and role, and by phase and part, with formula and source."""

from __future__ import annotations

from typing import Any

from planner.architecture import Architecture
from planner.choice import ZERO, Choice, Method
from planner.ledger.textbook_gap import textbook_gap
from planner.memory.activations import mode_of, outside_layers
from planner.memory.adapters import lora_parameters
from planner.memory.blocks import Block
from planner.memory.depth import OFFLOAD_BANDS, depth_of
from planner.memory.device import NCCL_BYTES
from planner.memory.model import MemoryModel
from planner.memory.parts import rank_tokens
from planner.memory.phases import held_bytes
from planner.memory.states import RoleTable
from planner.plan_json import memory_json, time_json
from planner.problem import Problem
from planner.search.search import Candidate
from planner.time.run_cost import cost_of
from planner.units import format_bytes

LEDGER_SCHEMA = "trlfit.ledger/1"
GROUPS = ("embedding", "attention", "mlp", "experts", "norms", "head", "other")

STATE_SOURCES = {
    "none": "torch autocast on one GPU: parameters, gradients and AdamW states in the dtype the weights are loaded in",
    "ddp": "torch DDP: every rank holds everything, and a bucket copy of the gradients",
    "zero": "deepspeed/runtime/zero: bf16 parameters and gradients, fp32 master partition and moments",
    "fsdp": "accelerate/utils/fsdp_utils.py: trainable parameters become fp32 shards under mixed precision",
}


def state_source(choice: Choice) -> str:
    """Where the dtypes at rest of this sharding come from."""
    for prefix in ("none", "ddp", "zero"):
        if choice.sharding.startswith(prefix):
            return STATE_SOURCES[prefix]
    return STATE_SOURCES["fsdp"]


def group_blocks(
    architecture: Architecture, method: Method, lora_r: int, targets: str | tuple[str, ...]
) -> dict[str, Block]:
    """Parameters of each group by fate; adapters are a group of their own."""
    out: dict[str, Block] = {}
    quantised: dict[str, int] = {}
    if method == "qlora":
        for kind in architecture.layers():
            for module in kind.linears:
                quantised[module.role] = quantised.get(module.role, 0) + module.num_weights
    for group in GROUPS:
        count = architecture.parameters_of(group)  # type: ignore[arg-type]
        if not count:
            continue
        packed = quantised.get(group, 0)
        out[group] = Block(trained=count) if method == "full" else Block(frozen=count - packed, quantised=packed)
    if method != "full":
        out["adapters"] = Block(adapter=lora_parameters(architecture, lora_r, targets))
    return out


HOSTED = {
    "weights": "params",
    "gradients": "params",
    "master": "optimizer",
    "moment1": "optimizer",
    "moment2": "optimizer",
}
"""Role -> the offload that moves it to the host."""


def _hosted(role: str, choice: Choice) -> bool:
    # DeepSpeed keeps gradients where the optimizer is (planner/memory/phases.py).
    target = "optimizer" if role == "gradients" and choice.sharding in ZERO else HOSTED[role]
    return target in choice.offload


def _role_bytes(block: Block, roles: RoleTable, choice: Choice) -> dict[str, int]:
    """Bytes on one GPU of the five roles of one group; nothing of what is offloaded."""
    held = held_bytes(block, roles)
    return {role: 0 if _hosted(role, choice) else int(getattr(held, role)) for role in HOSTED}


def _states_text(block: Block, roles: RoleTable, role: str, choice: Choice) -> str:
    """``8,190,735,360 x 4 B / 8 GPUs`` for one role over every fate that has it."""
    terms: list[str] = []
    counts = {
        "trained": block.trained,
        "frozen": block.frozen,
        "quantised": block.quantised,
        "adapters": block.adapter,
    }
    for fate, r in roles.items():
        count = counts[fate]
        width = getattr(r, role)
        ranks = {"weights": r.weights_ranks, "gradients": r.gradients_ranks}.get(role, r.optimizer_ranks)
        if count and width:
            if role == "weights" and r.whole_weights and ranks > 1:
                codes = width - r.whole_weights
                terms.append(f"{count:,} {fate} x ({codes:g} B / {ranks} GPUs + {r.whole_weights:g} B of scales)")
            else:
                terms.append(f"{count:,} {fate} x {width:g} B" + (f" / {ranks} GPUs" if ranks > 1 else ""))
    where = ", on the host" if terms and _hosted(role, choice) else ""
    return (" + ".join(terms) or "none") + where


def reference_block(model: MemoryModel, choice: Choice) -> Block:
    """The frozen copy of the model that preference trainers hold beside the policy."""
    return Block(frozen=model.blocks(choice.method).num_parameters)


class _Texts:
    """Formulas with numbers in them for the parts of a phase."""

    def __init__(self, model: MemoryModel, choice: Choice, roles: RoleTable) -> None:
        self.model, self.choice, self.roles = model, choice, roles
        self.total = model.blocks(choice.method).total
        if model.job.reference_model:
            self.total = self.total + reference_block(model, choice)
        self.coefficients = model.coefficients(choice)
        self.tokens = rank_tokens(model.job, choice)
        self.device = model.device_of(choice)

    def _saved(self) -> str:
        """``36 x 33,554,432 B + 67,108,864 B outside them``: all that is kept when the loss begins."""
        arch, choice = self.model.job.architecture, self.choice
        _, at = self.model.activations_of(choice)
        depth = depth_of(arch.order, choice.recompute, "activations" in choice.offload)
        outside = outside_layers(at, (shape.recompute for shape in depth.shapes)) + at.final_norm
        layers = [
            f"{count} x {mode_of(at, shape.kind, shape.recompute).kept:,} B"
            for shape, count in zip(depth.shapes, depth.totals, strict=True)
            if shape.on_card
        ]
        return f"{' + '.join(layers)} + {outside:,} B outside them"

    def formula(self, part: str, phase: str) -> str:
        """How the bytes of ``part`` come about in ``phase``."""
        if part in ("weights", "gradients", "master", "moment1", "moment2"):
            text = _states_text(self.total, self.roles, part, self.choice)
            return f"up to {text}, as far as backward has come" if part == "gradients" and phase == "backward" else text
        arch = self.model.job.architecture
        if part == "saved_activations":
            kept = {
                "none": "every layer's saved tensors",
                "selective": "layer inputs and attention outputs",
            }.get(self.choice.recompute, "layer inputs")
            bands = f", {OFFLOAD_BANDS} layers of them on the card" if "activations" in self.choice.offload else ""
            share = "" if phase == "loss" else "up to "
            return f"{kept} of {arch.num_layers} layers x {self.tokens:,} tokens{bands}: {share}{self._saved()}"
        if part == "recompute":
            return f"one layer at work on {self.tokens:,} tokens" if phase != "step" else "the optimizer's own copies"
        if part == "context":
            communicators = NCCL_BYTES if self.choice.num_gpus > 1 else 0
            context = f"{format_bytes(self.device.context_bytes - communicators)} of CUDA context"
            return context + (f" + {format_bytes(communicators)} of communicators" if communicators else "")
        if part == "slack":
            return f"{self.device.slack_share:.0%} of what is allocated, reserved beside it"
        if part == "loss":
            return (
                f"{self.choice.loss_path}: {self.tokens:,} tokens x {arch.vocab:,} vocabulary, hidden {arch.hidden:,}"
            )
        return {
            "gather": "unsharded weights in use, their buffers, and those gathered ahead"
            + (", keys and values of the ring" if self.choice.cp > 1 else ""),
            "buckets": "gradient buckets and the copy being reduced",
            "casts": "2 B copies of fp32 weights that autocast keeps",
            "offload_buffers": "2 B of the largest parameter, whose gradient is on its way to the host",
        }[part]

    def source(self, part: str, phase: str) -> str:
        """Where the formula comes from."""
        if part in ("weights", "gradients", "master", "moment1", "moment2"):
            return state_source(self.choice)
        probed = "; corrected by a probe (docs/probe.md)" if self.model.correction(self.choice) else ""
        if part == "recompute" and phase == "step":
            return "torch.optim, deepspeed: step (planner/memory/optimizers.py, planner/memory/sharding.py)"
        if part in ("saved_activations", "recompute"):
            return self.coefficients.source + probed
        if part == "context" and self.model.hardware.context_bytes is not None:
            return "measured on this card (docs/probe.md)"
        return {
            "loss": f"the loss code of this TRL release (planner/memory/loss.py){probed}",
            "gather": "torch fully_shard and deepspeed defaults (planner/memory/sharding.py)",
            "buckets": "torch DDP, fully_shard and deepspeed defaults (planner/memory/sharding.py)",
            "casts": "torch.autocast weight cache",
            "offload_buffers": "deepspeed/runtime/zero/stage_1_and_2.py: temp_grad_buffer_for_gpu_offload",
            "context": "constant, not measured on this card (planner/memory/device.py)",
            "slack": "constant share, not measured on this card (planner/memory/device.py)",
        }[part]


def ledger(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """The `trlfit.ledger/1` document of one candidate."""
    job, choice, memory = problem.inputs.job, candidate.choice, problem.judge.memory_of(candidate)
    shared = problem.judge.memory.job
    groups = group_blocks(shared.architecture, choice.method, shared.lora_r, shared.lora_targets)
    if shared.reference_model:
        groups["reference"] = reference_block(problem.judge.memory, choice)
    texts = _Texts(problem.judge.memory, choice, memory.roles)
    return {
        "schema": LEDGER_SCHEMA,
        "job": {**job.model_dump(mode="json"), "origin": dict(problem.inputs.origins)},
        "choice": choice.to_json(),
        "fits": candidate.fits,
        "memory": memory_json(memory),
        "time": time_json(candidate.time, cost_of(problem, candidate)),
        "groups": [
            {
                "group": name,
                "parameters": block.trained + block.frozen + block.quantised + block.adapter,
                "trainable": block.trainable,
                "bytes": _role_bytes(block, memory.roles, choice),
                "formula": _states_text(block, memory.roles, "weights", choice),
            }
            for name, block in groups.items()
        ],
        "phases": [
            {
                "name": phase.name,
                "bytes": phase.bytes,
                "parts": [
                    {
                        "part": part,
                        "bytes": size,
                        "text": format_bytes(size),
                        "formula": texts.formula(part, phase.name),
                        "source": texts.source(part, phase.name),
                    }
                    for part, size in phase.parts.items()
                    if size
                ],
            }
            for phase in memory.phases
        ],
        "host": [
            {
                "part": part.name,
                "when": part.when,
                "bytes": part.bytes,
                "pinned": part.pinned,
                "formula": part.formula,
                "source": "planner/memory/host.py",
            }
            for part in memory.host.parts
        ],
        "textbook": textbook_gap(problem.judge.memory, choice, memory),
    }
