"""Releases compared: the chosen run under every other way in which TRL has computed its loss, in bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from planner.choice import LossPath
from planner.plan_json import round_significant
from planner.problem import PlanInput, Problem, make_problem
from planner.rules import first_refusal
from planner.search.search import Candidate
from planner.units import format_gib, format_seconds
from profiles.releases import known_trl_releases, release_numbers, trl_release

SAME = 0.005
"""A step or a peak this close is the same."""


def other_releases(inputs: PlanInput) -> Iterator[str]:
    """The last release of each other default loss path, newest first, as far back as the chunked loss goes."""
    here = inputs.stack.versions.get("trl")
    if here is None:
        return
    path = trl_release(here).loss_paths_for(inputs.job.trainer)[0]
    last: dict[str, str] = {}
    for release in known_trl_releases():
        last[release.loss_paths_for(inputs.job.trainer)[0]] = release.checked
    for other, version in sorted(last.items(), key=lambda item: release_numbers(item[1]), reverse=True):
        if other != path:
            yield version


def releases_compared(problem: Problem, best: Candidate) -> list[dict[str, Any]]:
    """One entry a release; none for a run whose loss is Liger's, which is the same in all of them."""
    if best.choice.loss_path == "liger":
        return []
    return [entry for version in other_releases(problem.inputs) if (entry := _entry(problem, best, version))]


def _entry(problem: Problem, best: Candidate, version: str) -> dict[str, Any] | None:
    inputs = problem.inputs
    stack = inputs.stack.model_copy(update={"versions": {**inputs.stack.versions, "trl": version}})
    path = trl_release(version).loss_paths_for(inputs.job.trainer)[0]
    there = make_problem(replace(inputs, stack=stack))
    choice = replace(best.choice, loss_path=cast("LossPath", path))
    if first_refusal(there.judge.rules, choice) is not None:
        return None
    found = there.judge.judge(choice, best.alters)
    extra = found.verdict.device_bytes - best.verdict.device_bytes
    extra_s = found.step_s - best.step_s if best.time and found.time else None
    return {
        "trl": version,
        "loss_path": path,
        "fits": found.fits,
        "extra_bytes": extra,
        "extra_s": round_significant(extra_s) if extra_s is not None else None,
        "sentence": _sentence(version, path, best, found),
    }


def _sentence(version: str, path: str, best: Candidate, found: Candidate) -> str:
    extra = found.verdict.device_bytes - best.verdict.device_bytes
    words = f"TRL {version} computes the loss as {path}: "
    if abs(extra) < SAME * best.verdict.device_bytes:
        words += "the same memory"
    else:
        words += f"{format_gib(abs(extra))} GiB {'more' if extra > 0 else 'less'} per GPU at the peak"
    if best.time and found.time:
        gain = found.step_s / best.step_s - 1
        if abs(gain) < SAME:
            words += ", the same time"
        else:
            took = f"{format_seconds(found.step_s)} for {format_seconds(best.step_s)}"
            words += f", {abs(gain):.0%} {'more' if gain > 0 else 'less'} time per step ({took})"
    return words + ("" if found.fits else "; does not fit")
