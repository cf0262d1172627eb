"""No run is written that its libraries refuse: random jobs, planned, written, and every setting built for real."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.inputs.stack import inspect_stack
from launcher.run_text.run_files import render_run
from launcher.run_text.run_spec import RunSpec
from planner.choice import RECOMPUTES
from planner.contradictions import check_inputs
from planner.machine import Host, Machine
from planner.memory.adapters import TargetError
from planner.pins import PinError
from planner.planning import RefusedJob, make_plan
from planner.problem import PlanInput
from planner.search.methods import JobSearch, search_job
from planner.units import GIB
from tests.launcher.command_line import ROOT
from tests.launcher.tiny_models import EXAMPLES
from tests.planner.replay import inputs_of

pytestmark = pytest.mark.stack

JOBS, WHOLE = 2_000, 4
"""Random jobs; one of WHOLE is planned with everything that its plan says, of the others the choice alone."""
BUILD = """
import contextlib, json, sys
sys.path.insert(0, sys.argv[1])
with contextlib.redirect_stdout(sys.stderr):
    import validate_run
    from pathlib import Path
    for folder in json.load(sys.stdin):
        sys.modules.pop("train", None)
        found = validate_run.validate(Path(folder), False)
        print(json.dumps([folder, found]), file=sys.__stdout__, flush=True)
"""
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B",
    "google/gemma-3-1b-pt",
    "google/gemma-2-2b",
    "openai/gpt-oss-20b",
    "microsoft/Phi-3-mini-4k-instruct",
    "mistralai/Mistral-7B-v0.1",
)
CARDS = ("H100-80GB", "A100-40GB", "RTX4090", "T4", "L40S", "H200")


def random_job(r: random.Random) -> dict[str, Any]:
    """A job that somebody might write: mostly sensible, with a few pins."""
    trainer = r.choice(("sft",) * 5 + ("dpo", "kto", "reward", "grpo", "rloo"))
    method = r.choice(("full", "lora", "lora"))
    pins: dict[str, Any] = {}
    for knob, values in {
        "recompute": RECOMPUTES,
        "sharding": ("ddp", "fsdp", "fsdp_no_reshard", "hsdp", "zero1", "zero2", "zero3"),
        "offload": ("", "activations", "optimizer", "optimizer,params"),
        "weights": ("fp32", "bf16"),
        "mixed_precision": ("bf16", "no"),
        "optimizer": ("adamw_torch", "sgd", "adafactor"),
        "cp": (1, 2, 4),
        "sp": (1, 2),
        "micro_batch": (1, 2, 4),
        "grad_accum": (1, 2, 8),
    }.items():
        if r.random() < 0.12:
            pins[knob] = r.choice(values)
    trl: dict[str, Any] = {}
    if r.random() < 0.3:
        trl |= {"learning_rate": 1e-5, "num_train_epochs": 1, "warmup_steps": 10}
    if trainer in ("grpo", "rloo"):
        trl |= {"reward_funcs": ["distinct_words"]}
    data = {"dataset": str(EXAMPLES / "train.jsonl"), "packing": r.random() < 0.2}
    if r.random() < 0.15 and trainer not in ("grpo", "rloo"):
        data |= {"split": "train[:90%]", "eval_split": "train[90%:]"}
    return {
        "model": r.choice(MODELS),
        "trainer": trainer,
        "method": method,
        "lora": {"r": r.choice((8, 16, 64)), "dropout": r.choice((0.0, 0.05))},
        "data": data,
        "seq_len": r.choice((512, 2048, 4096, 16_384, 131_072)),
        "global_batch": r.choice((1, 2, 8, 16, 24, 64)),
        "machine": f"{r.choice((1, 1, 2, 4, 8))}x{r.choice(CARDS)}",
        "nodes": r.choice((1, 1, 1, 2)),
        "allow": r.choice(([], [], ["numerics"])),
        "goal": r.choice(("fastest", "fastest", "headroom", "fewest_gpus")),
        "trl": trl,
        "pins": pins,
    }


def searched(inputs: PlanInput, *, whole: bool) -> JobSearch:
    """What a plan chooses from; ``whole`` also makes all that a plan says beside it, three times the work."""
    if whole:
        return make_plan(inputs).found
    check_inputs(inputs)
    return search_job(inputs, inputs.job.goal)


def planned(job: dict[str, Any], stack: Any, r: random.Random, *, whole: bool) -> RunSpec | None:
    """A run of one of the candidates that fit; None where the plan says that there is none, and why."""
    inputs: PlanInput = replace(inputs_of(job, nodes=job["nodes"]), stack=stack, top=4)
    if r.random() < 0.1:
        host = Host(total_bytes=64 * GIB, available_bytes=64 * GIB, cores=4)
        inputs = replace(inputs, machine=Machine(origin="cpu", spec="cpu", host=host), profile=None)
    try:
        found = searched(inputs, whole=whole)
    except (RefusedJob, PinError, TargetError):
        return None
    if not found.result.fitting:
        return None
    chosen = found.result.fitting[0] if r.random() < 0.5 else r.choice(found.result.fitting)
    return RunSpec(
        job=found.problems[0].inputs.job,
        choice=chosen.choice,
        architecture=inputs.architecture,
        stack=stack,
        machine=inputs.machine,
        plan_json="{}\n",
        python=sys.executable,
    )


def test_every_written_run_is_taken_by_its_libraries(tmp_path: Path) -> None:
    r = random.Random(20261130)
    stack = inspect_stack(None)
    folders: dict[str, dict[str, Any]] = {}
    refused: Counter[str] = Counter()
    for number in range(JOBS):
        job = random_job(r)
        spec = planned(job, stack, r, whole=number % WHOLE == 0)
        if spec is None:
            refused["by the plan"] += 1
            continue
        try:
            files = render_run(spec)
        except UsageError as error:
            refused[str(error)[:60]] += 1
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        folders[str(folder)] = {"job": job, "choice": spec.choice.to_json()}
    assert len(folders) > JOBS / 4, refused
    # What fits is offered, so the writer must take it: it refuses nothing that the plan has not.
    assert set(refused) == {"by the plan"}
    # What the data holds is another check's matter.
    command = [sys.executable, "-c", BUILD, str(ROOT / "launcher" / "children")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        command, input=json.dumps(list(folders)), capture_output=True, text=True, env=environment, timeout=1800
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(folders), done.stderr[-3000:]
    problems = [(found, folders[folder]) for folder, found in answers if found]
    assert problems == []
