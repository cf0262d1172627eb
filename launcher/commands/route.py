"""`trlfit routes`, and `trlfit probe --route`: what each precision route needs, and what one does to a model here."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from launcher.errors import ExitCode, UsageError
from launcher.evidence.measuring import ask_child
from launcher.inputs.machines import resolve_machine
from launcher.inputs.model_config import resolve_architecture
from launcher.inputs.stack import resolve_stack
from launcher.narration import narrate_step
from launcher.output import print_json, print_text
from launcher.planning import card_profile
from launcher.run_text.route_script import recipe_json
from launcher.run_text.run_spec import absolute
from launcher.text.route_probe import probe_text
from launcher.text.routes import table_text
from planner.machine_hardware import gpu_hardware
from planner.precision.routes import capability_of, capability_words, lack_of
from profiles.routes import PRODUCTS, Route, find_route, load_routes, spelled_out

PROBE_SCHEMA = "trlfit.route-probe/1"
ROUTES_SCHEMA = "trlfit.routes/1"
LIMIT_S = 3600.0
"""Six trainings of 300 steps of the stand-in take 10 to 20 min on two cores."""
STAND_IN_LAYERS = 4
"""So that routes which leave the last blocks in bf16 have others left."""
STEPS, SEEDS = 300, 3
"""Three is the least that tells a spread."""
RATE = 1e-4
"""Learning rate of a trial on a model that has been trained."""


def run_routes(args: argparse.Namespace) -> int:
    """The table of routes, and with a machine which of them it offers and why not the others."""
    stack = resolve_stack(dict(args.stack or []), args.python, assume_optional=False)
    machine = resolve_machine(args.machine)
    capability, on_cpu = None, not machine.usable_cards
    if machine.usable_cards:
        capability = capability_of(gpu_hardware(machine, card_profile(machine)).compute_capability)
    rows: list[dict[str, Any]] = []
    for route in load_routes():
        lack = lack_of(route, on_cpu=on_cpu, capability=capability, versions=stack.versions, cuda=stack.cuda)
        rows.append({**route_json(route), "offered": not lack.kind, "why_not": lack.reason})
    document = {"schema": ROUTES_SCHEMA, "machine": machine.spec, "versions": stack.versions, "routes": rows}
    if args.json:
        print_json(document)
    else:
        print_text(table_text(document))
    return ExitCode.DONE


def route_json(route: Route) -> dict[str, Any]:
    """Everything the table knows of a route."""
    published = [{f.name: _plain(getattr(row, f.name)) for f in fields(row)} for row in route.published]
    return {
        "id": route.id,
        "name": route.name,
        "status": route.status,
        "launch": route.launch,
        "operands": {p: [operand.to_json() for operand in route.operands[p]] for p in PRODUCTS},
        "resolved": route.resolved,
        "waits": route.waits,
        "rounding": route.rounding,
        "keeps": list(route.keeps),
        "keep_last": route.keep_last,
        "layouts": route.layouts,
        "capability": capability_words(route),
        "why_capability": route.why_capability,
        "packages": dict(route.packages),
        "cuda": route.cuda,
        "multiples": {"features": route.features, "tokens": route.tokens},
        "memory": {f.name: getattr(route.memory, f.name) for f in fields(route.memory)},
        "time": {f.name: getattr(route.time, f.name) for f in fields(route.time)},
        "loss": route.loss,
        "source": spelled_out(route.source),
        "published": [{**row, "source": spelled_out(str(row["source"]))} for row in published],
    }


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else value


def run_route_probe(args: argparse.Namespace) -> int:
    """Try one route in the training Python; exit 5 when that failed."""
    try:
        route = find_route(args.route)
    except LookupError as error:
        raise UsageError(f"--route: {error}") from None
    if route.id == "bf16":
        raise UsageError("--route: bf16 is what a route is held against; name another")
    dataset = absolute(args.dataset) if args.dataset else None
    parameters = resolve_architecture(args.model).num_parameters if args.model else 0
    request = {
        "route": route.id,
        "launch": route.launch,
        "recipe": recipe_json(route),
        "model": _weights(args.model),
        "parameters": parameters,
        "dataset": dataset,
        "steps": args.steps or STEPS,
        "seeds": args.seeds or SEEDS,
        "rate": RATE,
        "stand_in_layers": STAND_IN_LAYERS,
    }
    python = resolve_stack({}, args.python, assume_optional=False).python
    answer = ask_child(
        "route_probe.py",
        request,
        python=python,
        limit_s=float(args.limit or LIMIT_S),
        environment={},
        progress=narrate_step,
    )
    document = {"schema": PROBE_SCHEMA, "route": route.id, "name": route.name, "loss": route.loss, **answer}
    if args.json:
        print_json(document)
    else:
        print_text(probe_text(document))
    return ExitCode.DONE


def _weights(model: str | None) -> str | None:
    """What the child loads: a folder by its whole path, a hub id as it is."""
    if model is None:
        return None
    architecture = resolve_architecture(model)
    return absolute(model) if architecture.origin == "folder" else model
