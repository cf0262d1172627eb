"""Search: judge every frame and micro-batch, rank what fits, keep the closest of what does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from math import inf, log
from typing import NamedTuple

from planner.choice import ZERO, Alters, Choice
from planner.hardware import Hardware
from planner.memory.frame import Verdict
from planner.memory.model import MemoryEstimate, MemoryModel
from planner.rules import Refusal, RuleContext, first_refusal
from planner.search.space import SpaceOptions, frames, micro_batches
from planner.time.step import TimeEstimate, TimeModel

GROUPS: tuple[Alters, ...] = ("nothing", "numerics", "method")


class Candidate(NamedTuple):
    """One judged choice. Its parts in full are ``Judge.memory_of``."""

    frame: Choice
    """Every knob but micro-batch and accumulation, which may be another candidate's of the same frame."""
    micro_batch: int
    grad_accum: int
    alters: Alters
    verdict: Verdict
    time: TimeEstimate | None

    @property
    def choice(self) -> Choice:
        """The whole choice."""
        if (self.micro_batch, self.grad_accum) == (self.frame.micro_batch, self.frame.grad_accum):
            return self.frame
        return replace(self.frame, micro_batch=self.micro_batch, grad_accum=self.grad_accum)

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
        verdict, time = self.memory.verdict(choice), self.time.estimate(choice)
        return Candidate(choice, choice.micro_batch, choice.grad_accum, alters, verdict, time)

    def memory_of(self, candidate: Candidate) -> MemoryEstimate:
        """All parts and phases of a candidate's memory."""
        return self.memory.estimate(candidate.choice)


SAME_SPEED = 0.05
"""Step times this close are one speed: a quarter of the time model's narrowest interval, 20 % either way."""
NEAR_MISSES = 64
"""Kept while searching; the plan shows the closest few."""


def search(judge: Judge, options: SpaceOptions, goal: str, *, by_group: bool = True) -> SearchResult:
    """Judge the whole space.

    Args:
        judge: models and rules.
        options: the space.
        goal: what comes first of what fits.
        by_group: near misses that alter nothing come before all others, however close; else the closest come first.

    Memory grows with the micro-batch as long as gradients accumulate. So the first micro-batch of a frame that does not
    fit ends it, but for the one that makes the global batch in a single pass and keeps no gradients beside it.
    """
    result = SearchResult()
    misses: list[Candidate] = []
    splits: dict[int, list[tuple[int, int]]] = {}
    for frame, alters in frames(options, judge.hardware):
        refusal = first_refusal(judge.rules, frame)
        if refusal is not None:
            count, first, example = result.rejected.get(refusal.rule, (0, refusal, frame))
            result.rejected[refusal.rule] = (count + 1, first, example)
            continue
        pairs = splits.get(frame.data_parallel)
        if pairs is None:
            pairs = splits[frame.data_parallel] = micro_batches(options, frame.data_parallel)
        memory, time = judge.memory.frame(frame), None
        full = False
        for micro, accumulate in pairs:
            if full and accumulate > 1:
                continue
            verdict = memory.verdict(micro, accumulate)
            result.judged += 1
            if not verdict.fits:
                full = True
                misses.append(Candidate(frame, micro, accumulate, alters, verdict, None))
                continue
            time = time or judge.time.frame(frame)
            estimate = time.at(micro, accumulate) if time else None
            result.fitting.append(Candidate(frame, micro, accumulate, alters, verdict, estimate))
    result.fitting = rank(result.fitting, goal)
    closest = nsmallest(NEAR_MISSES, misses, key=shortage_by_group if by_group else closeness)
    result.near_misses = [miss._replace(time=judge.time.estimate(miss.choice)) for miss in closest]
    return result


def any_fits(judge: Judge, options: SpaceOptions) -> bool:
    """Whether anything of the space fits. The frames that hold least come last, so they are asked first."""
    for frame, _ in reversed(list(frames(options, judge.hardware))):
        if first_refusal(judge.rules, frame) is not None:
            continue
        memory = judge.memory.frame(frame)
        if any(memory.verdict(*pair).fits for pair in micro_batches(options, frame.data_parallel)):
            return True
    return False


def shortage_by_group(candidate: Candidate) -> tuple[int, int]:
    """Order of near misses: what they alter, then how much is missing."""
    return (GROUPS.index(candidate.alters), -candidate.headroom_bytes)


def closeness(candidate: Candidate) -> int:
    """Order of near misses by how much is missing alone."""
    return -candidate.headroom_bytes


def _simplicity(choice: Choice) -> tuple[int, ...]:
    """Between equals the run with fewer moving parts wins.

    A quantised base, DeepSpeed, offload, splits, GPUs, whole logits, recompute.
    """
    return (
        int(choice.method == "qlora"),
        int(choice.sharding in ZERO),
        len(choice.offload),
        choice.cp * choice.sp,
        choice.num_gpus,
        int(choice.loss_path == "full_logits"),
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
        pace = (band(c), *_simplicity(c.frame), c.step_s, headroom)
        if goal == "fewest_gpus":
            return (group, c.frame.num_gpus, *pace)
        if goal == "headroom":
            return (group, headroom, *pace)
        return (group, *pace)

    return sorted(candidates, key=key)


def distinct(candidates: Iterable[Candidate], limit: int) -> list[Candidate]:
    """The first ``limit`` candidates that differ in more than micro-batch and accumulation."""
    seen: set[Choice] = set()
    out: list[Candidate] = []
    for candidate in candidates:
        if candidate.frame in seen:
            continue
        seen.add(candidate.frame)
        out.append(candidate)
        if len(out) == limit:
            break
    return out
