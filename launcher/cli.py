"""Every headless command. Errors leave by one door: one line on stderr and the documented exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from launcher.diagnostics import forget, report_error
from launcher.errors import ExitCode, TrlfitError
from launcher.flags import DESCRIPTION, EPILOG, Parser, add_job_flags, count, tokens
from launcher.output import print_text


def _role_pairs(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not pairs or not all(sign for _, sign, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=BYTES")
    return [(role.strip(), value.strip()) for role, _, value in pairs]


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="hub id, local folder, or config.json")
    add_job_flags(parser)
    parser.add_argument("--top", type=count(1, 1000), default=8, metavar="N", help="candidates to show")


def _ledger_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="hub id, local folder, or config.json")
    add_job_flags(parser)
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


def _write_flags(parser: argparse.ArgumentParser) -> None:
    about = "job.yaml, plan.json, run folder, or a model"
    parser.add_argument("target", nargs="?", metavar="JOB|PLAN|DIR", help=about)
    add_job_flags(parser)
    parser.set_defaults(top=8)
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="run folder; default: runs/NAME")
    about = "write the N-th candidate instead of the best"
    parser.add_argument("--candidate", type=count(1, 1000), default=1, metavar="N", help=about)
    parser.add_argument("--overwrite", action="store_true", help="replace a run folder that is not running")
    about = "skip the checks of data and settings in the training Python"
    parser.add_argument("--no-check", action="store_true", help=about)


def _launch_flags(parser: argparse.ArgumentParser) -> None:
    _write_flags(parser)
    parser.add_argument("--detach", action="store_true", help="start and return")
    about = "write and check, start nothing, print the command"
    parser.add_argument("--dry-run", action="store_true", help=about)


def _run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")


def _stop_flags(parser: argparse.ArgumentParser) -> None:
    _run_flags(parser)
    parser.add_argument("--grace", type=float, default=10.0, metavar="S", help="seconds before the run is killed")


def _runs_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", nargs="?", type=Path, metavar="DIR", help="only runs below this folder")


def _python_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", metavar="PATH", help="the Python that will train")


def _schema_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("document", choices=("job", "plan"))


def _no_flags(_: argparse.ArgumentParser) -> None:
    pass


class Command(NamedTuple):
    """One command: its module is imported when it runs, its flags are made when it is asked for."""

    module: str
    function: str
    help: str
    flags: Callable[[argparse.ArgumentParser], None]
    json: bool = True
    """Whether it takes --json."""


_PLAN = "plan a run: which settings fit and run fastest, and why"
_LEDGER = "the bytes of one choice: roles, parts, phases, formula and source"
_DOCTOR = "what is missing for what, and the command that fixes it"
COMMANDS = {
    "plan": Command("commands_plan", "run_plan", _PLAN, _plan_flags),
    "ledger": Command("commands_ledger", "run_ledger", _LEDGER, _ledger_flags),
    "write": Command("commands_run", "run_write", "write the run folder, start nothing", _write_flags),
    "launch": Command("commands_run", "run_launch", "write if needed, launch, follow", _launch_flags),
    "watch": Command("commands_run", "run_watch", "reattach to a run", _run_flags, json=False),
    "stop": Command("commands_run", "run_stop", "end a run and everything it started", _stop_flags, json=False),
    "runs": Command("commands_run", "run_runs", "history: predicted against seen", _runs_flags),
    "gpus": Command("commands_info", "run_gpus", "inventory of this machine", _no_flags),
    "models": Command("commands_info", "run_models", "bundled models", _no_flags),
    "cards": Command("commands_info", "run_cards", "bundled cards", _no_flags),
    "stacks": Command("commands_info", "run_stacks", "what each TRL release really runs", _python_flags),
    "doctor": Command("commands_info", "run_doctor", _DOCTOR, _python_flags),
    "schema": Command("commands_info", "run_schema", "JSON Schema of a document", _schema_flags, json=False),
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The command-line surface.

    Args:
        only: the one command whose flags are needed; all flags of all commands take 4 ms to make.
    """
    parser = Parser(
        prog="trlfit",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        text = command.help
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if only in (None, name):
            command.flags(made)
            if command.json:
                made.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _version() -> str:
    from importlib import metadata  # 20 ms that only --version needs

    try:
        return metadata.version("trlfit")
    except metadata.PackageNotFoundError:
        return "from source"


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
        forget(sys.stdout)
        return ExitCode.DONE
    except OSError as error:
        forget(sys.stdout)
        where = f" {error.filename!r}" if error.filename else ""
        report_error(f"the system refused{where}: {error.strerror or error}")
        return ExitCode.ENVIRONMENT
    except Exception as error:  # our bug: say so in one line, keep the traceback for the report
        if os.environ.get("TRLFIT_TRACEBACK"):
            traceback.print_exc()
        report_error(f"bug in trlfit: {type(error).__name__}: {error}; set TRLFIT_TRACEBACK=1 to see where")
        return ExitCode.BUG


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        args = build_parser(words[0] if words and words[0] in COMMANDS else None).parse_args(words)
    except SystemExit as stop:  # --help has been printed
        return stop.code if isinstance(stop.code, int) else ExitCode.USAGE
    if args.version:
        print_text(f"trlfit {_version()}")
        return ExitCode.DONE
    if args.command is None:
        build_parser().print_help(sys.stderr)
        return ExitCode.USAGE
    command = COMMANDS[args.command]
    _without_plugins()
    return int(getattr(import_module(f"launcher.{command.module}"), command.function)(args))


def _without_plugins() -> None:
    """Answer for pydantic that there are no plugins, which we never use.

    It asks at the first model, and the module that it asks brings importlib.metadata and, behind that, the e-mail,
    zip and socket modules: 15 ms of every command, also with PYDANTIC_DISABLE_PLUGINS set.
    """
    loader = ModuleType("pydantic.plugin._loader", "No plugins.")
    setattr(loader, "get_plugins", tuple)  # noqa: B010  # a module that the checkers do not know
    sys.modules.setdefault(loader.__name__, loader)
