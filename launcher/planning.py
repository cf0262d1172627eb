"""From flags and files to a plan: resolves job, machine, stack and architecture, then asks the planner."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.flags import job_flags
from launcher.job_file import resolve_job
from launcher.machines import resolve_machine
from launcher.model_config import resolve_architecture
from launcher.stack import resolve_stack
from planner.adapters import TargetError
from planner.job import Job
from planner.machine import Machine
from planner.pins import PinError
from planner.planning import PlanOutcome, RefusedJob, make_plan
from planner.problem import PlanInput
from profiles.cards import CardNotFound, CardProfile, card_for_nvml_name, find_card


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
    flags, names = job_flags(args)
    job, origins = resolve_job(args.job, flags, names)
    return plan_job(job, origins, args.python, getattr(args, "top", 8))


def plan_job(job: Job, origins: Mapping[str, str], python: str | None, top: int) -> PlanOutcome:
    """Plan a resolved job on this machine; the planner's refusals become usage errors."""
    job = _with_pinned_batch(job, origins)
    inputs = plan_inputs(job, origins, python, top)
    try:
        return make_plan(inputs)
    except PinError as error:
        raise UsageError(f"pin {error}") from None
    except (RefusedJob, TargetError) as error:
        raise UsageError(str(error)) from None


def _with_pinned_batch(job: Job, origins: Mapping[str, str]) -> Job:
    """Where micro-batch and accumulation are pinned and the global batch is not given, it follows from them."""
    if origins.get("global_batch", "default") != "default" or not {"micro_batch", "grad_accum"} <= job.pins.keys():
        return job
    ranks = 1
    sizes: dict[str, Any] = job.pins
    for knob in ("dp_shard", "dp_replicate"):
        if str(sizes.get(knob, "")).isdigit():
            ranks *= int(sizes[knob])
    micro, accumulate = str(sizes["micro_batch"]), str(sizes["grad_accum"])
    if not (micro.isdigit() and accumulate.isdigit()):
        return job
    product = int(micro) * int(accumulate) * ranks
    return job.model_copy(update={"global_batch": product}) if 1 <= product <= 1_000_000 else job


def job_file_of(path: str) -> Path | None:
    """``path`` as a job file, when it looks like one."""
    return Path(path) if path.endswith((".yaml", ".yml")) else None
