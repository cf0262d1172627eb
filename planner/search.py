"""Search: judge every frame and micro-batch, rank what fits, keep the closest of what does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf, log

from planner.choice import ZERO, Alters, Choice
from planner.hardware import Hardware
from planner.memory import MemoryEstimate, MemoryModel, Verdict
from planner.rules import Refusal, RuleContext, first_refusal
from planner.space import SpaceOptions, frames, micro_batches
from planner.step_time import TimeEstimate, TimeModel

GROUPS: tuple[Alters, ...] = ("nothing", "numerics", "method")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One judged choice. Its parts in full are ``Judge.memory_of``."""

    choice: Choice
    alters: Alters
    verdict: Verdict
    time: TimeEstimate | None

    @property
    def fits(self) -> bool:
        """The card and the host hold it, reserve included."""
        return self.verdict.fits

    @property
    def step_s(self) -> float:
        """Seconds per step; infinite when the card's rates are not known."""
        return self.time.step_s if self.time else inf

    @property
    def headroom_bytes(self) -> int:
        """Free beyond the reserve; 0 when the card's memory is not known."""
        return self.verdict.headroom_bytes or 0


@dataclass(slots=True)
class SearchResult:
    """Everything the plan needs to say."""

    fitting: list[Candidate] = field(default_factory=list[Candidate])
    near_misses: list[Candidate] = field(default_factory=list[Candidate])
    rejected: dict[str, tuple[int, Refusal, Choice]] = field(default_factory=dict[str, tuple[int, Refusal, Choice]])
    """Rule id -> (how many, the first refusal, its choice)."""
    judged: int = 0

    @property
    def best(self) -> Candidate | None:
        """The first of what fits."""
        return self.fitting[0] if self.fitting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The models and rules that every candidate of one job is held against."""

    memory: MemoryModel
    time: TimeModel
    rules: RuleContext
    hardware: Hardware

    def judge(self, choice: Choice, alters: Alters) -> Candidate:
        """Memory and time of one choice, rules aside."""
        return Candidate(choice, alters, self.memory.verdict(choice), self.time.estimate(choice))

    def memory_of(self, candidate: Candidate) -> MemoryEstimate:
        """All parts and phases of a candidate's memory."""
        return self.memory.estimate(candidate.choice)


SAME_SPEED = 0.05
"""Step times this close are one speed: a fifth of the time model's own interval."""
NEAR_MISSES = 64
"""Kept while searching; the plan shows the closest few."""


def search(judge: Judge, options: SpaceOptions, goal: str) -> SearchResult:
    """Judge the whole space.

    Memory grows with the micro-batch at a fixed frame, so the first micro-batch that does not fit ends its frame.
    """
    result = SearchResult()
    misses: list[Candidate] = []
    for frame, alters in frames(options, judge.hardware):
        refusal = first_refusal(judge.rules, frame)
        if refusal is not None:
            count, first, example = result.rejected.get(refusal.rule, (0, refusal, frame))
            result.rejected[refusal.rule] = (count + 1, first, example)
            continue
        pairs = micro_batches(frame, options)
        if not pairs:
            _reject_batch(result, frame, options)
            continue
        own = (frame.micro_batch, frame.grad_accum)
        for micro, accumulate in pairs:
            choice = frame if (micro, accumulate) == own else replace(frame, micro_batch=micro, grad_accum=accumulate)
            verdict = judge.memory.verdict(choice)
            result.judged += 1
            if not verdict.fits:
                misses.append(Candidate(choice, alters, verdict, None))
                break
            result.fitting.append(Candidate(choice, alters, verdict, judge.time.estimate(choice)))
    result.fitting = rank(result.fitting, goal)
    misses.sort(key=_shortage)
    result.near_misses = [replace(miss, time=judge.time.estimate(miss.choice)) for miss in misses[:NEAR_MISSES]]
    return result


def _reject_batch(result: SearchResult, frame: Choice, options: SpaceOptions) -> None:
    refusal = Refusal(
        rule="global-batch-divides",
        reason=f"a global batch of {options.global_batch} does not divide over {frame.data_parallel} ranks with data",
        why="the global batch is kept exactly",
        versions="all",
        source="micro_batch x grad_accum x data-parallel ranks = global_batch",
    )
    count, first, example = result.rejected.get(refusal.rule, (0, refusal, frame))
    result.rejected[refusal.rule] = (count + 1, first, example)


def _shortage(candidate: Candidate) -> tuple[int, int]:
    return (GROUPS.index(candidate.alters), -candidate.headroom_bytes)


def _simplicity(choice: Choice) -> tuple[int, ...]:
    """Between equals the run with fewer moving parts wins: packages, offload, splits, GPUs, recompute."""
    return (
        int(choice.sharding in ZERO),
        len(choice.offload),
        choice.cp * choice.sp,
        choice.num_gpus,
        int(choice.recompute != "full"),
    )


def rank(candidates: list[Candidate], goal: str) -> list[Candidate]:
    """Best first: what a candidate alters, then the goal, then simplicity.

    Step times are compared in bands of ``SAME_SPEED`` above the group's fastest, because the time model cannot tell
    closer ones apart; inside a band the simpler run comes first.
    """
    fastest: dict[str, float] = {}
    for c in candidates:
        fastest[c.alters] = min(c.step_s, fastest.get(c.alters, inf))

    def band(c: Candidate) -> int:
        best = fastest[c.alters]
        return int(log(c.step_s / best) / log(1 + SAME_SPEED)) if 0 < best < inf and c.step_s < inf else 0

    def key(c: Candidate) -> tuple[float, ...]:
        group = GROUPS.index(c.alters)
        headroom = -c.headroom_bytes
        pace = (band(c), *_simplicity(c.choice), c.step_s, headroom)
        if goal == "fewest_gpus":
            return (group, c.choice.num_gpus, *pace)
        if goal == "headroom":
            return (group, headroom, *pace)
        return (group, *pace)

    return sorted(candidates, key=key)


def distinct(candidates: Iterable[Candidate], limit: int) -> list[Candidate]:
    """The first ``limit`` candidates that differ in more than micro-batch and accumulation."""
    seen: set[Choice] = set()
    out: list[Candidate] = []
    for candidate in candidates:
        frame = replace(candidate.choice, micro_batch=1, grad_accum=1)
        if frame in seen:
            continue
        seen.add(frame)
        out.append(candidate)
        if len(out) == limit:
            break
    return out
