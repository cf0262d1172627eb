"""Probe at depth 1 and 2, predict depth 8, run depth 8: `python benchmarks/probe_depth.py` on any machine, no network.

The same children, documents and corrections that `trlfit probe --measure` and `trlfit plan` use. Depth 8 runs in turns
with the probe, so that what slows the machine for a while slows both. Writes benchmarks/results/probe_depth.json;
`--markdown` renews the table of docs/probe.md from it, `--check` says whether it is up to date.

Seconds are medians of the wall clock over all rounds; on a CPU that others use too, the processor's own seconds at
their least are predicted and held against the run as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launcher.evidence.measured_requests import job_cells, job_facts, job_request, room_of
from launcher.evidence.measurement_store import this_cpu
from launcher.evidence.measuring import ask_child
from launcher.planning import answered, plan_inputs
from planner.choice import Choice
from planner.job import Job
from planner.measured.document import job_of
from planner.measured.probes import Measured, probed_choice
from planner.planning import make_plan
from planner.problem import PlanInput, make_problem

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "probe_depth.json"
PAGE = ROOT / "docs" / "probe.md"
BEGIN, END = "<!-- benchmarks/probe_depth.py -->", "<!-- end -->"
DEPTH = 8
CONFIG: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
CASES = tuple((method, recompute) for method in ("full", "lora") for recompute in ("none", "full"))
TOKENS = 512
CLOCKS = ("wall_seconds", "processor_seconds")


def case(folder: Path, method: str, recompute: str, rounds: int, python: str | None) -> dict[str, Any]:
    """One method and way of recomputing: predicted before and after the probe, and seen."""
    job = Job(
        model=str(folder),
        method=method,  # type: ignore[arg-type]
        seq_len=TOKENS,
        global_batch=1,
        machine="cpu",
        pins={"recompute": recompute, "micro_batch": "1", "loss_path": "fused"},
    )
    inputs = plan_inputs(job, {}, python, 1, trace=False)
    outcome = answered(make_plan, inputs)
    assert outcome.best is not None
    problem, choice = outcome.problem_of(outcome.best), outcome.best.choice
    assert probed_choice(choice) == choice
    room = room_of(inputs.machine)
    cells = [*job_cells(inputs, choice), {"layers": DEPTH, "sequence": TOKENS}]
    request = job_request(inputs, choice, room, cells, limit_s=1800) | {
        "rounds": rounds,
        "warm_steps": 1,
        "timed_steps": 3,
    }
    threads = {"OMP_NUM_THREADS": str(this_cpu(inputs.machine)[1])}
    answer = ask_child(
        "measure_job.py", request, python=python, limit_s=1800, environment={**room.environment, **threads},
        progress=lambda done, of, what, s: print(method, recompute, f"{done}/{of} {what} {s:.0f} s", file=sys.stderr),
    )  # fmt: skip
    whole, facts = answer["cells"].pop(), job_facts(problem, choice)
    found: dict[str, Any] = {
        "method": method,
        "recompute": recompute,
        "choice": choice.to_json(),
        "cells": answer["cells"],
    }
    found["seen"] = whole
    found["versions"] = answer["versions"]
    before = problem.judge.memory.estimate(choice)
    found["before"] = {"bytes": before.allocated_bytes, "evidence": before.evidence}
    found["after"] = {
        clock: predicted(inputs, facts, answer, seconds(answer["cells"], clock), choice) for clock in CLOCKS
    }
    return found


def seconds(cells: Sequence[Mapping[str, Any]], clock: str) -> list[dict[str, float]]:
    """Of each cell of the probe alone: the processor's own, or stretched to the wall clock (``measure_job.py``)."""
    own = [cell["processor_seconds"] for cell in cells]
    if clock == "processor_seconds":
        return own
    wall = [cell["wall_seconds"] for cell in cells]
    stretch = {
        phase: sum(took[phase] for took in wall) / max(sum(took[phase] for took in own), 1e-9) for phase in own[0]
    }
    return [{phase: took[phase] * stretch[phase] for phase in took} for took in own]


def predicted(
    inputs: PlanInput, facts: Mapping[str, Any], answer: Mapping[str, Any], took: list[dict[str, float]], choice: Choice
) -> dict[str, Any]:
    """What the plan says of the whole model after a probe whose cells ``took`` so long."""
    cells = [{**cell, "seconds": own} for cell, own in zip(answer["cells"], took, strict=True)]
    document = {"kind": "job", "name": "", "versions": answer["versions"], "job": {**facts, "cells": cells}}
    probe = job_of(document)
    assert probe is not None
    told = make_problem(replace(inputs, measured=Measured(card=None, jobs=(probe,))))
    memory, time = told.judge.memory.estimate(choice), told.judge.time.estimate(choice)
    assert memory.evidence == "measured" and time is not None
    phases = {phase.name: phase.bytes for phase in memory.phases}
    return {"bytes": memory.allocated_bytes, "phases": phases, "step_s": time.step_s, "evidence": time.evidence}


def errors(row: Mapping[str, Any]) -> dict[str, float]:
    """Predicted over seen, less one."""
    seen = row["seen"]
    most = max(seen["peaks"].values())
    found = {"bytes_before": row["before"]["bytes"] / most - 1, "bytes": row["after"][CLOCKS[0]]["bytes"] / most - 1}
    return found | {clock: row["after"][clock]["step_s"] / seen[clock]["step_s"] - 1 for clock in CLOCKS}


def section(document: Mapping[str, Any]) -> str:
    """The table of docs/probe.md."""
    lines = [
        f"A Llama of {document['config']['hidden_size']} wide, {DEPTH} layers, {TOKENS} tokens, on {document['cpu']},"
        f" {document['threads']} of its threads, load {document['load']:.1f} on {document['cores']} cores meanwhile:",
        "",
        "| run | seen MiB | before the probe | after | seen s | after | seen processor s | after |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in document["rows"]:
        off, seen = errors(row), row["seen"]
        cells = (
            f"{row['method']}, recompute {row['recompute']}",
            f"{max(seen['peaks'].values()) / 2**20:.1f}",
            f"{off['bytes_before']:+.1%}",
            f"{off['bytes']:+.2%}",
            f"{seen['wall_seconds']['step_s']:.3f}",
            f"{off['wall_seconds']:+.1%}",
            f"{seen['processor_seconds']['step_s']:.3f}",
            f"{off['processor_seconds']:+.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def renewed(page: str, document: Mapping[str, Any]) -> str:
    """The page with its marked part as it is now."""
    begin, end = page.index(BEGIN), page.index(END)
    return f"{page[:begin]}{BEGIN}\n{section(document)}\n{page[end:]}"


def main() -> int:
    """Run, or renew the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="times that all depths run, in turns")
    parser.add_argument("--python", help="the training Python; default: the one running")
    parser.add_argument("--markdown", action="store_true", help="renew docs/probe.md")
    parser.add_argument("--check", action="store_true", help="exit 1 when docs/probe.md is out of date")
    asked = parser.parse_args()
    if asked.markdown or asked.check:
        document, page = json.loads(RESULT.read_text()), PAGE.read_text(encoding="utf-8")
        if asked.markdown:
            PAGE.write_text(renewed(page, document), encoding="utf-8")
        return int(asked.check and renewed(page, document) != page)
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        rows = []
        loads = []
        for method, recompute in CASES:
            rows.append(case(folder, method, recompute, asked.rounds, asked.python))
            loads.append(os.getloadavg()[0])
            print(
                method, recompute, {name: f"{value:+.2%}" for name, value in errors(rows[-1]).items()}, file=sys.stderr
            )
        cpu, threads = this_cpu(plan_inputs(Job(model=name, machine="cpu"), {}, asked.python, 1, trace=False).machine)
    document = {"config": CONFIG, "cpu": cpu, "threads": threads, "cores": os.cpu_count(), "rows": rows}
    document["load"] = sum(loads) / len(loads)
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(section(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
