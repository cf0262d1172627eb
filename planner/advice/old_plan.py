"""An old plan held against today's job, machine, stack and model: what changed, and whether its choice still holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from planner.advice.explanation import change_words
from planner.choice import Alters, Choice, LossPath, Method
from planner.contradictions import check_inputs
from planner.job import Job
from planner.plan_json import round_significant
from planner.planning import planned_candidate
from planner.problem import PlanInput, Problem, make_problem, method_label, with_job
from planner.rules import all_refusals, job_refusals
from planner.search.longest import settled
from planner.search.methods import JobSearch, methods_of, search_job
from planner.search.search import SAME_SPEED, Candidate
from planner.search.shortage import short_bytes, shortage
from planner.units import format_gib, format_seconds
from profiles.releases import trl_release

AGAINST_SCHEMA = "trlfit.against/1"
NOTICED_BYTES = 2**27
"""Memory that differs by less is the same: drivers and desktops breathe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPlan:
    """What is read of an old plan; other fields may be of another version of the document."""

    job: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    choice: Choice
    device_bytes: int
    allocated_bytes: int
    step_s: float | None


def held_against(inputs: PlanInput, old: OldPlan) -> dict[str, Any]:
    """The `trlfit.against/1` document; ``holds`` says whether the old choice is legal and fits.

    Raises:
        planner.pins.PinError: a pin names no knob or no value of it, or sizes that make no run.
        planner.memory.adapters.TargetError: LoRA targets that the model does not have.
    """
    check_inputs(inputs)
    inputs = settled(inputs)
    found = search_job(inputs, inputs.job.goal)
    problem, best = _problem_of(found, inputs, old.choice.method), found.best
    choice, adapted = _adapted(problem, old.choice)
    refused = _other_question(inputs.job, choice) or _refusal(problem, choice)
    alters: Alters = "nothing" if choice.method == inputs.job.method else "method"
    now = None if refused else problem.judge.judge(choice, alters)
    holds = now is not None and now.fits
    is_best = holds and best is not None and best.choice == choice
    slower_s = now.step_s - best.step_s if now and best and now.time and best.time and holds and not is_best else 0.0
    document = planned_candidate(problem, now, reasons=[]) if now else None
    new_best = planned_candidate(found.problem_of(best), best, reasons=[]) if best else None
    return {
        "schema": AGAINST_SCHEMA,
        "job": inputs.job.model_dump(mode="json"),
        "machine": inputs.machine.model_dump(mode="json", by_alias=True),
        "stack": inputs.stack.model_dump(mode="json"),
        "changed": {
            "job": list(_differences(old.job, inputs.job.model_dump(mode="json"))),
            "machine": list(_machine_changes(old.machine, inputs.machine.model_dump(mode="json", by_alias=True))),
            "stack": list(_differences(old.versions, inputs.stack.versions)),
        },
        "adapted": adapted,
        "prediction": {
            "device_bytes": [old.device_bytes, now.verdict.device_bytes if now else None],
            "allocated_bytes": [old.allocated_bytes, document["memory"]["allocated_bytes"] if document else None],
            "step_s": [old.step_s, round_significant(now.step_s) if now and now.time else None],
        },
        "holds": holds,
        "refused": refused,
        "short_bytes": short_bytes(problem, now) if now else 0,
        "is_best": is_best,
        "slower_s": round_significant(slower_s),
        "candidate": document,
        "best": new_best,
        "sentence": (_sentence(problem, now, best) if now else f"the old choice cannot run: {refused}")
        + ("" if holds else _instead(choice, best))
        + _other_length(inputs.job, old.job),
    }


def _problem_of(found: JobSearch, inputs: PlanInput, method: Method) -> Problem:
    """The job under the choice's own method, also where that was not searched."""
    problem = found.under(method)
    return problem if problem.options.method == method else make_problem(with_job(inputs, method=method))


def _adapted(problem: Problem, choice: Choice) -> tuple[Choice, list[str]]:
    """The choice as the same run script makes it here, and in words what that changes.

    Another TRL computes the loss in its own way, and another global batch is another accumulation.
    """
    inputs, words = problem.inputs, list[str]()
    paths = trl_release(inputs.stack.versions.get("trl", "")).loss_paths_for(inputs.job.trainer)
    if choice.loss_path not in paths:
        words.append(f"this TRL computes the loss as {paths[0]}, not as {choice.loss_path}")
        choice = replace(choice, loss_path=cast("LossPath", paths[0]))
    accumulate, rest = divmod(inputs.job.global_batch, choice.micro_batch * choice.data_parallel)
    if accumulate != choice.grad_accum and not rest and accumulate:
        words.append(f"the global batch takes {accumulate} micro-batches per step, not {choice.grad_accum}")
        choice = replace(choice, grad_accum=accumulate)
    return choice, words


def _other_question(job: Job, choice: Choice) -> str | None:
    """Why the choice is no answer to the job: another method than it allows, or data packed otherwise; or None."""
    if choice.method not in methods_of(job):
        return f"it is {method_label(choice.method)}, and the job asks for {method_label(job.method)}"
    if choice.packing != job.data.packing:
        return (
            "it packs its data, and the job does not" if choice.packing else "the job packs its data, and it does not"
        )
    return None


def _refusal(problem: Problem, choice: Choice) -> str | None:
    """Why the choice cannot run at all, or None."""
    of_job = job_refusals(problem.judge.rules)
    if of_job:
        return of_job[0].reason
    have = problem.hardware.num_gpus
    if choice.num_gpus > have:
        gpus = "1 GPU" if have == 1 else f"{have} GPUs"
        return f"it uses {choice.num_gpus} GPUs, and the machine has {gpus} to use"
    refusals = all_refusals(problem.judge.rules, choice)
    return refusals[0].reason if refusals else None


def _sentence(problem: Problem, now: Candidate, best: Candidate | None) -> str:
    """Of a choice that can run."""
    if not now.fits:
        lacks = shortage(problem.judge.memory_of(now), problem.hardware, now.choice.num_gpus)
        return f"the old choice does not fit any more: {lacks}"
    if best is None or best.choice == now.choice:
        return "the old choice still holds, and is still the best"
    words = "the old choice still holds"
    if not now.time or not best.time:
        return f"{words}; the plan would now take {change_words(now.choice, best.choice)}"
    gain = now.step_s / best.step_s - 1
    change = change_words(now.choice, best.choice)
    if abs(gain) <= SAME_SPEED:
        return f"{words}; as fast would be: {change}"
    pace = f"{format_seconds(now.step_s)} per step for {format_seconds(best.step_s)}"
    if gain < 0:
        asks = "the pins ask for" if problem.inputs.job.pins else "the goal now asks for"
        return f"{words}, and is faster than what {asks}: {change} ({pace})"
    return f"{words}, but is {gain:.0%} slower than {change} ({pace})"


def _instead(choice: Choice, best: Candidate | None) -> str:
    if best is None:
        return "; nothing fits as asked"
    pace = f", {format_seconds(best.step_s)} per step" if best.time else ""
    change = change_words(choice, best.choice)
    return f"; what does: {change} ({format_gib(best.verdict.device_bytes)} GiB per GPU{pace})"


def _other_length(job: Job, before: Mapping[str, Any]) -> str:
    """Of goal ``longest``, where the length is not the old one: the choice was held to another."""
    tokens = before.get("seq_len")
    if job.goal != "longest" or before.get("goal") != "longest" or tokens in (None, job.seq_len):
        return ""
    return f"; the longest sequence is {job.seq_len:,} tokens now, {tokens:,} in that plan"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[dict[str, Any]]:
    """Dotted fields whose values differ, with both."""
    for name in (*old, *(name for name in new if name not in old)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        elif before != after:
            yield {"field": prefix + name, "values": [before, after]}


def _machine_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a run notices: cards, nodes, memory of the cards and what is taken of it, the host."""
    kinds: list[list[Any]] = [[card.get("card_id") or card.get("name") for card in _usable(m)] for m in (old, new)]
    if kinds[0] != kinds[1]:
        yield {"field": "cards", "values": kinds}
    if old.get("nodes") != new.get("nodes"):
        yield {"field": "nodes", "values": [old.get("nodes"), new.get("nodes")]}
    fields = ("total_bytes", "used_bytes") if kinds[0] == kinds[1] else ("used_bytes",)
    for index, (before, after) in enumerate(zip(_usable(old), _usable(new), strict=False)):
        for field in fields:
            yield from _noticed(f"cards[{index}].{field}", before.get(field), after.get(field))
    hosts: list[Mapping[str, Any]] = [machine.get("host") or {} for machine in (old, new)]
    if all(hosts):
        yield from _noticed("host.available_bytes", *(host.get("available_bytes") for host in hosts))


def _noticed(field: str, before: int | None, after: int | None) -> Iterator[dict[str, Any]]:
    if abs((before or 0) - (after or 0)) >= NOTICED_BYTES:
        yield {"field": field, "values": [before, after]}


def _usable(machine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [card for card in machine.get("cards", []) if card.get("usable", True)]
