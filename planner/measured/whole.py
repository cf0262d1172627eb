"""A plan that ran itself: what it saw counts for exactly that choice, model and length, and for nothing else.

All knobs must be the same, the number of ranks and the accumulation among them: what several ranks add (buckets,
gathers, waiting for each other) never reaches a plan of one, nor what one saw a plan of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.measured.probes import PHASES, MeasuredWhole
from planner.measured.time import MEASURED_TIME_ERROR
from planner.memory.coefficients_json import option_key
from planner.memory.correction import MEASURED_ERROR, Correction
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.choice import Choice
    from planner.memory.model import MemoryModel


def by_choice(wholes: tuple[MeasuredWhole, ...], model: MemoryModel) -> dict[Choice, MeasuredWhole]:
    """The measured plans of the model's job by the choice that ran, the newest of each."""
    job = model.job
    found: dict[Choice, MeasuredWhole] = {}
    for whole in wholes:
        options = model.activation_options(whole.choice)
        if (
            whole.is_of(job.architecture, job.seq_len)
            and whole.options == option_key(job.architecture, options)
            and (whole.choice.method == "full" or whole.lora_r == job.lora_r)
        ):
            found.setdefault(whole.choice, whole)
    return found


def whole_correction(model: MemoryModel, whole: MeasuredWhole) -> Correction:
    """Bytes that make each phase of the choice that ran what was seen of it."""
    choice = whole.choice
    bare = model.of_job(replace(model.job, evaluates=False))
    workspace = bare.device_of(choice).workspace_bytes
    phases = bare.frame(choice).phases(choice.micro_batch, choice.grad_accum)
    said = {phase.name: phase.bytes + workspace for phase in phases}
    missed: Mapping[str, int] = {phase: whole.peaks[phase] - said[phase] for phase in PHASES}
    return Correction(missed["forward"], missed["loss"], missed["backward"], missed["step"], MEASURED_ERROR)


def notes_of_what_ran(ran_here: Mapping[Choice, MeasuredWhole], best: Choice) -> list[str]:
    """Sentences on the plan that comes first, where it or others of the job ran here."""
    own = ran_here.get(best)
    if own is not None and own.out_of_memory:
        return [
            "the best plan was probed here and ran out of the memory that a probe may take:"
            f" {own.out_of_memory[:200]}; a larger --reserve or other pins plan another"
        ]
    others = [whole for whole in ran_here.values() if not whole.out_of_memory]
    if own is not None or not others:
        return []
    # The quickest is what the best plan is held against.
    ran = min(others, key=lambda whole: whole.step_s)
    choice = ran.choice
    where = f"{choice.num_gpus} ranks of {choice.sharding}" if choice.num_gpus > 1 else "one rank"
    return [
        f"the best plan was not run here; another was ({where}, recompute {choice.recompute}, loss {choice.loss_path},"
        f" {choice.micro_batch} x {choice.grad_accum} rows) and took {format_seconds(ran.step_s)} a step, which counts"
        " what the model leaves out: `trlfit probe MODEL --whole` runs the best one too"
    ]


class WholeTime:
    """Seconds of the choice that ran: the step as seen, shared out among its parts as the model has them."""

    error = MEASURED_TIME_ERROR

    def __init__(self, whole: MeasuredWhole) -> None:
        self._step_s = whole.step_s

    def corrected(
        self, parts: tuple[float, ...], choice: Choice, layers: int, tokens: int, grad_accum: int, *, own: bool = True
    ) -> tuple[tuple[float, ...], float]:
        """Modelled seconds by part of one optimizer step so that they make the step that was seen, and that."""
        modelled = sum(parts)
        share = self._step_s / modelled if modelled else 0.0
        return tuple(part * share for part in parts), self._step_s
