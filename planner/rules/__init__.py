"""The rule book: what TRL, transformers, accelerate and their companions refuse, and why.

Each topic is a module; each rule is one small function with its reason, releases and source beside
it. ``planner.rules.context.read_context`` boils a job, a model, a machine and a stack down once; ``first_refusal`` is
cheap enough to be asked about every candidate.
"""

from __future__ import annotations

from dataclasses import replace

from planner.choice import Choice
from planner.rules import (
    adapters,
    attention,
    book,
    data,
    loss,
    offload,
    optimizer,
    parallel,
    precision,
    recompute,
    releases,
    routes,
    sequence,
    trainers,
)
from planner.rules.book import JobRule, Refusal, Rule
from planner.rules.context import RuleContext

__all__ = [
    "JOB_RULES",
    "RULES",
    "TOPICS",
    "WARNINGS",
    "JobRule",
    "Refusal",
    "Rule",
    "RuleContext",
    "all_refusals",
    "first_refusal",
    "job_refusals",
    "warnings_for",
    "with_rules",
]

TOPICS = (
    parallel,
    sequence,
    data,
    loss,
    recompute,
    offload,
    attention,
    precision,
    routes,
    optimizer,
    adapters,
    trainers,
    releases,
)
"""The chapters of the book."""
_CHAPTER = {topic.__name__: number for number, topic in enumerate(TOPICS)}
RULES: tuple[Rule, ...] = tuple(sorted(book.choice_rules, key=lambda rule: _CHAPTER[rule.check.__module__]))
"""Every rule that can refuse a choice, chapter by chapter."""
JOB_RULES: tuple[JobRule, ...] = tuple(book.job_rules)
"""Every rule that can refuse a whole job."""
WARNINGS: tuple[Rule, ...] = tuple(book.choice_warnings)
"""Every remark on a choice that runs all the same."""


def with_rules(context: RuleContext) -> RuleContext:
    """``context`` with the rules that can matter to it, so that a choice is held against no others."""
    return replace(
        context,
        rules=book.group(rule for rule in RULES if rule.applies(context)),
        warnings=book.group(rule for rule in WARNINGS if rule.applies(context)),
    )


def first_refusal(context: RuleContext, choice: Choice) -> Refusal | None:
    """The first rule that refuses ``choice``, None when it may run."""
    for concerns, rules in context.rules:
        if concerns(choice):
            for rule in rules:
                reason = rule.check(context, choice)
                if reason is not None:
                    return Refusal.by(rule, reason)
    return None


def all_refusals(context: RuleContext, choice: Choice) -> tuple[Refusal, ...]:
    """Every rule that refuses ``choice``."""
    return tuple(
        Refusal.by(rule, reason)
        for concerns, rules in context.rules
        if concerns(choice)
        for rule in rules
        if (reason := rule.check(context, choice)) is not None
    )


def job_refusals(context: RuleContext) -> tuple[Refusal, ...]:
    """Every reason for which no choice at all can run the job."""
    asked = ((rule, rule.check(context)) for rule in JOB_RULES)
    return tuple(Refusal.by(rule, reason) for rule, reason in asked if reason is not None)


def warnings_for(context: RuleContext, choice: Choice) -> tuple[str, ...]:
    """Sentences about what a choice costs or risks although it runs."""
    return tuple(
        remark
        for concerns, rules in context.warnings
        if concerns(choice)
        for rule in rules
        if (remark := rule.check(context, choice)) is not None
    )
