"""From flags and files to a plan: resolves job, machine, stack and architecture, then asks the planner."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.errors import UsageError
from launcher.flags import job_flags
from launcher.job_file import resolve_job
from launcher.machines import resolve_machine
from launcher.model_config import resolve_architecture
from launcher.stack import resolve_stack
from planner.adapters import TargetError
from planner.job import MAX_GLOBAL_BATCH, Job
from planner.machine import Machine
from planner.pins import PinError, parse_pins
from planner.planning import PlanOutcome, RefusedJob, make_plan
from planner.problem import PlanInput, hardware_of
from profiles.cards import CardNotFound, CardProfile, card_for_nvml_name, find_card

if TYPE_CHECKING:
    from planner.one_choice import OneChoice

Answer = TypeVar("Answer")


def plan_inputs(job: Job, origins: Mapping[str, str], python: str | None, top: int) -> PlanInput:
    """Everything `make_plan` needs, read from this machine.

    Raises:
        UsageError: the model, machine, stack or a combination of them is wrong.
        EnvironmentLacks: something had to be asked and could not.
    """
    machine = resolve_machine(job.machine, nodes=job.nodes)
    architecture = resolve_architecture(job.model)
    elsewhere = machine.origin in ("named", "file")
    stack = resolve_stack(job.stack, python, assume_optional=elsewhere)
    return PlanInput(
        job=job,
        machine=machine,
        stack=stack,
        architecture=architecture,
        profile=card_profile(machine),
        origins=origins,
        top=top,
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
    return plan_job(*job_from_args(args), args.python, getattr(args, "top", 8))


def choice_from_args(args: argparse.Namespace) -> OneChoice:
    """The one choice that the command line asks for, allowed to run or not.

    Raises:
        TrlfitError: with the line and exit code for the user.
    """
    from planner.one_choice import choose_one  # only the ledger needs it

    inputs = _with_pinned_batch(plan_inputs(*job_from_args(args), args.python, top=1))
    return _asked(choose_one, inputs)


def job_from_args(args: argparse.Namespace) -> tuple[Job, dict[str, str]]:
    """The job of file and flags, and where each value came from."""
    flags, names = job_flags(args)
    return resolve_job(args.job, flags, names)


def plan_job(job: Job, origins: Mapping[str, str], python: str | None, top: int) -> PlanOutcome:
    """Plan a resolved job on this machine; the planner's refusals become usage errors."""
    return _asked(make_plan, _with_pinned_batch(plan_inputs(job, origins, python, top)))


def _asked(planner: Callable[[PlanInput], Answer], inputs: PlanInput) -> Answer:
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


def job_file_of(path: str) -> Path | None:
    """``path`` as a job file, when it looks like one."""
    return Path(path) if path.endswith((".yaml", ".yml")) else None
