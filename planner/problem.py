"""Problem: a resolved job turned into the models, rules and space that the search works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from planner.architecture import Architecture
from planner.choice import ZERO, Attention, Choice, LossPath, Method
from planner.hardware import Hardware
from planner.job import Job, rows_per_example
from planner.machine import Machine
from planner.machine_hardware import cpu_hardware, gpu_hardware
from planner.memory.coefficients import LayerWork
from planner.memory.formula import formula_coefficients
from planner.memory.model import MemoryModel
from planner.memory.parts import CoefficientSource, MemoryJob
from planner.pins import parse_pins
from planner.precision.routes import asked_route
from planner.rules import with_rules
from planner.rules.context import read_context
from planner.rules.overrides import read_overrides
from planner.search.search import Judge
from planner.search.space import SpaceOptions
from planner.stack import Stack
from planner.time.step import LayerWorkSource, TimeModel
from profiles.cards import CardProfile
from profiles.releases import feature, trl_release
from profiles.routes import EMULATED

if TYPE_CHECKING:
    from planner.measured.corrections import Corrections
    from planner.measured.probes import Measured

REFERENCE_TRAINERS = ("dpo", "kto", "rloo")
"""Trainers that hold a frozen reference model unless adapters serve as the difference (GRPO's beta defaults to 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """Everything resolved: what `make_plan` needs and nothing else."""

    job: Job
    machine: Machine
    stack: Stack
    architecture: Architecture
    profile: CardProfile | None = None
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Job field -> where its value came from (`--seq-len`, `job.yaml`, `default`)."""
    source: CoefficientSource = formula_coefficients
    notes: list[str] = field(default_factory=list[str])
    """What ``source`` has to say about its evidence, filled while it is asked: other versions, refusals."""
    measured: Measured | None = None
    """What probes saw of this machine and of these layers on it."""
    top: int = 8
    data_rows: int | None = None
    """Examples of the training data, None where nobody has counted them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One job on one machine, ready to be searched."""

    inputs: PlanInput
    hardware: Hardware
    judge: Judge
    options: SpaceOptions
    probes: Corrections | None = None
    """What was measured of the job on this machine."""


def hardware_of(inputs: PlanInput, pins: Mapping[str, Any]) -> Hardware:
    """The machine as the models read it; a machine without usable cards trains on its CPU."""
    hardware = _bare_hardware(inputs, pins)
    rates = None if inputs.measured is None else inputs.measured.machine_rates
    if rates is None or not _is_measured(inputs):
        return hardware
    from planner.measured.probes import measured_hardware  # only plans with a probe pay for it

    return measured_hardware(hardware, rates)


def _is_measured(inputs: PlanInput) -> bool:
    """Whether ``inputs.measured`` is of the machine: other machines are planned beside the user's own."""
    assert inputs.measured is not None
    cards = {card.card_id or card.name for card in inputs.machine.usable_cards}
    return cards == ({inputs.measured.card} if inputs.measured.card else set[str]())


def _bare_hardware(inputs: PlanInput, pins: Mapping[str, Any]) -> Hardware:
    if inputs.machine.usable_cards:
        return gpu_hardware(inputs.machine, inputs.profile)
    processes = pins.get("gpus")
    if processes is None:
        sizes = [pins[knob] for knob in ("cp", "sp", "tp", "dp_shard", "dp_replicate") if knob in pins]
        processes = 1
        for size in sizes:
            processes *= size
    return cpu_hardware(inputs.machine, processes)


def memory_job(job: Job, architecture: Architecture, stack: Stack) -> MemoryJob:
    """What the memory of every candidate depends on besides its choice."""
    targets = job.lora.target_modules
    release, asks = trl_release(stack.versions.get("trl", "")), read_overrides(job.trl)
    route = asked_route(job.pins)
    precomputes = asks.precompute_ref_log_probs and job.trainer in ("dpo", "kto")
    return MemoryJob(
        architecture=architecture,
        seq_len=job.seq_len,
        lora_r=job.lora.r,
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        lora_dropout=job.lora.dropout > 0,
        quantization=job.quantization,
        rows_per_sequence=rows_per_example(job.trainer),
        padded=not job.data.packing,
        reference_model=job.trainer in REFERENCE_TRAINERS and job.method == "full" and not precomputes,
        reference_in_loss=job.trainer in ("dpo", "kto") and job.method == "full" and not precomputes,
        reference_before=job.method == "full" and precomputes,
        evaluates=job.data.evaluates,
        eval_rows=asks.eval_rows,
        scores_vocabulary=job.trainer != "reward",
        logit_metrics=release.logit_metrics,
        liger_in_place=feature("liger_in_place_head", stack.versions).available,
        fsdp_first_rank_loads=feature("fsdp_first_rank_loads", stack.versions).available,
        saves_optimizer=asks.saves_optimizer,
        head_in_tail_group=groups_head(stack),
        route=route.route if route else None,
        emulated=route.emulated if route else False,
    )


def groups_head(stack: Stack) -> bool:
    """Whether FSDP2 has groups of its own for embedding and head (accelerate/utils/fsdp_utils.py, 1.14 and later)."""
    return stack.version("accelerate") is None or stack.has("accelerate", "1.14")


def space_options(
    job: Job, architecture: Architecture, stack: Stack, hardware: Hardware, pins: dict[str, Any]
) -> SpaceOptions:
    """What bounds the space for ``job``."""
    release = trl_release(stack.versions.get("trl", ""))
    loss_paths = tuple(p for p in release.loss_paths_for(job.trainer) if p != "liger" or stack.has("liger-kernel"))
    attentions: list[Attention] = ["sdpa"]
    if any(kind.attention_softcap or kind.attention_sinks for kind in architecture.kinds):
        attentions = ["eager"]
    if hardware.device == "cuda" and (stack.has("flash-attn") or stack.has("kernels")):
        attentions.append("flash_attention_2")
    eight_bit: list[str] = []
    if hardware.device == "cuda" and stack.has("bitsandbytes"):
        eight_bit.append("adamw_bnb_8bit")
    elif stack.has("torchao"):
        eight_bit.append("adamw_torch_8bit")
    return SpaceOptions(
        method=job.method,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        packing=job.data.packing,
        loss_paths=cast("tuple[LossPath, ...]", loss_paths),
        attentions=tuple(attentions),
        optimizers_8bit=tuple(eight_bit),
        allow_numerics="numerics" in job.allow,
        zero_alone=hardware.device == "cuda" and stack.has("deepspeed") and hardware.host_available_bytes is not None,
        pins=pins,
    )


def make_problem(inputs: PlanInput) -> Problem:
    """Models, rules and space for ``inputs``.

    Raises:
        planner.pins.PinError: a pin names no knob or no value of it.
    """
    job, architecture, stack = inputs.job, inputs.architecture, inputs.stack
    pins = parse_pins(job.pins)
    hardware = hardware_of(inputs, pins)
    shared = memory_job(job, architecture, stack)
    memory = MemoryModel(job=shared, hardware=hardware, reserve=job.reserve, source=inputs.source)
    probes = _probes(inputs, memory)
    if probes is not None:
        memory = replace(memory, correct=probes.memory)
    facts = read_context(
        job,
        architecture,
        stack,
        device=hardware.device,
        gpus_per_node=hardware.gpus_per_node,
        compute_capability=hardware.compute_capability,
    )
    rules = with_rules(facts)
    judge = Judge(
        memory=memory,
        time=time_model(job, stack, memory, probes),
        rules=rules,
        hardware=hardware,
    )
    options = space_options(job, architecture, stack, hardware, pins)
    return Problem(
        inputs=inputs,
        hardware=hardware,
        judge=judge,
        options=replace(options, min_micro_batch=rules.min_micro_batch),
        probes=probes,
    )


def _probes(inputs: PlanInput, memory: MemoryModel) -> Corrections | None:
    """What was measured of the job on this machine, beside a model that knows nothing of it."""
    if inputs.measured is None or not _is_measured(inputs):
        return None
    own = (inputs.job.trainer, scored_beside(inputs.job))
    jobs = tuple(probe for probe in inputs.measured.jobs if (probe.trainer, probe.scored_beside) == own)
    wholes = tuple(whole for whole in inputs.measured.wholes if (whole.trainer, whole.scored_beside) == own)
    if not jobs and not wholes:
        return None
    from planner.measured.corrections import Corrections  # only plans with a probe pay for it

    return Corrections(memory, jobs, wholes)


def time_model(job: Job, stack: Stack, memory: MemoryModel, probes: Corrections | None = None) -> TimeModel:
    """Time under the same coefficients as ``memory``, corrected by ``probes``."""
    liger = trl_release(stack.versions.get("trl", "")).liger_argument("liger", job.trainer)
    reference, policy = extra_forwards(job)
    return TimeModel(
        measured=probes.seconds(lambda small: time_model(job, stack, small)) if probes is not None else None,
        job=memory.job,
        hardware=memory.hardware,
        blocks_of=memory.blocks,
        layer_work=layer_work_of(memory),
        linear_kernels=stack.has("flash-linear-attention"),
        # use_liger_loss takes the loss alone; whoever is not TRL has transformers' use_liger_kernel.
        liger_patches_layers=liger != "use_liger_loss",
        reference_forwards=reference,
        policy_forwards=policy,
    )


def extra_forwards(job: Job) -> tuple[int, int]:
    """Forwards without gradient of every row in a training step: (of the reference, of the policy).

    DPO scores its pairs by the reference (dpo_trainer.py, ``_compute_loss``), unless that was done before training. KTO
    scores its rows, and for the KL term mismatched ones of the same size by both (kto_trainer.py,
    ``_compute_kl_logps``).
    """
    if job.trainer not in ("dpo", "kto"):
        return 0, 0
    asks = read_overrides(job.trl)
    mismatched = 1 if job.trainer == "kto" and asks.kl_batch else 0
    return 0 if asks.precompute_ref_log_probs else 1 + mismatched, mismatched


def scored_beside(job: Job) -> str:
    """What a step scores without gradient beside the rows that it trains on, in words; nothing for most trainers.

    Two jobs that differ in it hold other bytes and take other time: a reference model held beside the policy, the
    policy with its adapters switched off, or a reference that scored all rows before training.
    """
    if job.trainer not in ("dpo", "kto"):
        return ""
    reference, mismatched = extra_forwards(job)
    by = "a reference model" if job.method == "full" else "the base under its adapters"
    return (by if reference else "nothing: precomputed") + (", mismatched rows" if mismatched else "")


def layer_work_of(memory: MemoryModel) -> LayerWorkSource:
    """The work that was counted beside the bytes that ``memory`` asks for."""

    def layer_work(choice: Choice, masked: bool) -> tuple[LayerWork, ...]:
        options = replace(memory.activation_options(choice), masked=masked)
        return memory.source(memory.job.architecture, options).work

    return layer_work


def with_job(inputs: PlanInput, **changes: Any) -> PlanInput:
    """The same inputs for a changed job; nested documents are replaced whole."""
    return replace(inputs, job=inputs.job.model_copy(update=changes))


def run_file_names(choice: Choice, nodes: int) -> list[str]:
    """Names of the files that writing this choice makes."""
    names = ["train.py", "accelerate.yaml", "command.sh", "job.yaml", "plan.json"]
    if choice.sharding in ZERO:
        names.insert(2, "deepspeed.json")
    if nodes > 1:
        names.append("slurm.sh")
    if choice.precision != "bf16":
        names.append("validation.md")
        if choice.precision.endswith(EMULATED):
            names += ["route.json", "route_linear.py"]
    return names


def method_label(method: Method) -> str:
    """How a method is called in sentences."""
    return {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}[method]
