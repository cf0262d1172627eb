"""`trlfit ledger`: the bytes of one choice, or of the textbook sheet."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from launcher.errors import ExitCode, UsageError
from launcher.flags import FLAG_FIELDS, refuse_given
from launcher.output import print_json, print_text
from launcher.planning import choice_from_args
from launcher.text.plan import ledger_text, textbook_text
from planner.ledger.ledger import ledger
from planner.ledger.one_choice import OneChoice
from planner.ledger.textbook import MAX_DEVICES, ROLES, TextbookInput, textbook
from planner.planning import host_warnings
from planner.rules import warnings_for
from planner.units import GIB


def run_ledger(args: argparse.Namespace) -> int:
    """The bytes of one choice, or of the textbook sheet."""
    _check_flags(args)
    if args.textbook:
        sheet = textbook(textbook_input(args))
        print_json(sheet) if args.json else print_text(textbook_text(sheet))
        return ExitCode.DONE
    one = choice_from_args(args)
    document = ledger_document(one)
    print_json(document) if args.json else print_text(ledger_text(document))
    return ExitCode.DONE if one.candidate.fits else ExitCode.NOTHING_FITS


def ledger_document(one: OneChoice) -> dict[str, Any]:
    """The ledger of one choice, with what the libraries have against it and what is worth a warning."""
    document = ledger(one.problem, one.candidate)
    judge = one.problem.judge
    warnings = warnings_for(judge.rules, one.candidate.choice)
    return {
        **document,
        "refusals": [{"rule": r.rule, "reason": r.reason, "why": r.why, "source": r.source} for r in one.refusals],
        "warnings": [*warnings, *host_warnings(one.problem, judge.memory_of(one.candidate))],
        "notes": list(one.problem.inputs.notes),
    }


TEXTBOOK_FLAGS = (
    "params",
    "hidden",
    "layers",
    "batch",
    "card_gib",
    "devices",
    "stage",
    "recompute",
    "bytes",
    "optimizer",
    "mixed_precision",
)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that the other kind of ledger reads."""
    if args.textbook:
        foreign = [name for name in (*FLAG_FIELDS, "job", "python", "trace") if name != "seq_len"]
        if args.model is not None:
            raise UsageError(f"--textbook counts stated sizes, not a model; drop {args.model}, or drop --textbook")
        hint = "--textbook reads stated sizes alone; drop it"
    else:
        foreign, hint = list(TEXTBOOK_FLAGS), "it belongs to the textbook count; add --textbook"
    refuse_given(args, foreign, hint)


TEXTBOOK_LIMITS: dict[str, tuple[float, float]] = {
    "params": (1, 1e15),
    "hidden": (1, 1e7),
    "layers": (1, 1e5),
    "batch": (1, 1e7),
    "seq_len": (1, 2**40),
    "devices": (1, MAX_DEVICES),
    "card_gib": (0.001, 1e6),
}


def textbook_input(args: argparse.Namespace) -> TextbookInput:
    """The sheet that the flags describe.

    Raises:
        UsageError: a number that is no size, or a role that does not exist.
    """
    given: dict[str, Any] = {}
    for name in (f.name for f in fields(TextbookInput)):
        value = getattr(args, name, None)
        if value is not None:
            given[name] = value
    if args.card_gib is not None:
        given["card_bytes"] = args.card_gib
    for name, (low, high) in TEXTBOOK_LIMITS.items():
        key = "card_bytes" if name == "card_gib" else name
        if key in given and not low <= given[key] <= high:
            raise UsageError(f"--{name.replace('_', '-')} {given[key]:g} is out of range; give {low:g} to {high:g}")
    if "card_bytes" in given:
        given["card_bytes"] = int(given["card_bytes"] * GIB)
    if "params" in given:
        given["params"] = int(given["params"])
    given["role_bytes"] = _role_bytes(args.bytes or [])
    return TextbookInput(**given)


def _role_bytes(pairs: list[tuple[str, str]]) -> dict[str, int]:
    widths: dict[str, int] = {}
    for role, text in pairs:
        if role not in ROLES:
            raise UsageError(f"--bytes {role}={text}: no such role; roles: {', '.join(ROLES)}")
        if not text.isascii() or not text.isdigit() or int(text) > 64:
            raise UsageError(f"--bytes {role}={text}: give whole bytes per parameter, 0 to 64")
        if widths.get(role, int(text)) != int(text):
            raise UsageError(f"--bytes: {role} is given as {widths[role]} and as {text}; give it once")
        widths[role] = int(text)
    return widths
