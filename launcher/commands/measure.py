"""`trlfit probe --rates`, `--measure` and `--whole`: run small things here, keep what was seen; and what is kept."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from launcher.diagnostics import report_note
from launcher.errors import EnvironmentLacks, ExitCode, ProbeFailed, TrlfitError, UsageError
from launcher.evidence.measured_requests import (
    ROUNDS,
    TIMED_STEPS,
    WARM_STEPS,
    WHOLE_STEPS,
    check_job,
    check_probed,
    job_cells,
    job_facts,
    job_request,
    room_of,
    said_beforehand,
)
from launcher.evidence.measurement_store import (
    EXPORT_SCHEMA,
    card_of,
    check_room_to_keep,
    export_measurements,
    forget_measurements,
    import_measurements,
    keep_measurement,
    measurements_folder,
    read_measurements,
    this_cpu,
)
from launcher.evidence.measuring import ask_child
from launcher.inputs.machines import resolve_machine
from launcher.narration import narrate_step
from launcher.output import print_json, print_text
from launcher.planning import answered, job_from_args, plan_inputs
from launcher.text.measured import measurement_text, shown_text
from planner.choice import Choice
from planner.machine import Machine
from planner.measured.check import SCHEMA, BadMeasurement, check_measurement
from planner.measured.probes import probed_choice
from planner.planning import make_plan
from planner.problem import PlanInput, Problem
from planner.units import format_gib

RATES_LIMIT_S = 120.0
"""Rates take 20 to 30 s; a busy machine is given four times that."""
JOB_LIMIT_S = 600.0
"""Four cells of a few steps each, and as much again for loading and compiling kernels."""
RATES_S = 20.0
"""Of measuring itself; loading torch comes on top."""
LINK_S = 60.0
"""For two processes or NCCL's ranks to find each other and to exchange; ranks that never meet end there."""


def run_measure(args: argparse.Namespace) -> int:
    """Measure what the flags ask for, keep and print it; exit 5 when a probe failed."""
    documents: list[dict[str, Any]] = []
    try:
        check_room_to_keep()  # before the minutes that a probe takes
    except OSError as error:
        raise EnvironmentLacks(
            f"nothing could be kept: {measurements_folder()}: {error.strerror}; TRLFIT_CACHE names another folder"
        ) from None
    if args.rates:
        documents.append(_measure_rates(args))
    if args.measure or args.whole:
        documents.append(_measure_job(args, whole=args.whole))
    if args.json:
        print_json(documents[0] if len(documents) == 1 else {"schema": EXPORT_SCHEMA, "measurements": documents})
    else:
        print_text("\n\n".join(measurement_text(document) for document in documents))
    return ExitCode.DONE


def run_kept(args: argparse.Namespace) -> int:
    """Show, forget, export or import what is kept; with --json what was shown, written, taken in or forgotten."""
    if args.forget and not all(word.strip() for word in args.forget):
        raise UsageError("--forget: a WORD is empty; --forget alone removes all")
    touched: list[dict[str, Any]] = []
    try:
        if args.export is not None:
            touched = export_measurements(args.export)
            report_note(f"{len(touched)} measurements written to {args.export}")
        elif args.import_ is not None:
            touched = import_measurements(args.import_)
            report_note(f"{len(touched)} measurements taken in from {args.import_}")
        elif args.forget is not None:
            touched = forget_measurements(args.forget)
            report_note(f"{len(touched)} measurements forgotten")
    except OSError as error:
        raise EnvironmentLacks(f"{error.filename or measurements_folder()}: {error.strerror}") from None
    kept = read_measurements() if args.show else []
    if args.json:
        print_json({"schema": EXPORT_SCHEMA, "measurements": touched + [document for _, document in kept]})
    elif args.show:
        print_text(shown_text([(path.name, document) for path, document in kept]))
    return ExitCode.DONE


def _keep(document: Mapping[str, Any]) -> None:
    try:
        check_measurement(document)
    except BadMeasurement as error:
        raise ProbeFailed(f"the probe answered something else, and nothing was kept: {error}") from None
    try:
        keep_measurement(document)
    except OSError as error:
        raise EnvironmentLacks(f"the measurement is not kept: {measurements_folder()}: {error.strerror}") from None


def _on(machine: Machine, answer: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What every measurement says of where it was made."""
    name, threads = this_cpu(machine)
    on_cpu = not machine.usable_cards
    return {
        "schema": SCHEMA,
        "kind": kind,
        "device": "cpu" if on_cpu else "cuda",
        "name": name if on_cpu else str(answer["on"]["name"]),
        "card": None if on_cpu else card_of(machine),
        "threads": threads if on_cpu else None,
        "driver": None if on_cpu else machine.driver_version,
        "versions": answer["versions"],
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _threads(machine: Machine) -> dict[str, str]:
    """The CPU's threads, as a written run takes them."""
    return {} if machine.usable_cards else {"OMP_NUM_THREADS": str(this_cpu(machine)[1])}


def _announce(
    what: str, place: str, most_bytes: int, taken: int, seconds: float, limit_s: float, *, each: bool = False
) -> None:
    report_note(
        f"{what} on {place}: takes about {format_gib(taken)} GiB{' for each' if each else ''} and never more than"
        f" {format_gib(most_bytes)} of what is free, about {seconds:.0f} s and at most {limit_s:.0f};"
        " Ctrl-C stops it"
    )


def _measure_rates(args: argparse.Namespace) -> dict[str, Any]:
    from launcher.inputs.job_file import resolve_job
    from launcher.inputs.stack import resolve_stack

    named = args.machine or (resolve_job(args.job, {}, {})[0].machine if args.job else "local")
    machine = resolve_machine(named)
    python = resolve_stack({}, args.python).python
    room, limit_s = room_of(machine), args.limit or RATES_LIMIT_S
    _announce("rates", room.place, room.memory_bytes, room.memory_bytes // 4, RATES_S, limit_s)
    request = {
        "device": room.device,
        "memory_bytes": room.memory_bytes,
        "used_bytes": room.used_bytes,
        "seconds": RATES_S,
    }
    environment = {**room.environment, **_threads(machine)}
    answer = ask_child("measure_rates.py", request, python=python, limit_s=limit_s, environment=environment,
                       progress=narrate_step)  # fmt: skip
    rates = {name: value for name, value in answer.items() if name not in ("versions", "on")}
    rates["collectives"] = _collectives(machine, python, limit_s)
    document = {**_on(machine, answer, "rates"), "rates": rates}
    _keep(document)
    return document


def _collectives(machine: Machine, python: str | None, limit_s: float) -> list[dict[str, Any]]:
    """Between all idle cards, or two processes of the CPU; nothing where there is one card, or where it fails."""
    room = room_of(machine, several=True)
    ranks = len(room.cards) if room.cards else 2
    if ranks < 2:
        return []
    request = {"device": room.device, "ranks": ranks, "memory_bytes": room.memory_bytes // ranks, "seconds": LINK_S}
    environment = {**room.environment, **({} if room.cards else {"OMP_NUM_THREADS": "1"})}
    try:
        answer = ask_child("measure_links.py", request, python=python, limit_s=min(limit_s, LINK_S),
                           environment=environment, progress=narrate_step)  # fmt: skip
    except TrlfitError as error:
        report_note(f"links between {ranks} ranks are not measured: {error}")
        return []
    return list(answer["collectives"])


def _measure_job(args: argparse.Namespace, *, whole: bool) -> dict[str, Any]:
    job, origins = job_from_args(args)
    # What is refused is refused before a model that nobody knows is traced.
    check_job(job, whole=whole)
    room_of(resolve_machine(job.machine, nodes=job.nodes))
    inputs = plan_inputs(job, origins, args.python, 1, trace=args.trace is not False)
    problem, planned = _planned(inputs)
    choice = planned if whole else probed_choice(planned)
    check_probed(inputs, choice)
    limit_s = args.limit or JOB_LIMIT_S
    if choice.num_gpus > 1:
        facts, answer = job_facts(problem, choice), _ask_ranks(inputs, problem, choice, limit_s)
    else:
        facts, answer = _ask_one_rank(inputs, problem, planned, limit_s, whole=whole)
    missing = sum("not_run" in cell for cell in answer["cells"])
    if missing:
        raise ProbeFailed(
            f"{limit_s:g} s were not enough for {missing} of {len(answer['cells'])} cells, and nothing was kept;"
            " --limit S gives more"
        )
    kind = "whole" if whole else "job"
    document = {
        **_on(inputs.machine, answer, kind),
        kind: {**facts, "cells": answer["cells"]},
    }
    _keep(document)
    return document


def _whole_cell(inputs: PlanInput) -> dict[str, int]:
    return {"layers": inputs.architecture.num_layers, "sequence": inputs.job.seq_len}


def _ask_ranks(inputs: PlanInput, problem: Problem, choice: Choice, limit_s: float) -> dict[str, Any]:
    """Three steps of the plan on all of its ranks: the answer of them together."""
    from launcher.evidence.measured_ranks import ask_ranks, check_ranks, ranks_request, rooms_of

    check_ranks(inputs, problem, choice)
    rooms, cells = rooms_of(inputs.machine, choice), [_whole_cell(inputs)]
    taken, seconds = said_beforehand(problem, choice, cells, WHOLE_STEPS + 1)
    what = f"three steps of the plan, {choice.num_gpus} ranks of {choice.sharding},"
    _announce(what, rooms.place, min(rooms.memory_bytes), taken, seconds, limit_s, each=True)
    return ask_ranks(
        ranks_request(inputs, choice, rooms, cells, limit_s=limit_s),
        python=inputs.stack.python,
        limit_s=limit_s,
        environment=rooms.environment,
        progress=narrate_step,
    )


def _ask_one_rank(
    inputs: PlanInput, problem: Problem, planned: Choice, limit_s: float, *, whole: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is kept of the choice that ran, and the answer."""
    choice = planned if whole else probed_choice(planned)
    room = room_of(inputs.machine)
    cells = [_whole_cell(inputs)] if whole else job_cells(inputs, choice)
    request = job_request(inputs, choice, room, cells, limit_s=limit_s, whole=whole)
    steps = WHOLE_STEPS if whole else ROUNDS[room.device] * (WARM_STEPS + TIMED_STEPS[room.device])
    taken, seconds = said_beforehand(problem, choice, cells, steps + 1)
    what = "three steps of the plan" if whole else f"{cells[0]['layers']} and {cells[-1]['layers']} layers of the job"
    _announce(what, room.place, room.memory_bytes, taken, seconds, limit_s)
    facts, alike = job_facts(problem, choice), job_facts(problem, planned)["options"]
    if facts["options"] != alike:
        report_note(
            f"under {planned.sharding} these layers run as {alike}, which no rank does alone; what is measured is"
            f" {facts['options']}, and serves plans for one card"
        )
    answer = ask_child(
        "measure_job.py",
        request,
        python=inputs.stack.python,
        limit_s=limit_s,
        environment={**room.environment, **_threads(inputs.machine)},
        progress=narrate_step,
    )
    return facts, answer


def _planned(inputs: PlanInput) -> tuple[Problem, Choice]:
    """The plan's own choice, or the closest where none fits: a probe at small depth may fit all the same."""
    outcome = answered(make_plan, inputs)
    best = outcome.best or outcome.found.closest
    assert best is not None
    return outcome.problem_of(best), best.choice
