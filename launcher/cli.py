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
from launcher.flags import (
    DESCRIPTION,
    EPILOG,
    MACHINE_HELP,
    PYTHON_HELP,
    USAGE,
    Parser,
    add_job_flags,
    count,
    pair,
    pairs,
    seconds,
    take_job_file,
    tokens,
    word_list,
)
from launcher.output import print_text


def _role_pairs(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not pairs or not all(sign for _, sign, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=BYTES")
    return [(role.strip(), value.strip()) for role, _, value in pairs]


NODE_CARDS = 128
"""Of `launcher.inputs.machines`, which most commands do without."""


def _counts(text: str) -> list[int]:
    return [count(1, NODE_CARDS)(part) for part in text.split(",")]


def _model_and_job(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [FLAG ...]"
    about = "hub id, local folder, config.json, or a job file (.yaml)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    add_job_flags(parser)


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    _model_and_job(parser)
    about = "candidates to show (default 8)"
    parser.add_argument("--top", type=count(1, 1000), default=8, metavar="N", help=about)
    asks = parser.add_argument_group("questions (one of them)").add_mutually_exclusive_group()
    about = "what binds, what one change of a knob would do, what makes the rest fit"
    asks.add_argument("--explain", action="store_true", help=about)
    about = "two candidates side by side, by rank (1 3) or pins (recompute=full recompute=none)"
    asks.add_argument("--compare", nargs=2, metavar=("A", "B"), help=about)
    about = "whether the choice of an old plan still holds here; its job unless one is given"
    asks.add_argument("--against", type=Path, metavar="PLAN", help=about)
    about = "which machine would do it, by time and cost: all, or H100-80GB,A100-80GB,..."
    asks.add_argument("--cards", type=word_list, metavar="CARDS", help=about)
    ranked = parser.add_argument_group("machines to compare")
    about = "numbers of cards that --cards tries; 1,2,4,8 unless --machine names one"
    ranked.add_argument("--count", type=_counts, metavar="N,...", help=about)
    about = "price of one card for one hour, which --cards ranks by; repeatable"
    ranked.add_argument("--price", type=pair, action="append", metavar="CARD=PRICE", help=about)


def _ledger_flags(parser: argparse.ArgumentParser) -> None:
    _model_and_job(parser)
    book = parser.add_argument_group("the textbook count instead; of the job it takes --seq-len alone")
    book.add_argument("--textbook", action="store_true", help="five roles and 17 tensors per layer, for any sizes")
    book.add_argument("--params", type=float, metavar="N", help="parameters, such as 70e9")
    book.add_argument("--hidden", type=tokens, metavar="N", help="width of the hidden states")
    book.add_argument("--layers", type=tokens, metavar="N", help="decoder layers")
    book.add_argument("--batch", type=tokens, metavar="N", help="sequences per device")
    book.add_argument("--card-gib", type=float, metavar="GIB", help="memory of a device, to say whether it fits")
    book.add_argument("--devices", type=tokens, metavar="N", help="devices that the ZeRO stage divides by")
    book.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage")
    book.add_argument("--recompute", action="store_true", default=None, help="keep each layer's input alone")
    book.add_argument("--bytes", type=_role_pairs, metavar="ROLE=BYTES,...", help="bytes per parameter of single roles")
    book.add_argument("--optimizer", choices=("adam", "momentum", "sgd"), help="which moments it keeps")
    about = "2-byte weights beside a master copy of 4"
    book.add_argument("--mixed-precision", action=argparse.BooleanOptionalAction, default=None, help=about)


def _probe_flags(parser: argparse.ArgumentParser) -> None:
    _model_and_job(parser)
    asks = parser.add_argument_group("measure here instead of tracing (docs/probe.md)")
    about = "what this machine reaches: products, memory, copies to the host, links; no MODEL needed"
    asks.add_argument("--rates", action="store_true", help=about)
    about = "a few steps of the job with real TRL and random weights, at depth 1 and 2 and two lengths"
    asks.add_argument("--measure", action="store_true", help=about)
    about = "three steps of the plan itself, at its full depth and on all of its ranks"
    asks.add_argument("--whole", action="store_true", help=about)
    about = "seconds after which a probe is ended (default 120 with --rates, 3600 with --route, else 600)"
    asks.add_argument("--limit", type=count(5, 86_400), metavar="S", help=about)
    route = parser.add_argument_group("try a precision route instead (docs/precision.md); no MODEL tries a small one")
    about = "its errors of products, traffic outside them, a training against bf16; `trlfit routes` lists them"
    route.add_argument("--route", metavar="R", help=about)
    about = "steps of each training (default 300)"
    route.add_argument("--steps", type=count(1, 100_000), metavar="N", help=about)
    about = "trainings of each kind (default 3), equal for both"
    route.add_argument("--seeds", type=count(1, 100), metavar="N", help=about)
    kept = parser.add_argument_group("what is kept of measurements").add_mutually_exclusive_group()
    kept.add_argument("--show", action="store_true", help="list what was measured")
    about = "remove measurements, all or those whose file name holds a WORD"
    kept.add_argument("--forget", nargs="*", metavar="WORD", help=about)
    kept.add_argument("--export", type=Path, metavar="FILE", help="write all measurements into one file")
    about = "take in what --export wrote on another box"
    kept.add_argument("--import", dest="import_", type=Path, metavar="FILE", help=about)


def _write_flags(parser: argparse.ArgumentParser) -> None:
    _target_flags(parser, "JOB|PLAN|MODEL", "job file, what `trlfit plan --json` printed, or a model")


def _target_flags(parser: argparse.ArgumentParser, target: str, about: str) -> None:
    parser.usage = f"%(prog)s [{target}] [FLAG ...]"
    parser.add_argument("target", nargs="?", metavar=target, help=about)
    add_job_flags(parser)
    parser.set_defaults(top=8)
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="run folder to write (default runs/NAME)")
    about = "write the N-th candidate instead of the best"
    parser.add_argument("--candidate", type=count(1, 1000), default=1, metavar="N", help=about)
    parser.add_argument("--overwrite", action="store_true", help="replace a run folder that is not running")
    about = "skip the checks of data and settings in the training Python"
    parser.add_argument("--no-check", action="store_true", help=about)


def _launch_flags(parser: argparse.ArgumentParser) -> None:
    about = "job file, what `trlfit plan --json` printed, a model, or a folder that was written"
    _target_flags(parser, "JOB|PLAN|MODEL|DIR", about)
    parser.add_argument("--detach", action="store_true", help="start and return; `trlfit watch` follows")
    about = "write and check, start nothing, print the command"
    parser.add_argument("--dry-run", action="store_true", help=about)
    again = parser.add_argument_group("after an end")
    one = again.add_mutually_exclusive_group()
    about = "go on from the last checkpoint of the run folder DIR"
    one.add_argument("--resume", action="store_true", help=about)
    about = "after DIR ran out of memory: write and launch the plan that fits with what was seen"
    one.add_argument("--next", action="store_true", help=about)
    about = "do what --next does by itself, up to N times, from the last checkpoint that the next plan can load"
    again.add_argument("--auto-retry", type=count(0, 20), default=0, metavar="N", help=about)
    about = "silence that ends the run as hung: 600, 15m, 2h, never; by default it follows the pace of the steps"
    parser.add_argument("--hang-after", type=seconds, metavar="TIME", help=about)


def _run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")


def _stop_flags(parser: argparse.ArgumentParser) -> None:
    _run_flags(parser)
    parser.add_argument(
        "--grace", type=float, default=10.0, metavar="S", help="seconds to end in before the run is killed (default 10)"
    )


def _runs_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", nargs="?", type=Path, metavar="DIR", help="only runs below this folder")
    about = "how far predictions were off, by card and kind of run"
    parser.add_argument("--errors", action="store_true", help=about)


def _python_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", metavar="PATH", help=PYTHON_HELP)


def _routes_flags(parser: argparse.ArgumentParser) -> None:
    _python_flags(parser)
    parser.add_argument("--machine", default="local", metavar="SPEC", help=MACHINE_HELP)
    about = "versions to answer for; the rest as installed"
    parser.add_argument("--stack", type=pairs, action="extend", metavar="torchao=0.18.0,...", help=about)


def _schema_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("document", choices=("job", "plan"), help="the job file, or a plan.json")


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
    examples: tuple[str, ...] = ()
    """Whole lines, shown below its flags."""


_PLAN = "which settings fit and run fastest, and why"
_LEDGER = "every byte of one choice, with formula and source"
_PROBE = "trace a model's layers, or measure this machine, for later plans"
_DOCTOR = "what is missing for what, and the command that fixes it"
_ROUTES = "precision below 16 bits: what a machine offers, and why not the rest"
_PLANS = (
    "trlfit plan Qwen/Qwen3-8B --machine 8xH100-80GB --seq-len 128k",
    "trlfit plan job.yaml --explain",
    "trlfit plan Qwen/Qwen3-8B --method lora --cards all --count 1",
)
_LEDGERS = (
    "trlfit ledger Qwen/Qwen3-8B --machine 8xH100-80GB --pin sharding=zero3",
    "trlfit ledger --textbook --params 70e9 --hidden 8192 --layers 80 --devices 64",
)
_PROBES = (
    "trlfit probe Qwen/Qwen3-8B --method lora --lora-targets q_proj,v_proj",
    "trlfit probe --rates",
    "trlfit probe --job job.yaml --measure",
)
_WRITES = ("trlfit write job.yaml -o my-run", "bash my-run/command.sh")
_LAUNCHES = (
    "trlfit launch job.yaml -o my-run --detach",
    "trlfit launch my-run --resume",
    "trlfit launch job.yaml --auto-retry 2",
)
COMMANDS = {
    "plan": Command("commands.plan", "run_plan", _PLAN, _plan_flags, examples=_PLANS),
    "ledger": Command("commands.ledger", "run_ledger", _LEDGER, _ledger_flags, examples=_LEDGERS),
    "probe": Command("commands.probe", "run_probe", _PROBE, _probe_flags, examples=_PROBES),
    "write": Command(
        "commands.run", "run_write", "write the run folder and start nothing", _write_flags, examples=_WRITES
    ),
    "launch": Command(
        "commands.run",
        "run_launch",
        "write if needed, start the training, follow it",
        _launch_flags,
        examples=_LAUNCHES,
    ),
    "watch": Command("commands.run", "run_watch", "follow a run that was launched", _run_flags, json=False),
    "stop": Command("commands.run", "run_stop", "end a run and all of its processes", _stop_flags, json=False),
    "runs": Command("commands.run", "run_runs", "history of runs: predicted against seen", _runs_flags),
    "gpus": Command("commands.info", "run_gpus", "the cards of this machine and who uses them", _no_flags),
    "models": Command("commands.info", "run_models", "models that are bundled and need no network", _no_flags),
    "cards": Command("commands.info", "run_cards", "cards that --machine can name, with their rates", _no_flags),
    "routes": Command("commands.route", "run_routes", _ROUTES, _routes_flags),
    "stacks": Command(
        "commands.info", "run_stacks", "what each TRL release runs, and what is installed", _python_flags
    ),
    "doctor": Command("commands.info", "run_doctor", _DOCTOR, _python_flags),
    "schema": Command(
        "commands.info", "run_schema", "JSON Schema of the job file or of a plan", _schema_flags, json=False
    ),
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
        usage=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", parser_class=Parser, prog="trlfit"
    )
    for name, command in COMMANDS.items():
        text = command.help
        made = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="\n  ".join(["examples:", *command.examples]) if command.examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
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
    take_job_file(args)
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
