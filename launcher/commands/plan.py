"""`trlfit plan`."""

from __future__ import annotations

import argparse

from launcher.errors import ExitCode, UsageError
from launcher.output import print_json_lines, print_text
from launcher.planning import plan_from_args


def run_plan(args: argparse.Namespace) -> int:
    """Plan and print; exit 3 when nothing fits."""
    if args.cards is None and (args.count or args.price):
        raise UsageError("--count and --price belong to --cards; add --cards all, or the cards to compare")
    if args.compare:
        from launcher.commands.compare import run_compare  # each question pays for itself

        return run_compare(args)
    if args.against is not None:
        from launcher.commands.against import run_against

        return run_against(args)
    if args.cards is not None:
        from launcher.commands.cards import run_cards_ranking

        return run_cards_ranking(args)
    outcome = plan_from_args(args)
    if args.json:
        print_json_lines(outcome.document)
    else:
        from launcher.text.plan import plan_text

        print_text(plan_text(outcome.document))
    return ExitCode.DONE if outcome.best else ExitCode.NOTHING_FITS
