"""A rule, its registry, and what a refused choice is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from planner.choice import FSDP2, ZERO, Choice

if TYPE_CHECKING:
    from planner.rules.context import RuleContext

ChoiceCheck = Callable[["RuleContext", Choice], str | None]
JobCheck = Callable[["RuleContext"], str | None]
Applies = Callable[["RuleContext"], bool]
Concern = Literal[
    "any",
    "cp",
    "sp",
    "fsdp2",
    "zero",
    "offload",
    "every_n",
    "selective",
    "flash",
    "optimizer",
    "adapter",
]

EVERY_N = frozenset({"every_2", "every_3", "every_4"})
"""Recompute modes that leave layers out."""
DEFAULT_OPTIMIZER = "adamw_torch_fused"
"""It needs nothing on a GPU."""
CONCERNS: dict[Concern, Callable[[Choice], bool]] = {
    "any": lambda choice: True,
    "cp": lambda choice: choice.cp > 1,
    "sp": lambda choice: choice.sp > 1,
    "fsdp2": lambda choice: choice.sharding in FSDP2,
    "zero": lambda choice: choice.sharding in ZERO,
    "offload": lambda choice: bool(choice.offload),
    "every_n": lambda choice: choice.recompute in EVERY_N,
    "selective": lambda choice: choice.recompute == "selective",
    "flash": lambda choice: choice.attention == "flash_attention_2",
    "optimizer": lambda choice: choice.optimizer != DEFAULT_OPTIMIZER,
    "adapter": lambda choice: choice.method != "full",
}
"""Choices that a rule is about; for all others it is not even asked, which keeps the book fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule about a choice: a refusal in ``RULES``, a remark in ``WARNINGS``."""

    id: str
    refuses: str
    """What it is about, in one sentence."""
    why: str
    versions: str
    """Releases it holds for."""
    source: str
    """Where the libraries say or do so."""
    concerns: Concern
    """The choices that it is about."""
    applies: Applies
    """Whether the job, machine and stack leave the rule anything to refuse."""
    check: ChoiceCheck
    """The sentence for a choice that it is about, None when the rule has nothing against it."""


Groups = tuple[tuple[Callable[[Choice], bool], tuple[Rule, ...]], ...]
"""Rules by the choices that they are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRule:
    """One rule about a job that no choice can satisfy or cure."""

    id: str
    refuses: str
    why: str
    versions: str
    source: str
    check: JobCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a choice, or a whole job, cannot run."""

    rule: str
    """Id of the rule."""
    reason: str
    """What is wrong and what to do, with the numbers at hand."""
    why: str
    versions: str
    source: str

    @classmethod
    def by(cls, rule: Rule | JobRule, reason: str) -> Refusal:
        """The refusal of ``rule`` for ``reason``."""
        return cls(rule=rule.id, reason=reason, why=rule.why, versions=rule.versions, source=rule.source)


choice_rules: list[Rule] = []
job_rules: list[JobRule] = []
choice_warnings: list[Rule] = []
"""Filled by the decorators below while the topics are imported; read through ``planner.rules``."""


def _always(_: RuleContext) -> bool:
    return True


def refuses(
    id: str,
    *,
    why: str,
    versions: str,
    source: str,
    concerns: Concern = "any",
    applies: Applies = _always,
) -> Callable[[ChoiceCheck], ChoiceCheck]:
    """Register the decorated check as a rule that refuses a choice; its docstring says what."""

    def register(check: ChoiceCheck) -> ChoiceCheck:
        choice_rules.append(_rule(id, why, versions, source, concerns, applies, check))
        return check

    return register


def warns(
    id: str,
    *,
    why: str,
    versions: str,
    source: str,
    concerns: Concern = "any",
    applies: Applies = _always,
) -> Callable[[ChoiceCheck], ChoiceCheck]:
    """Register the decorated check as a remark on a choice that runs all the same."""

    def register(check: ChoiceCheck) -> ChoiceCheck:
        choice_warnings.append(_rule(id, why, versions, source, concerns, applies, check))
        return check

    return register


def refuses_job(id: str, *, why: str, versions: str, source: str) -> Callable[[JobCheck], JobCheck]:
    """Register the decorated check as a rule that refuses a whole job."""

    def register(check: JobCheck) -> JobCheck:
        what = _headline(check.__doc__)
        job_rules.append(JobRule(id=id, refuses=what, why=why, versions=versions, source=source, check=check))
        return check

    return register


def _rule(
    id: str,
    why: str,
    versions: str,
    source: str,
    concerns: Concern,
    applies: Applies,
    check: ChoiceCheck,
) -> Rule:
    return Rule(
        id=id,
        refuses=_headline(check.__doc__),
        why=why,
        versions=versions,
        source=source,
        concerns=concerns,
        applies=applies,
        check=check,
    )


def _headline(docstring: str | None) -> str:
    """First line without its full stop; empty where the interpreter drops docstrings."""
    return (docstring or "").partition("\n")[0].removesuffix(".")


def group(rules: Iterable[Rule]) -> Groups:
    """Rules by concern, so that a concern is looked at once for all of its rules."""
    groups: dict[Concern, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(rule.concerns, []).append(rule)
    return tuple((CONCERNS[concern], tuple(groups[concern])) for concern in CONCERNS if concern in groups)
