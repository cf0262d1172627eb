"""Releases that do not go together, or that the rule book has not read."""

from __future__ import annotations

from planner.choice import Choice
from planner.rules.book import warns
from planner.rules.context import RuleContext
from profiles.releases import OLDEST_TRL, newest_known, release_numbers, within


def _below_floor(context: RuleContext) -> str | None:
    """The first package that is older than this TRL asks for, in a sentence."""
    for package, wanted in context.release.requires.items():
        have = context.versions.get(package)
        if have is not None and not within(have, (wanted,)):
            return f"trl {context.trl} asks for {package} {wanted}, the stack has {have}"
    return None


@warns(
    "trl-floor",
    why="pip would not install these together; what runs is not what the rules were read from",
    versions="all",
    source="trl METADATA, Requires-Dist",
    applies=lambda context: _below_floor(context) is not None,
)
def trl_floor(context: RuleContext, choice: Choice) -> str | None:
    """A package older than this TRL asks for."""
    return _below_floor(context)


@warns(
    "unread-release",
    why="the behaviour of a release is known once its source was read",
    versions="all",
    source="profiles/releases.toml",
    applies=lambda context: (
        any(
            package in context.versions and release_numbers(context.versions[package]) > release_numbers(newest)
            for package, newest in newest_known().items()
        )
        or release_numbers(context.trl) < release_numbers(OLDEST_TRL)
    ),
)
def unread_release(context: RuleContext, choice: Choice) -> str | None:
    """A release outside the range that the rule book has read."""
    for package, newest in newest_known().items():
        have = context.versions.get(package)
        if have is not None and release_numbers(have) > release_numbers(newest):
            return f"{package} {have} is newer than the rules, which were read up to {newest}"
    return f"trl {context.trl} is older than the rules, which begin with {OLDEST_TRL}"
