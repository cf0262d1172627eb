"""One choice, for the ledger: what the pins say, open knobs filled as the planner would, allowed to run or not.

The ledger explains bytes, also of runs that today's libraries refuse: published measurements were made on stacks and
with settings that no longer go together.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.contradictions import check_inputs
from planner.pins import PinError
from planner.problem import PlanInput, Problem, make_problem, with_job
from planner.rules import Refusal, all_refusals, job_refusals
from planner.search.longest import settled
from planner.search.search import Candidate, rank, search
from planner.search.space import frames


@dataclass(frozen=True, slots=True, kw_only=True)
class OneChoice:
    """The choice, judged, and what the libraries have against it."""

    problem: Problem
    candidate: Candidate
    refusals: tuple[Refusal, ...]
    """Empty when the libraries would run it."""


def choose_one(inputs: PlanInput) -> OneChoice:
    """The best choice under the pins; where no choice is legal, the one that the fewest rules refuse.

    Raises:
        planner.pins.PinError: a pin names no knob or no value of it, or sizes that make no run.
        planner.memory.adapters.TargetError: LoRA targets that the model does not have.
    """
    check_inputs(inputs)
    own_method = [group for group in inputs.job.allow if group != "method"]
    length = settled(with_job(inputs, allow=own_method)).job.seq_len
    problem = make_problem(with_job(inputs, seq_len=length))
    of_job = job_refusals(problem.judge.rules)
    result = search(problem.judge, problem.options, inputs.job.goal)
    legal = result.best or next(iter(result.near_misses), None)
    if legal is not None:
        return OneChoice(problem=problem, candidate=legal, refusals=of_job)
    candidate, of_choice = _least_refused(problem)
    return OneChoice(problem=problem, candidate=candidate, refusals=of_job + of_choice)


def _least_refused(problem: Problem) -> tuple[Candidate, tuple[Refusal, ...]]:
    judge = problem.judge
    fewest: list[tuple[Candidate, tuple[Refusal, ...]]] = []
    for frame, alters in frames(problem.options, problem.hardware):
        refusals = all_refusals(judge.rules, frame)
        if fewest and len(refusals) > len(fewest[0][1]):
            continue
        if fewest and len(refusals) < len(fewest[0][1]):
            fewest.clear()
        fewest.append((judge.judge(frame, alters), refusals))
    if not fewest:
        raise PinError("sizes give no run on this machine; drop one of gpus, cp, sp, tp, dp_shard, dp_replicate")
    fitting = [candidate for candidate, _ in fewest if candidate.fits]
    ranked = rank(fitting, problem.inputs.job.goal)
    best = ranked[0] if ranked else max((c for c, _ in fewest), key=lambda c: c.headroom_bytes)
    return next(pair for pair in fewest if pair[0] is best)
