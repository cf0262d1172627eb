"""Every headless command. Errors leave by one door: one line on stderr and the documented exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from launcher.diagnostics import report_error
from launcher.errors import ExitCode, TrlfitError
from launcher.flags import DESCRIPTION, EPILOG, Parser, add_job_flags, count, tokens
from launcher.output import print_text

COMMANDS = {
    "plan": (
        "commands_plan",
        "run_plan",
        "plan a run: which settings fit and run fastest, and why",
    ),
    "ledger": (
        "commands_ledger",
        "run_ledger",
        "the bytes of one choice: roles, parts, phases, formula and source",
    ),
    "write": ("commands_run", "run_write", "write the run folder, start nothing"),
    "launch": ("commands_run", "run_launch", "write if needed, launch, follow"),
    "watch": ("commands_run", "run_watch", "reattach to a run"),
    "stop": ("commands_run", "run_stop", "end a run and everything it started"),
    "runs": ("commands_run", "run_runs", "history: predicted against seen"),
    "gpus": ("commands_info", "run_gpus", "inventory of this machine"),
    "models": ("commands_info", "run_models", "bundled models"),
    "cards": ("commands_info", "run_cards", "bundled cards"),
    "stacks": ("commands_info", "run_stacks", "what each TRL release really runs"),
    "doctor": (
        "commands_info",
        "run_doctor",
        "what is missing for what, and the command that fixes it",
    ),
    "schema": ("commands_info", "run_schema", "JSON Schema of a document"),
}
"""Name -> (module of the launcher, function, help). Modules are imported when the command runs."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command-line surface."""
    parser = Parser(
        prog="trlfit",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    made = {
        name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, (_, _, text) in COMMANDS.items()
    }
    for name in ("plan", "ledger"):
        made[name].add_argument("model", nargs="?", metavar="MODEL", help="hub id, local folder, or config.json")
        add_job_flags(made[name])
    made["plan"].add_argument("--top", type=count(1, 1000), default=8, metavar="N", help="candidates to show")
    _textbook_flags(made["ledger"])
    for name in ("write", "launch"):
        made[name].add_argument(
            "target",
            nargs="?",
            metavar="JOB|PLAN|DIR",
            help="job.yaml, plan.json, run folder, or a model",
        )
        add_job_flags(made[name])
        made[name].set_defaults(top=8)
        made[name].add_argument("-o", "--output", type=Path, metavar="DIR", help="run folder; default: runs/NAME")
        made[name].add_argument(
            "--candidate",
            type=count(1, 1000),
            default=1,
            metavar="N",
            help="write the N-th candidate instead of the best",
        )
        made[name].add_argument("--overwrite", action="store_true", help="replace a run folder that is not running")
        made[name].add_argument(
            "--no-check",
            action="store_true",
            help="skip the checks of data and settings in the training Python",
        )
    made["launch"].add_argument("--detach", action="store_true", help="start and return")
    made["launch"].add_argument(
        "--dry-run", action="store_true", help="write and check, start nothing, print the command"
    )
    for name in ("watch", "stop"):
        made[name].add_argument("run", type=Path, metavar="RUN", help="run folder")
    made["stop"].add_argument("--grace", type=float, default=10.0, metavar="S", help="seconds before the run is killed")
    made["runs"].add_argument("root", nargs="?", type=Path, metavar="DIR", help="only runs below this folder")
    for name in ("doctor", "stacks"):
        made[name].add_argument("--python", metavar="PATH", help="the Python that will train")
    made["schema"].add_argument("document", choices=("job", "plan"))
    for name in (
        "plan",
        "ledger",
        "write",
        "launch",
        "runs",
        "gpus",
        "models",
        "cards",
        "stacks",
        "doctor",
    ):
        made[name].add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _textbook_flags(parser: argparse.ArgumentParser) -> None:
    book = parser.add_argument_group("textbook count (--textbook)")
    book.add_argument("--textbook", action="store_true", help="five roles and 17 tensors per layer, for any sizes")
    book.add_argument("--params", type=float, metavar="N")
    book.add_argument("--hidden", type=tokens, metavar="N")
    book.add_argument("--layers", type=tokens, metavar="N")
    book.add_argument("--batch", type=tokens, metavar="N", help="sequences per device")
    book.add_argument("--card-gib", type=float, metavar="GIB")
    book.add_argument("--devices", type=tokens, metavar="N")
    book.add_argument("--stage", type=int, choices=(0, 1, 2, 3))
    book.add_argument("--recompute", action="store_true", default=None)
    book.add_argument("--bytes", type=_role_pairs, metavar="ROLE=BYTES,...")
    book.add_argument("--optimizer", choices=("adam", "momentum", "sgd"))
    book.add_argument("--mixed-precision", action=argparse.BooleanOptionalAction, default=None)


def _role_pairs(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not pairs or not all(sign for _, sign, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=BYTES")
    return [(role.strip(), value.strip()) for role, _, value in pairs]


def _version() -> str:
    from importlib import metadata  # 20 ms that only --version needs

    try:
        return metadata.version("trlfit")
    except metadata.PackageNotFoundError:
        return "from source"


# pydantic looks for plugins through importlib.metadata at the first model: 30 ms, and we use none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        An exit code of ``launcher.errors.ExitCode``.
    """
    try:
        code = _run(argv)
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]  # None where it was closed
            sys.stdout.flush()
        return code
    except TrlfitError as error:
        report_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`trlfit plan | head`): nothing is left to say.
        _forget_stdout()
        return ExitCode.DONE
    except OSError as error:
        _forget_stdout()
        where = f" {error.filename!r}" if error.filename else ""
        report_error(f"the system refused{where}: {error.strerror or error}")
        return ExitCode.ENVIRONMENT
    except Exception as error:  # our bug: say so in one line, keep the traceback for the report
        if os.environ.get("TRLFIT_TRACEBACK"):
            traceback.print_exc()
        report_error(f"bug in trlfit: {type(error).__name__}: {error}; set TRLFIT_TRACEBACK=1 to see where")
        return ExitCode.BUG


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # --help has been printed
        return stop.code if isinstance(stop.code, int) else ExitCode.USAGE
    if args.version:
        print_text(f"trlfit {_version()}")
        return ExitCode.DONE
    if args.command is None:
        build_parser().print_help(sys.stderr)
        return ExitCode.USAGE
    module, function, _ = COMMANDS[args.command]
    return int(getattr(import_module(f"launcher.{module}"), function)(args))


def _forget_stdout() -> None:
    """Let what could not be written go nowhere: Python would try again at exit, and print that it failed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
