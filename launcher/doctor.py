"""Doctor: what this machine lacks for what, and the command that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.errors import TrlfitError
from launcher.inputs.machines import resolve_machine
from launcher.inputs.stack import inspect_stack
from planner.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a task needs."""

    what: str
    state: Literal["ok", "missing", "optional"]
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """Plain JSON."""
        return {"what": self.what, "state": self.state, "found": self.found, "fix": self.fix}


REQUIRED = (
    ("torch", "2.6", "training"),
    ("transformers", "5.17", "training with every recompute mode and offload"),
    ("trl", "1.13", "training without fp32 copies of the head"),
    ("accelerate", "1.15", "launching, FSDP2 and context parallelism"),
    ("datasets", "4", "reading training data"),
    ("peft", "0.18", "LoRA and QLoRA"),
)
OPTIONAL = (
    ("deepspeed", "0.18.2", "ZeRO and sequence parallelism"),
    ("bitsandbytes", "0.46", "QLoRA and 8-bit optimizers"),
    ("flash-attn", "2", "packing at long lengths"),
)


def checkup(python: str | None) -> list[Check]:
    """Every check, in the order of importance."""
    checks: list[Check] = []
    machine = resolve_machine("local")
    if machine.usable_cards:
        checks.append(
            Check(
                what="GPUs",
                state="ok",
                found=f"{len(machine.usable_cards)} usable, driver {machine.driver_version}",
            )
        )
    else:
        note = machine.notes[0] if machine.notes else "no usable card"
        checks.append(
            Check(
                what="GPUs",
                state="optional",
                found=note,
                fix="plan for another box: --machine 1xH100-80GB",
            )
        )
    try:
        stack = inspect_stack(python)
    except TrlfitError as error:
        return [
            *checks,
            Check(what="training Python", state="missing", found=str(error), fix="--python PATH"),
        ]
    runner = f"{stack.python} -m pip" if stack.python else "pip"
    checks += [_package(stack, runner, *needed, optional=False) for needed in REQUIRED]
    checks += [_package(stack, runner, *needed, optional=True) for needed in OPTIONAL]
    return checks


def _package(stack: Stack, runner: str, package: str, minimum: str, purpose: str, *, optional: bool) -> Check:
    what = f"{package} >= {minimum} for {purpose}"
    if stack.has(package, minimum):
        return Check(what=what, state="ok", found=stack.versions[package])
    found = stack.versions.get(package, "not installed")
    return Check(
        what=what,
        state="optional" if optional else "missing",
        found=found,
        fix=f"{runner} install '{package}>={minimum}'",
    )
