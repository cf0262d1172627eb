"""From flags and files to a plan: resolves job, machine, stack and architecture, then asks the planner."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, TypeVar

from launcher.errors import UsageError
from launcher.evidence.coefficient_store import may_trace, source_for
from launcher.evidence.measurement_store import measured_for
from launcher.flags import job_flags
from launcher.inputs.data_rows import count_rows
from launcher.inputs.job_file import resolve_job
from launcher.inputs.machines import resolve_machine
from launcher.inputs.model_config import resolve_architecture
from launcher.inputs.stack import resolve_stack
from launcher.inputs.validation_text import shown
from launcher.narration import Narrator, StderrNarrator
from planner.architecture import Architecture
from planner.config.families import FAMILIES
from planner.job import MAX_GLOBAL_BATCH, Job
from planner.machine import Machine
from planner.memory.adapters import TargetError
from planner.pins import PinError, parse_pins
from planner.planning import PlanOutcome, RefusedJob, make_plan
from planner.problem import PlanInput, hardware_of
from profiles.cards import CardNotFound, CardProfile, card_for_nvml_name, find_card

if TYPE_CHECKING:
    from planner.ledger.one_choice import OneChoice

Answer = TypeVar("Answer")


def plan_inputs(
    job: Job,
    origins: Mapping[str, str],
    python: str | None,
    top: int,
    *,
    trace: bool = True,
    narrator: Narrator | None = None,
) -> PlanInput:
    """Everything `make_plan` needs, read from this machine.

    Args:
        job: the resolved job.
        origins: job field -> where its value came from.
        python: the training Python, None for the one running.
        top: how many candidates the plan lists.
        trace: whether a model that is neither bundled nor cached may be traced, which takes seconds.
        narrator: told about a running trace and what is wrong on this machine; None narrates on stderr.

    Raises:
        UsageError: the model, machine, stack or a combination of them is wrong.
        EnvironmentLacks: something had to be asked and could not.
    """
    machine = resolve_machine(job.machine, nodes=job.nodes)
    architecture = resolve_architecture(job.model)
    _refuse_unseen_code(architecture, job)
    elsewhere = machine.origin in ("named", "file")
    stack = resolve_stack(job.stack, python, assume_optional=elsewhere)
    narrator = narrator or StderrNarrator("; --no-trace plans with closed forms instead")
    notes: list[str] = []
    source = source_for(
        architecture,
        stack,
        trace=trace and may_trace(architecture, stack),
        notes=notes,
        warn=narrator.warn,
        progress=narrator.traced,
    )
    return PlanInput(
        job=job,
        machine=machine,
        stack=stack,
        architecture=architecture,
        profile=card_profile(machine),
        origins=origins,
        source=source,
        measured=measured_for(machine, stack, architecture, notes),
        notes=notes,
        top=top,
        data_rows=count_rows(job.data.dataset),
    )


def _refuse_unseen_code(architecture: Architecture, job: Job) -> None:
    """Raise for layers that only code beside the checkpoint defines, unless the user trusts that code.

    Raises:
        UsageError: what to do.
    """
    if not architecture.remote_code or architecture.model_type in FAMILIES or job.trl.get("trust_remote_code"):
        return
    raise UsageError(
        f"model {shown(architecture.model)}: only code of its own (auto_map) defines model_type"
        f" {shown(architecture.model_type)}; read it, then add --trl trust_remote_code=true to plan it as a Llama-like"
        " decoder"
    )


def card_profile(machine: Machine) -> CardProfile | None:
    """Rates of the machine's weakest known card, None when there is none or it is not in the table."""
    profiles: list[CardProfile] = []
    for card in machine.usable_cards:
        if card.card_id is not None:
            try:
                profiles.append(find_card(card.card_id))
                continue
            except CardNotFound:
                pass
        found = card_for_nvml_name(card.name, card.total_bytes)
        if found is None:
            return None
        profiles.append(found)
    return min(profiles, key=lambda p: p.bf16_tflops or p.fp16_tflops or 0.0, default=None)


def plan_from_args(args: argparse.Namespace) -> PlanOutcome:
    """Plan what the command line asks for.

    Raises:
        TrlfitError: with the line and exit code for the user.
    """
    explain = getattr(args, "explain", False)
    top = getattr(args, "top", 8)
    return plan_job(*job_from_args(args), args.python, top, trace=args.trace is not False, explain=explain)


def inputs_from_args(args: argparse.Namespace, top: int = 1) -> PlanInput:
    """What the planner would be asked of the command line.

    Raises:
        TrlfitError: with the line and exit code for the user.
    """
    return inputs_of_job(*job_from_args(args), args, top)


def inputs_of_job(job: Job, origins: Mapping[str, str], args: argparse.Namespace, top: int = 1) -> PlanInput:
    """The same for a job that is resolved already; ``args`` says which Python trains, and whether to trace.

    Raises:
        TrlfitError: with the line and exit code for the user.
    """
    return _with_pinned_batch(plan_inputs(job, origins, args.python, top, trace=args.trace is not False))


def choice_from_args(args: argparse.Namespace) -> OneChoice:
    """The one choice that the command line asks for, allowed to run or not.

    Raises:
        TrlfitError: with the line and exit code for the user.
    """
    from planner.ledger.one_choice import choose_one  # only the ledger needs it

    return answered(choose_one, inputs_from_args(args))


def job_from_args(args: argparse.Namespace) -> tuple[Job, dict[str, str]]:
    """The job of file and flags, and where each value came from."""
    flags, names = job_flags(args)
    return resolve_job(args.job, flags, names)


def plan_job(
    job: Job,
    origins: Mapping[str, str],
    python: str | None,
    top: int,
    *,
    trace: bool = True,
    narrator: Narrator | None = None,
    explain: bool = False,
) -> PlanOutcome:
    """Plan a resolved job on this machine; arguments as of ``plan_inputs`` and ``make_plan``, whose errors it raises.

    The planner's refusals become usage errors.
    """
    inputs = plan_inputs(job, origins, python, top, trace=trace, narrator=narrator)
    return answered(partial(make_plan, explain=explain), _with_pinned_batch(inputs))


def answered(planner: Callable[[PlanInput], Answer], inputs: PlanInput) -> Answer:
    """What the planner answers; its refusals as usage errors."""
    try:
        return planner(inputs)
    except PinError as error:
        raise UsageError(f"pin {error}") from None
    except (RefusedJob, TargetError) as error:
        raise UsageError(str(error)) from None


def _with_pinned_batch(inputs: PlanInput) -> PlanInput:
    """Where micro-batch and accumulation are pinned and the global batch is not given, it follows from them.

    The ranks are those of the pinned sizes; where these are open, every GPU of the machine.
    """
    job = inputs.job
    if (
        inputs.origins.get("global_batch", "default") != "default"
        or not {"micro_batch", "grad_accum"} <= job.pins.keys()
    ):
        return inputs
    try:
        pins = parse_pins(job.pins)
    except PinError as error:
        raise UsageError(f"pin {error}") from None
    sizes = [pins[knob] for knob in ("dp_shard", "dp_replicate") if knob in pins]
    if pins.get("sharding") == "none":
        ranks = 1
    elif len(sizes) == 2:
        ranks = prod(sizes)
    else:
        gpus = pins.get("gpus", hardware_of(inputs, pins).num_gpus)
        ranks = max(1, gpus // prod(pins.get(knob, 1) for knob in ("cp", "sp", "tp")))
    product = pins["micro_batch"] * pins["grad_accum"] * ranks
    if product > MAX_GLOBAL_BATCH:
        raise UsageError(
            f"pin micro_batch={pins['micro_batch']} x grad_accum={pins['grad_accum']} on {ranks:,} ranks makes a global"
            f" batch of {product:,}; the largest is {MAX_GLOBAL_BATCH:,}"
        )
    origins = {**inputs.origins, "global_batch": "pins micro_batch, grad_accum"}
    return replace(inputs, job=job.model_copy(update={"global_batch": product}), origins=origins)
