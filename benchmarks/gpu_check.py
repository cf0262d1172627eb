"""One card against its predictions within minutes: `python benchmarks/gpu_check.py` on the machine that has it.

    python benchmarks/gpu_check.py [--wheels DIR] [--limit 540] [--only WORD ...] [-o DIR]

Measures rates, probes three models, and trains a table of small jobs at full depth (full, LoRA, ways of recomputing,
loss paths, offload, two lengths), each beside what is predicted before and after a probe of its own layers. Writes
CARD-DATE.json and CARD-DATE.md; what the time does not reach says so. Without a card the same runs on the CPU with
smaller cases. It needs torch, transformers, accelerate, peft and TRL, and no network: wheels of what such a machine
lacks are carried in DIR and unpacked beside.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 540.0
SPARE_S = 10.0
"""Kept for writing; no child starts later than this before the end."""

if TYPE_CHECKING:
    from launcher.evidence.measured_requests import Room
    from planner.choice import Choice
    from planner.machine import Machine
    from planner.measured.probes import MeasuredRates
    from planner.problem import PlanInput, Problem

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set of knobs of one model."""

    name: str
    model: str
    lengths: tuple[int, int]
    method: str = "full"
    recompute: str = "none"
    loss_path: str = "fused"
    offload: tuple[str, ...] = ()
    weights: str = "fp32"
    whole: bool = True
    """Run at full depth too, to hold the prediction against."""


def cases(on_card: bool, small: str, loss_paths: Sequence[str]) -> list[Case]:
    """What is run, what is wanted most first; ``loss_paths`` are those of the installed TRL, its own choice first."""
    if not on_card:
        base = Case(name="", model=small, lengths=(64, 128))
        return [
            replace(base, name="full"),
            replace(base, name="lora, recompute full", method="lora", weights="bf16", recompute="full"),
            replace(base, name="probe", recompute="full", whole=False),
        ]
    base = Case(name="", model="Qwen/Qwen3-0.6B", lengths=(2048, 8192), loss_path=loss_paths[0])
    # Whole logits of 8,192 tokens are no small job.
    others = [replace(base, name=f"full, loss {path}", loss_path=path, lengths=(1024, 2048)) for path in loss_paths[1:]]
    table = [
        replace(base, name="full"),
        replace(base, name="lora", method="lora", weights="bf16"),
        replace(base, name="full, recompute full", recompute="full"),
        replace(base, name="full, recompute selective", recompute="selective"),
        replace(base, name="full, recompute full, offload activations", recompute="full", offload=("activations",)),
        replace(base, name="lora, recompute full", method="lora", weights="bf16", recompute="full"),
        *others,
    ]
    probe = replace(base, whole=False, recompute="full", weights="bf16")
    probes = [
        replace(probe, name="probe of Qwen3-8B", model="Qwen/Qwen3-8B"),
        replace(probe, name="probe of Qwen3-30B-A3B", model="Qwen/Qwen3-30B-A3B", method="lora"),
        replace(probe, name="probe of gemma-3-1b", model="google/gemma-3-1b-pt"),
    ]
    return [*table[:3], *probes, *table[3:]]


class Clock:
    """What is left of the time."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def left(self) -> float:
        """Seconds until the last child must be done."""
        return self._end - time.monotonic() - SPARE_S


def narrate(name: str) -> Any:
    """Progress of one child on stderr."""
    return lambda done, of, what, s: print(f"{name}: {done}/{of} {what} {s:.0f} s", file=sys.stderr, flush=True)


def measure_rates(room: Room, clock: Clock) -> tuple[dict[str, Any], MeasuredRates]:
    """The machine's rates as a document says them, and as the planner reads them."""
    from launcher.evidence.measuring import ask_child
    from planner.measured.document import rates_of

    request = {"device": room.device, "memory_bytes": room.memory_bytes, "used_bytes": room.used_bytes, "seconds": 20}
    answer = ask_child(
        "measure_rates.py", request, python=None, limit_s=min(90.0, clock.left()), environment=room.environment,
        progress=narrate("rates"),
    )  # fmt: skip
    rates = {name: value for name, value in answer.items() if name not in ("versions", "on")}
    return answer, rates_of({"kind": "rates", "name": "this machine", "versions": answer["versions"], "rates": rates})


def inputs_of(case: Case, machine: Machine) -> PlanInput:
    """The job of a case as a plan has it; nothing is traced meanwhile."""
    from launcher.planning import plan_inputs
    from planner.job import Job

    job = Job(
        model=case.model,
        method=case.method,  # type: ignore[arg-type]
        seq_len=max(case.lengths),
        global_batch=1,
        machine="local" if machine.usable_cards else "cpu",
    )
    return replace(plan_inputs(job, {}, None, 1, trace=False), measured=None)


def choice_of(case: Case) -> Choice:
    """The knobs of a case."""
    from planner.choice import Choice

    return Choice(
        method=case.method,  # type: ignore[arg-type]
        loss_path=case.loss_path,  # type: ignore[arg-type]
        recompute=case.recompute,  # type: ignore[arg-type]
        offload=frozenset(case.offload),  # type: ignore[arg-type]
        weights=case.weights,  # type: ignore[arg-type]
        mixed_precision="bf16" if case.weights == "fp32" or case.method == "lora" else "no",
    )


def said(problem: Problem, choice: Choice) -> dict[str, Any]:
    """What the plan says of one choice."""
    memory, seconds = problem.judge.memory.estimate(choice), problem.judge.time.estimate(choice)
    return {
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "device_bytes": memory.device_bytes,
        "evidence": memory.evidence,
        "phases": {phase.name: phase.bytes for phase in memory.phases},
        "step_s": seconds.step_s if seconds else None,
        "low_s": seconds.low_s if seconds else None,
        "high_s": seconds.high_s if seconds else None,
    }


def run_case(case: Case, machine: Machine, room: Room, rates: MeasuredRates | None, limit_s: float) -> dict[str, Any]:
    """Run a case: its probe at two depths and lengths, and where asked the whole model at both lengths."""
    from launcher.evidence.measured_requests import job_facts, job_request
    from launcher.evidence.measuring import ask_child
    from planner.measured.document import job_of
    from planner.measured.probes import Measured, probe_depths
    from planner.problem import make_problem

    inputs, choice = inputs_of(case, machine), choice_of(case)
    problem = make_problem(inputs)
    depths = probe_depths(inputs.architecture, choice.recompute)
    deep = [inputs.architecture.num_layers] if case.whole else []
    cells = [{"layers": layers, "sequence": tokens} for layers in (*depths, *deep) for tokens in case.lengths]
    request = job_request(inputs, choice, room, cells, limit_s=limit_s) | {"timed_steps": 4, "rounds": 1}
    answer = ask_child(
        "measure_job.py", request, python=None, limit_s=limit_s + SPARE_S / 2, environment=room.environment,
        progress=narrate(case.name),
    )  # fmt: skip
    seen = answer["cells"]
    document = {"kind": "job", "name": "this machine", "versions": answer["versions"]}
    facts = job_facts(problem, choice)
    probe = job_of(document | {"job": {**facts, "cells": seen[:4]}})
    from launcher.evidence.measurement_store import card_of

    told = Measured(card=card_of(machine), rates=rates, jobs=() if probe is None else (probe,))
    rows: list[dict[str, Any]] = []
    for cell in seen[4:]:
        job = inputs.job.model_copy(update={"seq_len": cell["sequence"]})
        here = replace(inputs, job=job)
        rows.append(
            {
                "tokens": cell["sequence"],
                "seen": cell,
                "before": said(make_problem(here), choice),
                "after": said(make_problem(replace(here, measured=told)), choice),
            }
        )
    return {"case": case.name, "model": case.model, "choice": choice.to_json(), "versions": answer["versions"],
            "on": answer["on"], "used_bytes": room.used_bytes, "probe": seen[:4], "rows": rows}  # fmt: skip


def off(told: float | None, seen: float | None) -> float | None:
    """Predicted over seen, less one."""
    return told / seen - 1 if told and seen else None


def numbers(result: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, tuple[float, float | None, float | None]]:
    """What was seen, and how far predictions before and after the probe are off, by metric."""
    seen, before, after = row["seen"], row["before"], row["after"]
    metrics = {"allocated_bytes": max(seen["peaks"].values())}
    if "reserved_bytes" in seen:
        metrics["reserved_bytes"] = seen["reserved_bytes"]
        metrics["device_bytes"] = seen["device_used_bytes"] - result["used_bytes"]
    found = {name: (float(value), off(before[name], value), off(after[name], value)) for name, value in metrics.items()}
    step = seen["seconds"]["step_s"]
    return found | {"step_s": (step, off(before["step_s"], step), off(after["step_s"], step))}


METRICS = ("allocated_bytes", "reserved_bytes", "device_bytes", "step_s")


def table(document: Mapping[str, Any]) -> str:
    """The results for people."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:+.1%}"

    versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    lines = [f"# {document['name']}, {document['date']}", "", f"{versions}; {document['took_s']:.0f} s in all.", ""]
    lines += ["Seen, and predicted over seen before and after a probe at depth 1 and 2 of the same layers.", ""]
    head = ["run", "tokens"]
    for name in ("allocated GiB", "reserved GiB", "device GiB", "step s"):
        head += [name, "before", "after"]
    lines += [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    errors: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in METRICS}
    for result in document["results"]:
        for row in result["rows"]:
            words = [result["case"], f"{row['tokens']:,}"]
            if "peaks" not in row["seen"]:
                told = row["after"]["allocated_bytes"] / 2**30
                ended = row["seen"].get("not_run", f"out of memory; {told:.1f} GiB predicted")
                lines.append(f"| {' | '.join([*words, ended, *[''] * 11])} |")
                continue
            found = numbers(result, row)
            for name in METRICS:
                seen, before, after = found.get(name, (None, None, None))
                scale = 1.0 if name == "step_s" else 2**30
                words += ["" if seen is None else f"{seen / scale:.3f}", percent(before), percent(after)]
                for kept, value in zip(errors[name], (before, after), strict=True):
                    kept += [abs(value)] if value is not None else []
            lines.append(f"| {' | '.join(words)} |")
    lines += [
        "",
        "| metric | runs | median error before | after | worst before | after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (before, after) in errors.items():
        if before and after:
            cells = (f"{median(before):.1%}", f"{median(after):.1%}", f"{max(before):.1%}", f"{max(after):.1%}")
            lines.append(f"| {name} | {len(before)} | {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: {why}" for name, why in document["not_run"].items())]
    return "\n".join(lines).rstrip() + "\n"


def unpack(wheels: Path, into: Path) -> None:
    """Make carried wheels importable, here and in children."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    sys.path.insert(0, str(into))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(into), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that the time allows."""
    from launcher.errors import TrlfitError
    from launcher.evidence.measured_requests import room_of
    from launcher.evidence.measurement_store import this_cpu
    from launcher.inputs.machines import resolve_machine
    from launcher.inputs.stack import resolve_stack
    from profiles.releases import trl_release

    started, clock = time.monotonic(), Clock(asked.limit)
    machine = resolve_machine("cpu" if asked.cpu else "local")
    on_card = bool(machine.usable_cards)
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(SMALL))
    not_run: dict[str, str] = {}
    results: list[dict[str, Any]] = []
    raw, rates, versions = None, None, {}
    if not asked.only or "rates" in asked.only:
        try:
            raw, rates = measure_rates(room_of(machine), clock)
            versions = raw["versions"]
        except TrlfitError as error:
            not_run["rates"] = str(error)
    stack = resolve_stack({}, None)
    paths = [path for path in trl_release(stack.versions.get("trl", "")).loss_paths_for("sft")
             if path != "liger" or stack.has("liger-kernel")]  # fmt: skip
    paths.sort(key=lambda path: path != "fused")
    for case in cases(on_card, str(folder / "small"), paths):
        if asked.only and case.name not in asked.only:
            continue
        if clock.left() < asked.least:
            not_run[case.name] = "no time left"
            continue
        try:
            results.append(run_case(case, machine, room_of(machine), rates, clock.left()))
            versions = results[-1]["versions"]
        except TrlfitError as error:
            not_run[case.name] = str(error)
    name = machine.usable_cards[0].name if on_card else this_cpu(machine)[0]
    return {
        "name": name,
        "driver": machine.driver_version,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions,
        "took_s": time.monotonic() - started,
        "rates": raw,
        "results": results,
        "not_run": not_run,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run, write, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of what this machine lacks")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds in all")
    parser.add_argument(
        "--least", type=float, default=45.0, metavar="S", help="no case starts with less time than this"
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases by name, `rates` among them")
    parser.add_argument("--cpu", action="store_true", help="as on a machine without a card")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Its own cache: nothing that this machine knows already may help.
        os.environ["TRLFIT_CACHE"] = str(folder / "cache")
        if asked.wheels:
            unpack(asked.wheels, folder / "wheels")
        sys.path.insert(0, str(ROOT))
        document = run(asked, folder)
    slug = "-".join("".join(c if c.isalnum() else " " for c in document["name"]).split())
    asked.output.mkdir(parents=True, exist_ok=True)
    stem = asked.output / f"{slug}-{document['date']}"
    Path(f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    Path(f"{stem}.md").write_text(table(document), encoding="utf-8")
    print(table(document), end="")
    return 0 if document["results"] else 5


if __name__ == "__main__":
    sys.exit(main())
