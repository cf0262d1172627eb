"""Methods: a job searched under its own method and, where it allows that, under each lighter one, ranked as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from planner.choice import Method
from planner.contradictions import contradiction
from planner.job import Job
from planner.problem import PlanInput, Problem, make_problem, with_job
from planner.rules import job_refusals
from planner.search.search import NEAR_MISSES, Candidate, SearchResult, closeness, rank, search, shortage_by_group

LIGHTER: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}


def methods_of(job: Job) -> tuple[Method, ...]:
    """The job's own method, then those that the planner may take instead."""
    return (job.method, *(LIGHTER[job.method] if "method" in job.allow else ()))


def problems_of(inputs: PlanInput) -> tuple[Problem, ...]:
    """One problem for each method of the job, its own first.

    Methods that the libraries refuse for the whole job are left out. Where that leaves none, the job's own is returned.

    Raises:
        planner.pins.PinError: a pin names no knob or no value of it.
    """
    found = [make_problem(with_job(inputs, method=method)) for method in methods_of(inputs.job)]
    return tuple(problem for problem in found if not job_refusals(problem.judge.rules)) or (found[0],)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSearch:
    """What was found for a job, and the problem that each candidate comes from."""

    problems: tuple[Problem, ...]
    """One for each method that was searched, the job's own first unless the libraries refuse that."""
    result: SearchResult
    """Of all methods together."""
    first: SearchResult
    """Of the first problem alone."""

    @property
    def best(self) -> Candidate | None:
        """The first of what fits."""
        return self.result.best

    @property
    def closest(self) -> Candidate | None:
        """The best, or where nothing fits what is closest to it; None where nothing is legal."""
        return self.result.best or next(iter(self.result.near_misses), None)

    def problem_of(self, candidate: Candidate) -> Problem:
        """The problem whose models judged ``candidate``."""
        return self.under(candidate.frame.method)

    def under(self, method: Method) -> Problem:
        """The problem of a method; of one that was not searched, the first."""
        return next((problem for problem in self.problems if problem.options.method == method), self.problems[0])

    @property
    def refusal(self) -> str:
        """Why no run is possible, where nothing is legal."""
        refused = job_refusals(self.problems[0].judge.rules)
        return refused[0].reason if refused else contradiction(self.problems[0], self.first)


def search_job(inputs: PlanInput, goal: str, *, by_group: bool = True) -> JobSearch:
    """Search a job under every method that it allows.

    Args:
        inputs: the job and its machine.
        goal: what comes first of what fits.
        by_group: as of ``planner.search.search.search``.

    Raises:
        planner.pins.PinError: a pin names no knob or no value of it.
    """
    problems = problems_of(inputs)
    if job_refusals(problems[0].judge.rules):
        return JobSearch(problems=problems, result=SearchResult(), first=SearchResult())
    results = [search(problem.judge, problem.options, goal, by_group=by_group) for problem in problems]
    own = inputs.job.method
    for problem, result in zip(problems, results, strict=True):
        if problem.options.method != own:
            _alter_method(result)
    merged = results[0] if len(results) == 1 else _merged(results, goal, by_group=by_group)
    return JobSearch(problems=problems, result=merged, first=results[0])


def _alter_method(result: SearchResult) -> None:
    result.fitting = [candidate._replace(alters="method") for candidate in result.fitting]
    result.near_misses = [candidate._replace(alters="method") for candidate in result.near_misses]


def _merged(results: Sequence[SearchResult], goal: str, *, by_group: bool) -> SearchResult:
    """All methods as one: candidates ranked together, refusals counted together."""
    merged = SearchResult(
        fitting=rank([candidate for result in results for candidate in result.fitting], goal),
        near_misses=nsmallest(
            NEAR_MISSES,
            (candidate for result in results for candidate in result.near_misses),
            key=shortage_by_group if by_group else closeness,
        ),
        judged=sum(result.judged for result in results),
    )
    for result in results:
        for rule, (count, refusal, choice) in result.rejected.items():
            before, first, example = merged.rejected.get(rule, (0, refusal, choice))
            merged.rejected[rule] = (before + count, first, example)
    return merged
