"""`trlfit plan`."""

from __future__ import annotations

import argparse

from launcher.errors import ExitCode
from launcher.output import print_json_lines, print_text
from launcher.planning import plan_from_args


def run_plan(args: argparse.Namespace) -> int:
    """Plan and print; exit 3 when nothing fits."""
    outcome = plan_from_args(args)
    if args.json:
        print_json_lines(outcome.document)
    else:
        from launcher.plan_text import plan_text

        print_text(plan_text(outcome.document))
    return ExitCode.DONE if outcome.best else ExitCode.NOTHING_FITS
