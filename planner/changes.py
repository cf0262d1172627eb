"""Changes: the smallest alterations of the job or the machine that would fit, or help. Offered, never made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from planner.choice import Alters, LossPath, Method
from planner.machine import Machine
from planner.problem import PlanInput, Problem, make_problem, method_label, with_job
from planner.search import Candidate, search
from planner.units import format_gib, format_seconds
from profiles.releases import newest_known, trl_release

MIN_GAIN = 0.10
"""A change is offered beside a plan that fits only when it saves at least this share of the step."""
WORTH_IT = 0.02
"""A newer TRL is mentioned when it saves at least this share of the peak or of the step."""
SHORTEST_OFFERED = 256
LAYOUT_KNOBS = ("sharding", "cp", "sp", "tp", "dp_shard", "dp_replicate", "loss_path", "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One alteration, how to ask for it, and the best plan under it."""

    lever: str
    alters: Alters
    flags: str
    sentence: str
    problem: Problem
    """The altered job on its machine: what ``candidate`` was judged by."""
    candidate: Candidate


def _try(inputs: PlanInput, lever: str, alters: Alters, flags: str, what: str) -> Change | None:
    goal = inputs.job.goal if inputs.job.goal != "longest" else "fastest"
    problem = make_problem(inputs)
    best = search(problem.judge, problem.options, goal).best
    if best is None:
        return None
    speed = f", {format_seconds(best.step_s)} per step" if best.time else ""
    sentence = f"{what}: fits with {format_gib(best.verdict.device_bytes)} GiB per GPU{speed}"
    return Change(lever=lever, alters=alters, flags=flags, sentence=sentence, problem=problem, candidate=best)


def _more_cards(machine: Machine) -> Iterator[tuple[int, Machine]]:
    """The same machine with more of its own card, twice and four times as many."""
    for factor in (2, 4, 8):
        cards = [
            card.model_copy(update={"index": index, "uuid": None})
            for index, card in enumerate(card for _ in range(factor) for card in machine.usable_cards)
        ]
        yield len(cards), machine.model_copy(update={"cards": cards, "origin": "named"})


def changes_that_fit(inputs: PlanInput) -> list[Change]:
    """When nothing fits: each lever on its own, in the order of how little it alters.

    8-bit optimizer or pure bf16, LoRA, QLoRA, a newer TRL, fewer tokens, more GPUs.
    """
    job = inputs.job
    found: list[Change | None] = []
    if "numerics" not in job.allow:
        allowed = with_job(inputs, allow=[*job.allow, "numerics"])
        found.append(
            _try(
                allowed,
                "numerics",
                "numerics",
                "--allow numerics",
                "lighter weights or optimizer states",
            )
        )
    lighter: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}
    for method in lighter[job.method]:
        found.append(
            _try(
                with_job(inputs, method=method),
                method,
                "method",
                f"--method {method}",
                f"{method_label(method)} instead of {method_label(job.method)}",
            )
        )
    newest = newest_known()["trl"]
    if inputs.stack.has("trl") and not inputs.stack.has("trl", newest):
        stack = inputs.stack.model_copy(update={"versions": {**inputs.stack.versions, "trl": newest}})
        found.append(
            _try(
                replace(inputs, stack=stack),
                "newer TRL",
                "nothing",
                f"--stack trl={newest}",
                f"TRL {newest}",
            )
        )
    found.append(_shorter(inputs))
    if inputs.machine.usable_cards:
        for count, machine in _more_cards(inputs.machine):
            change = _try(
                replace(inputs, machine=machine),
                "more GPUs",
                "nothing",
                f"--machine {count}x{inputs.profile.id if inputs.profile else 'CARD'}",
                f"{count} such GPUs",
            )
            if change is not None:
                found.append(change)
                break
    return [change for change in found if change is not None]


def _shorter(inputs: PlanInput) -> Change | None:
    """The longest power-of-two fraction of the sequence that fits."""
    length = inputs.job.seq_len // 2
    while length >= SHORTEST_OFFERED:
        change = _try(
            with_job(inputs, seq_len=length),
            "fewer tokens",
            "nothing",
            f"--seq-len {length}",
            f"sequences of {length:,} tokens",
        )
        if change is not None:
            return change
        length //= 2
    return None


def changes_that_help(problem: Problem, best: Candidate) -> list[Change]:
    """When a plan fits: what a newer TRL buys, and lighter numerics if they save a tenth of the step or more."""
    return [change for change in (_newer_trl(problem, best), _lighter_numerics(problem, best)) if change is not None]


def _newer_trl(problem: Problem, best: Candidate) -> Change | None:
    """The same choice on the newest known TRL, when its loss costs less there."""
    inputs, newest = problem.inputs, newest_known()["trl"]
    path = trl_release(newest).loss_paths_for(inputs.job.trainer)[0]
    if inputs.stack.has("trl", newest) or best.choice.loss_path in (path, "liger"):
        return None
    stack = inputs.stack.model_copy(update={"versions": {**inputs.stack.versions, "trl": newest}})
    newer = make_problem(replace(inputs, stack=stack))
    found = newer.judge.judge(replace(best.choice, loss_path=cast("LossPath", path)), best.alters)
    saved = best.verdict.device_bytes - found.verdict.device_bytes
    gain = 1 - found.step_s / best.step_s if best.time and found.time else 0.0
    if saved < WORTH_IT * best.verdict.device_bytes and gain < WORTH_IT:
        return None
    now = inputs.stack.versions.get("trl", "?")
    sentence = (
        f"TRL {newest} computes the loss as {path}, TRL {now} as {best.choice.loss_path}:"
        f" {format_gib(abs(saved))} GiB {'less' if saved >= 0 else 'more'} per GPU at the peak"
        f" and {abs(gain):.0%} {'less' if gain >= 0 else 'more'} time per step"
    )
    return Change(
        lever="newer TRL",
        alters="nothing",
        flags=f"--stack trl={newest}",
        sentence=sentence,
        problem=newer,
        candidate=found,
    )


def _lighter_numerics(problem: Problem, best: Candidate) -> Change | None:
    """Pure bf16 or 8-bit states in the same layout."""
    inputs = problem.inputs
    if "numerics" in inputs.job.allow or best.time is None or inputs.job.method != "full":
        return None
    layout = {knob: getattr(best.choice, knob) for knob in LAYOUT_KNOBS}
    open_space = replace(problem.options, allow_numerics=True, pins={**layout, **problem.options.pins})
    result = search(problem.judge, open_space, "fastest")
    faster = [c for c in result.fitting if c.alters == "numerics" and c.step_s < best.step_s * (1 - MIN_GAIN)]
    if not faster:
        return None
    found = faster[0]
    gain = 1 - found.step_s / best.step_s
    held = f"{found.choice.weights} weights, {found.choice.optimizer}"
    return Change(
        lever="numerics",
        alters="numerics",
        flags="--allow numerics",
        sentence=f"{held}: {gain:.0%} less time per step, but other rounding than fp32 states",
        problem=problem,
        candidate=found,
    )
