"""`trlfit probe`: trace what planning a job asks for, now and whatever is bundled, and keep it; or measure instead."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from launcher.errors import EnvironmentLacks, ExitCode, ProbeFailed, UsageError
from launcher.evidence.coefficient_store import cache_folder, keep, siblings
from launcher.evidence.tracing import trace
from launcher.flags import FLAG_FIELDS, refuse_given
from launcher.narration import StderrNarrator
from launcher.output import print_json, print_text, table
from launcher.planning import job_from_args, plan_inputs
from planner.architecture import Architecture
from planner.memory.coefficients import Coefficients
from planner.memory.coefficients_json import MODES, CoefficientDocument, coefficients_of, option_key
from planner.memory.formula import ActivationOptions, formula_coefficients
from planner.problem import PlanInput, make_problem
from planner.search.search import search
from planner.units import format_bytes


def run_probe(args: argparse.Namespace) -> int:
    """Trace, keep and print, or what the flags ask for instead; exit 5 when nothing could be traced or measured."""
    _check_flags(args)
    if args.show or args.export or args.import_ or args.forget is not None:
        from launcher.commands.measure import run_kept  # tracing needs none of it

        return run_kept(args)
    if args.route:
        from launcher.commands.route import run_route_probe

        return run_route_probe(args)
    if args.rates or args.measure or args.whole:
        from launcher.commands.measure import run_measure

        return run_measure(args)
    if args.trace is False:
        raise UsageError("--no-trace: tracing is what probe does; drop it")
    job, origins = job_from_args(args)
    inputs = plan_inputs(job, origins, args.python, 1, trace=False)
    options = asked_options(inputs)
    started = time.monotonic()
    document = trace(inputs.architecture, options, python=inputs.stack.python, progress=StderrNarrator().traced)
    seconds = time.monotonic() - started
    try:
        keep(document)
    except OSError as error:
        raise EnvironmentLacks(f"traced coefficients are not kept: {cache_folder()}: {error.strerror}") from None
    refused = [entry["refused"] for entry in document.sets.values() if "refused" in entry]
    if len(refused) == len(document.sets):
        raise ProbeFailed(f"{inputs.architecture.model} could not be traced: {refused[0]}")
    if args.json:
        print_json(document.to_json())
    else:
        print_text(probe_text(document, inputs.architecture, options, job.seq_len, seconds))
    return ExitCode.DONE


def _check_flags(args: argparse.Namespace) -> None:
    """No flag is ignored that asks for another kind of probe.

    Raises:
        UsageError: which one is.
    """
    measured = [f"--{name}" for name in ("rates", "measure", "whole") if getattr(args, name)]
    if measured and args.route:
        raise UsageError(f"{measured[0]} and --route ask for two probes; run one after the other")
    kept = next((f"--{name.rstrip('_')}" for name in ("show", "export", "import_") if getattr(args, name)), None)
    kept = "--forget" if args.forget is not None else kept
    if measured and kept:
        raise UsageError(f"{measured[0]}: {kept} runs no probe; drop it")
    _check_job_flags(args, kept, rates_alone=measured == ["--rates"])
    for name, needs in (("steps", "--route"), ("seeds", "--route"), ("route", ""), ("limit", "what is measured")):
        if getattr(args, name) is None:
            continue
        if kept:
            raise UsageError(f"--{name} is for probes; {kept} runs none")
        if needs and not args.route and not (name == "limit" and measured):
            ways = ": --rates, --measure, --whole or --route" if name == "limit" else ""
            raise UsageError(f"--{name} is for {needs}{ways}")


def _check_job_flags(args: argparse.Namespace, kept: str | None, *, rates_alone: bool) -> None:
    if kept:
        used, why = frozenset[str](), f"{kept} runs no probe; drop it"
    elif args.route:
        used, why = frozenset({"model", "dataset"}), "--route takes MODEL and --dataset of a job; drop it"
    elif rates_alone:
        used = frozenset({"machine", "job"})
        why = "--rates measures this machine, whatever the job; drop it, or measure the job with --measure"
    else:
        return
    refuse_given(args, (name for name in ("model", "job", *FLAG_FIELDS, "trace") if name not in used), why)


def asked_options(inputs: PlanInput) -> list[ActivationOptions]:
    """The sets of options that planning ``inputs.job`` asks for, and their siblings; each key once."""
    found: dict[str, ActivationOptions] = {}

    def record(architecture: Architecture, options: ActivationOptions) -> Coefficients:
        for other in siblings(options):
            found.setdefault(option_key(architecture, other), other)
        return formula_coefficients(architecture, options)

    problem = make_problem(replace(inputs, source=record))
    search(problem.judge, problem.options, "fastest")
    return list(found.values())


def probe_text(
    document: CoefficientDocument,
    architecture: Architecture,
    options: list[ActivationOptions],
    tokens: int,
    seconds: float,
) -> str:
    """What was traced, for people: bytes of one layer at ``tokens`` tokens in one sequence."""
    versions = ", ".join(f"{package} {version}" for package, version in sorted(document.versions.items()))
    parts = [f"{document.model}: traced in {seconds:.0f} s with {versions}; kept for plans of the same layers"]
    for chosen in options:
        key = option_key(architecture, chosen)
        if "refused" in document.sets[key]:
            parts.append(f"{key}: {document.sets[key]['refused']}")
            continue
        notes: list[str] = []
        found = coefficients_of(document, architecture, chosen, notes)
        if found is None:
            continue
        rows = [
            [
                kind.name,
                mode,
                *(format_bytes(getattr(getattr(layer, mode), name).at(tokens, tokens)) for name in MOMENTS),
            ]
            for kind, layer in zip(architecture.kinds, found.layers, strict=True)
            for mode in MODES
        ]
        head = f"{key}, one layer at {tokens:,} tokens"
        parts.append("\n".join([head, table(("layer", "recompute", *MOMENTS), rows, right=(2, 3, 4)), *notes]))
    return "\n\n".join(parts)


MOMENTS = ("kept", "forward", "backward")
"""Columns: kept until backward, and the highest moments above what is live when the layer starts."""
