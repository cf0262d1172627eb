"""The command-line surface: argparse with one flag per job field, and flags to nested job values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from launcher.errors import UsageError
from launcher.output import print_text
from launcher.paths import expanded
from planner.units import parse_tokens

USAGE = """\
trlfit COMMAND [FLAG ...]
       trlfit [JOB.yaml]"""
DESCRIPTION = """\
Fit a Hugging Face TRL fine-tuning run to the GPUs you have.

On a terminal, `trlfit` alone opens the screens of this folder's job.yaml, and
`trlfit JOB.yaml` those of another job file."""
EPILOG = """\
examples:
  trlfit plan Qwen/Qwen3-8B --machine 8xH100-80GB    what fits, and how fast
  trlfit plan job.yaml --explain                     of a job file, and why
  trlfit launch job.yaml                             write it, train, follow
  trlfit plan --help                                 the flags of a command

exit codes:
  0 done           3 nothing fits, or an old plan does not hold any more
  1 our bug        4 the environment lacks something
  2 bad input      5 a probe failed
  130 interrupted  6 the training failed"""


MAX_MESSAGE = 300
"""Characters of an argparse message, which repeats what was typed whatever its length."""


class Parser(argparse.ArgumentParser):
    """argparse that reports through our one error line, and takes no abbreviated flags.

    An abbreviation that works today is ambiguous with the next flag that is added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def print_help(self, file: Any = None) -> None:
        """Help on stdout by way of our one writer; argparse would hide that it could not be written."""
        print_text(self.format_help()) if file is None else super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that every error leaves by one door."""
        cut = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        raise UsageError(f"{cut.removeprefix('argument ')}; see `{self.prog} --help`")


def tokens(text: str) -> int:
    """``planner.units.parse_tokens`` for argparse."""
    try:
        return parse_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(low: int, high: int) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        digits = text.strip()
        if not digits.isascii() or not digits.isdigit() or len(digits) > 12 or not low <= int(digits) <= high:
            raise argparse.ArgumentTypeError(f"give a whole number from {low:,} to {high:,}, not {text[:40]!r}")
        return int(digits)

    return parse


def seconds(text: str) -> float:
    """A time: ``90``, ``90s``, ``15m``, ``2h``; ``never`` is infinity."""
    plain = text.strip().lower()
    if plain == "never":
        return inf
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(plain[-1:], 0.0)
    digits = plain[:-1] if scale else plain
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9 or not int(digits):
        raise argparse.ArgumentTypeError(f"give seconds, or a time such as 15m or 2h, or never, not {text[:40]!r}")
    return int(digits) * (scale or 1.0)


def pair(text: str) -> tuple[str, str]:
    """``KEY=VALUE``."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def pairs(text: str) -> list[tuple[str, str]]:
    """``KEY=VALUE,KEY=VALUE``."""
    return [pair(part) for part in text.split(",") if part.strip()]


def take_job_file(args: argparse.Namespace) -> None:
    """A job file in the place of the model is the job file.

    Raises:
        UsageError: another one is given by ``--job``.
    """
    named = getattr(args, "model", None)
    if named is None or not named.endswith((".yaml", ".yml")) or not hasattr(args, "job"):
        return
    if args.job is not None:
        raise UsageError(f"two job files: {named} and --job {args.job}; give one")
    args.job, args.model = expanded(named), None


def word_list(text: str) -> list[str]:
    """Words with commas between."""
    return [part.strip() for part in text.split(",") if part.strip()]


FLAG_FIELDS = {
    "trainer": "trainer",
    "method": "method",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_targets": "lora.target_modules",
    "quantization": "quantization",
    "dataset": "data.dataset",
    "split": "data.split",
    "packing": "data.packing",
    "eval_dataset": "data.eval_dataset",
    "eval_split": "data.eval_split",
    "seq_len": "seq_len",
    "global_batch": "global_batch",
    "machine": "machine",
    "nodes": "nodes",
    "stack": "stack",
    "goal": "goal",
    "reserve": "reserve",
    "price_per_hour": "price_per_hour",
    "allow": "allow",
    "trl": "trl",
    "pin": "pins",
}
"""argparse destination -> dotted job field."""


MACHINE_HELP = "local | cpu | 8xH100-80GB | machine.json (default local); `trlfit cards` lists cards"
PYTHON_HELP = "the Python that will train; default: the one running trlfit"
KNOBS = (
    "loss_path", "recompute", "offload", "sharding", "cp", "sp", "tp", "dp_shard", "dp_replicate", "micro_batch",
    "grad_accum", "optimizer", "weights", "mixed_precision", "attention", "precision", "gpus",
)  # fmt: skip
"""Of ``planner.pins``, which help does without."""


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that mirror the job file. Every default is None: only what was given is merged."""
    job = parser.add_argument_group("job (a flag for each field of the job file; flags win)")
    job.add_argument(
        "--job", type=Path, metavar="FILE", help="job file to start from; `trlfit schema job` describes it"
    )
    about = "sft | dpo | kto | reward | grpo | rloo (default sft)"
    job.add_argument("--trainer", metavar="NAME", help=about)
    job.add_argument("--method", metavar="NAME", help="full | lora | qlora (default full)")
    job.add_argument("--lora-r", type=int, metavar="N", help="rank of the adapters (default 16)")
    job.add_argument("--lora-alpha", type=int, metavar="N", help="scaling of the adapters; 2 x r when left out")
    job.add_argument("--lora-dropout", type=float, metavar="P", help="dropout before the adapters (default 0.0)")
    about = "all-linear, or modules such as q_proj,v_proj (default all-linear)"
    job.add_argument("--lora-targets", metavar="NAMES", help=about)
    about = "base weights of qlora: nf4 | nf4-double | int8 (default nf4)"
    job.add_argument("--quantization", metavar="NAME", help=about)
    about = "hub id or local .jsonl, .json, .parquet, .csv; write and launch need one"
    job.add_argument("--dataset", metavar="DATA", help=about)
    job.add_argument("--split", metavar="NAME", help="split of a hub data set (default train)")
    job.add_argument("--eval-dataset", metavar="DATA", help="data to evaluate on; with --eval-split alone it is DATA")
    about = "split of the evaluation data; of a local file a slice such as train[90%%:]"
    job.add_argument("--eval-split", metavar="NAME", help=about)
    about = "several rows in one sequence (default off)"
    job.add_argument("--packing", action=argparse.BooleanOptionalAction, default=None, help=about)
    about = "longest sequence in tokens; 128k and 1M are understood (default 4096)"
    job.add_argument("--seq-len", type=tokens, metavar="N", help=about)
    about = "sequences per optimizer step over all GPUs (default 8)"
    job.add_argument("--global-batch", type=int, metavar="N", help=about)
    job.add_argument("--machine", metavar="SPEC", help=MACHINE_HELP)
    job.add_argument("--nodes", type=int, metavar="N", help="nodes of that kind (default 1)")
    about = "versions to plan for; the rest as installed, none takes a package out"
    job.add_argument("--stack", type=pairs, action="extend", metavar="trl=1.16.0,...", help=about)
    about = "fastest | longest | fewest_gpus | headroom (default fastest)"
    job.add_argument("--goal", metavar="NAME", help=about)
    job.add_argument("--reserve", type=float, metavar="SHARE", help="share of each card kept free (default 0.05)")
    job.add_argument("--price-per-hour", type=float, metavar="N", help="of one GPU, in any currency: what a run costs")
    about = "what the planner may alter: numerics, method, or both (default nothing)"
    job.add_argument("--allow", type=word_list, metavar="WHAT", help=about)
    about = f"keep a knob, such as recompute=full; repeatable. Knobs: {', '.join(KNOBS)}"
    job.add_argument("--pin", type=pair, action="append", metavar="KNOB=VALUE", help=about)
    about = "a field of the trainer's config, such as learning_rate=2e-4; repeatable"
    job.add_argument("--trl", type=pair, action="append", metavar="KEY=VALUE", help=about)
    parser.add_argument("--python", metavar="PATH", help=PYTHON_HELP)
    about = "closed forms instead of a trace of seconds for a model that is neither bundled nor cached"
    parser.add_argument("--no-trace", dest="trace", action="store_const", const=False, help=about)


def refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse the first of some flags that was given: ignored in silence, it would make the answer a lie.

    Args:
        args: the parsed command line.
        names: argparse destinations whose default is None.
        why: what the flag has no place beside, and what to do.

    Raises:
        UsageError: which flag, and why.
    """
    for name in names:
        if getattr(args, name) is not None:
            flag = {"model": args.model, "trace": "--no-trace"}.get(name) or f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag}: {why}")


def job_flags(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """(nested job values, dotted field -> flag) of the flags that were given."""
    nested: dict[str, Any] = {}
    names: dict[str, str] = {}
    for destination, field in FLAG_FIELDS.items():
        value = getattr(args, destination, None)
        if value is None:
            continue
        flag = "--" + destination.replace("_", "-")
        if destination in ("stack", "pin", "trl"):
            value = _mapping(value, flag)
            names |= {f"{field}.{key}": flag for key in value}
        else:
            names[field] = flag
        target = nested
        *parents, leaf = field.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = value
    if getattr(args, "trl", None):
        nested["trl"] = {key: _scalar(text) for key, text in nested["trl"].items()}
    if getattr(args, "model", None):
        nested["model"], names["model"] = args.model, "MODEL"
    return nested, names


def _mapping(pairs: list[tuple[str, str]], flag: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in pairs:
        if out.get(key, value) != value:
            raise UsageError(f"{flag}: {key} is given as {out[key]!r} and as {value!r}; give it once")
        out[key] = value
    return out


def _scalar(text: str) -> Any:
    """A flag's text as YAML would read it, so that --trl and the job file mean the same."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
