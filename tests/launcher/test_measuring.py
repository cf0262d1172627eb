"""Measuring children: bounded, gone with whoever asked, out of memory an answer; and what a real one sees."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from launcher import child_process
from launcher.errors import EnvironmentLacks, ProbeFailed, UsageError
from launcher.evidence.measured_requests import (
    Room,
    check_job,
    check_probed,
    job_cells,
    job_facts,
    job_request,
    room_of,
)
from launcher.evidence.measurement_store import PACKAGES
from launcher.evidence.measuring import ask_child
from launcher.planning import plan_inputs
from planner.choice import Choice
from planner.job import Job
from planner.machine import Host, Machine
from planner.measured.document import job_of
from planner.measured.probes import Measured
from planner.problem import make_problem
from planner.units import GIB
from tests.launcher.command_line import child, command_environment
from tests.planner.replay import inputs_of, named_machine

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import json, os, subprocess, sys, threading, time
request = json.loads(sys.stdin.buffer.readline())
threading.Thread(target=lambda: (os.read(0, 1), os.killpg(0, 9)), daemon=True).start()
other = subprocess.Popen(["sleep", "60"])
step = {"done": 0, "of": 1, "what": f"{os.getpid()} {other.pid}", "seconds": 0.5}
print(json.dumps(step), file=sys.stderr, flush=True)
"""
"""Says its own id and that of what it started, and lives and dies as the real ones do."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(child_process, "CHILDREN", tmp_path)
    return tmp_path / "child.py"


def gone(pids: list[int]) -> bool:
    """Whether none of them runs any more; the dead whom nobody has waited for count as gone."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        states = [Path(f"/proc/{pid}/stat") for pid in pids]
        if all(not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z" for path in states):
            return True
        time.sleep(0.02)
    return False


def test_a_child_answers_and_takes_what_it_started_with_it(script: Path) -> None:
    script.write_text(CHILD + "print(json.dumps({'asked': request['x'], 'env': os.environ['Y']}))\n")
    heard: list[Any] = []
    found = ask_child("child.py", {"x": 7}, python=None, limit_s=30, environment={"Y": "z"},
                      progress=lambda *step: heard.append(step))  # fmt: skip
    assert found == {"asked": 7, "env": "z"}
    ((done, of, what, seconds),) = heard
    assert (done, of, seconds) == (0, 1, 0.5)
    assert gone([int(pid) for pid in what.split()])


def test_a_child_that_takes_too_long_is_ended_with_all_it_started(script: Path) -> None:
    script.write_text(CHILD + "time.sleep(60)\n")
    heard: list[str] = []
    with pytest.raises(ProbeFailed, match=r"longer than 1\.5 s"):
        ask_child("child.py", {}, python=None, limit_s=1.5, environment={},
                  progress=lambda _d, _o, what, _s: heard.append(what))  # fmt: skip
    assert gone([int(pid) for pid in heard[0].split()])


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("sys.exit('no such attribute')", ProbeFailed, "exit code 1.: no such attribute"),
        ("os.kill(os.getpid(), 9)", ProbeFailed, "signal 9, most likely by the kernel for want of host memory"),
        ("print(json.dumps({'error': {'message': 'needs trl'}}))", EnvironmentLacks, "needs trl"),
        ("print('[]')", ProbeFailed, "exit code 0"),
    ],
    ids=["raises", "killed", "lacks", "nonsense"],
)
def test_a_child_that_fails_says_why(code: str, error: type[Exception], said: str, script: Path) -> None:
    script.write_text(f"import json, os, sys\n{code}\n")
    with pytest.raises(error, match=said):
        ask_child("child.py", {}, python=None, limit_s=30, environment={})


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_nothing_outlives_whoever_asked(sent: signal.Signals, script: Path) -> None:
    script.write_text(CHILD + "time.sleep(60)\n")
    asks = (
        "from pathlib import Path\nfrom launcher import child_process\n"
        "from launcher.evidence.measuring import ask_child\n"
        f"child_process.CHILDREN = Path({str(script.parent)!r})\n"
        "ask_child('child.py', {}, python=None, limit_s=60, environment={},"
        " progress=lambda d, o, what, s: print(what, flush=True))\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", asks], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert asker.stdout is not None
    pids = [int(pid) for pid in asker.stdout.readline().split()]
    assert len(pids) == 2
    asker.send_signal(sent)
    asker.wait()
    asker.stdout.close()
    assert gone(pids)


def test_a_probe_leaves_a_margin_and_takes_no_card_that_is_not_here() -> None:
    machine = Machine(origin="cpu", spec="cpu", host=Host(total_bytes=64 * GIB, available_bytes=40 * GIB, cores=4))
    assert room_of(machine).memory_bytes == 36 * GIB
    machine.host = Host(total_bytes=64 * GIB, available_bytes=GIB, cores=4)
    with pytest.raises(EnvironmentLacks, match=r"the host has 1\.0 GiB free, of which a probe leaves 1"):
        room_of(machine)
    with pytest.raises(UsageError, match="only the machine here can be measured"):
        room_of(named_machine("8xH100-80GB"))
    cards = named_machine("2xH100-80GB")
    cards.origin = "nvml"
    for card, used in zip(cards.cards, (30, 5), strict=True):
        card.uuid, card.used_bytes, card.free_bytes = f"GPU-{used}", used * GIB, card.total_bytes - used * GIB
    room = room_of(cards)
    assert room.environment["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    assert room.memory_bytes == int(0.95 * cards.cards[1].free_bytes) + 1
    # Others work on both: nothing runs between them.
    assert room_of(cards, several=True).cards == ()


def test_what_no_probe_runs_is_one_line() -> None:
    asked = inputs_of({"model": "Qwen/Qwen3-0.6B", "machine": "1xH100-80GB", "seq_len": 16})
    choice = Choice(method="full", loss_path="fused", recompute="none")
    with pytest.raises(UsageError, match="rows of 32 tokens or more"):
        check_job(asked.job)
    check_job(asked.job, whole=True)
    with pytest.raises(UsageError, match="--method qlora"):
        check_probed(asked, replace(choice, method="qlora"))
    for trainer in ("grpo", "rloo"):
        with pytest.raises(UsageError, match=f"--trainer {trainer}: random weights generate no answers"):
            check_job(asked.job.model_copy(update={"trainer": trainer}))


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.stack
@pytest.mark.parametrize(
    ("trainer", "method", "recompute", "rows"),
    [
        ("sft", "full", "none", 1),
        ("sft", "lora", "full", 2),
        ("dpo", "full", "none", 1),
        ("dpo", "lora", "full", 1),
        ("kto", "lora", "none", 2),
        ("reward", "full", "full", 1),
    ],
)
def test_depth_1_and_2_tell_depth_8(trainer: Any, method: Any, recompute: str, rows: int, tmp_path: Path) -> None:
    """Counted bytes within 3 %, as a real run at depth 8 shows; time is benchmarks/probe_depth.py's."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    pins = {"recompute": recompute, "micro_batch": str(rows), "loss_path": "fused"}
    job = Job(
        model=str(tmp_path), trainer=trainer, method=method, seq_len=256, global_batch=rows, machine="cpu", pins=pins
    )
    inputs = plan_inputs(job, {}, None, 1, trace=False)
    problem = make_problem(inputs)
    weights = "fp32" if method == "full" else "bf16"
    choice = Choice(method=method, loss_path="fused", recompute=recompute, weights=weights, micro_batch=rows)  # type: ignore[arg-type]
    cells = [*job_cells(inputs, choice), {"layers": 8, "sequence": 256}]
    request = job_request(inputs, choice, room_of(inputs.machine), cells, limit_s=120)
    request |= {"rounds": 1, "timed_steps": 1, "warm_steps": 1}
    answer = ask_child("measure_job.py", request, python=None, limit_s=120, environment={"OMP_NUM_THREADS": "1"})
    whole = answer["cells"].pop()
    document = {"kind": "job", "name": "", "versions": answer["versions"]}
    probe = job_of(document | {"job": job_facts(problem, choice) | {"cells": answer["cells"]}})
    assert probe is not None and probe.depths == (1, 2)
    told = make_problem(replace(inputs, measured=Measured(card=None, jobs=(probe,)))).judge.memory.estimate(choice)
    assert told.evidence == "measured"
    seen = whole["peaks"]
    assert told.allocated_bytes == pytest.approx(max(seen.values()), rel=0.03)
    for phase in told.phases:
        assert phase.bytes == pytest.approx(seen.get(phase.name, phase.bytes), rel=0.03)
    # The counter is no figment: at rest in the step are weights, two moments and gradients of all that trains, and a
    # reference's weights.
    if method == "full":
        bytes_each = 4 * (5 if trainer == "dpo" else 4)
        assert bytes_each * whole["parameters"] <= seen["step"] <= 1.05 * bytes_each * whole["parameters"] + 2**20


@pytest.mark.stack
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_reference_has_copies_under_autocast_too(recompute: Any, tmp_path: Path) -> None:
    """Without a probe: of wide layers and few tokens the copies are most of what the loss adds, and decide the peak."""
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | wide))
    job = Job(model=str(tmp_path), trainer="dpo", seq_len=32, global_batch=1, machine="cpu")
    inputs = plan_inputs(job, {}, None, 1, trace=False)
    choice = Choice(method="full", loss_path="fused", recompute=recompute, weights="fp32", mixed_precision="bf16")
    cells = [{"layers": 2, "sequence": 32}]
    request = job_request(inputs, choice, room_of(inputs.machine), cells, limit_s=120, whole=True)
    answer = ask_child("measure_job.py", request, python=None, limit_s=120, environment={"OMP_NUM_THREADS": "1"})
    seen = answer["cells"][0]["peaks"]
    said = {phase.name: phase.bytes for phase in make_problem(inputs).judge.memory.frame(choice).phases(1, 1)}
    assert {phase: said[phase] for phase in seen} == pytest.approx(seen, rel=0.02)
    if recompute == "none":
        assert max(seen, key=lambda phase: seen[phase]) == "loss"


@pytest.mark.stack
def test_pairs_through_the_command_line(tmp_path: Path) -> None:
    """DPO with a reference model: its probe counts for DPO as it ran, and for no other trainer or reference."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    env = command_environment(tmp_path, OMP_NUM_THREADS="1")
    job = "model: config.json\ntrainer: dpo\nmachine: cpu\nseq_len: 64\nglobal_batch: 1\npins: {recompute: none}\n"
    (tmp_path / "held.yaml").write_text(job)
    (tmp_path / "before.yaml").write_text(job + "trl: {precompute_ref_log_probs: true}\n")
    said = child(["probe", "held.yaml", "--measure", "--no-trace", "--json"], cwd=tmp_path, env=env)
    assert said.code == 0, said.err
    measured = json.loads(said.out)["job"]
    assert (measured["trainer"], measured["scored_beside"]) == ("dpo", "a reference model")
    assert {cell["tokens"] for cell in measured["cells"]} == {2 * 32, 2 * 64}

    def evidence(*words: str) -> tuple[str, str]:
        plan = child(["plan", *words, "--no-trace", "--json"], cwd=tmp_path, env=env)
        best = json.loads(plan.out)["best"]
        return best["memory"]["evidence"], best["time"]["evidence"]

    assert evidence("held.yaml") == ("measured", "measured")
    for words in (["held.yaml", "--trainer", "sft"], ["held.yaml", "--method", "lora"], ["before.yaml"]):
        assert evidence(*words)[0] == "formula"
    assert "dpo" in child(["probe", "--show"], cwd=tmp_path, env=env).out


@pytest.mark.stack
def test_running_out_of_memory_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 200_000}))
    job = Job(model=str(tmp_path), seq_len=256, global_batch=1, machine="cpu", pins={"micro_batch": "1"})
    inputs = plan_inputs(job, {}, None, 1, trace=False)
    choice = Choice(method="full", loss_path="fused", recompute="none", weights="fp32")
    room = Room(device="cpu", cards=(), memory_bytes=150 * 2**20, used_bytes=0, environment={})
    request = job_request(inputs, choice, room, [{"layers": 1, "sequence": 256}], limit_s=120)
    answer = ask_child("measure_job.py", request, python=None, limit_s=120, environment={"OMP_NUM_THREADS": "1"})
    (cell,) = answer["cells"]
    assert (cell["layers"], cell["sequence"]) == (1, 256)
    assert "allocate" in cell["out_of_memory"]


@pytest.mark.stack
def test_rates_through_the_command_line(tmp_path: Path) -> None:
    env = command_environment(tmp_path, OMP_NUM_THREADS="1")
    plan = ["plan", "Qwen/Qwen3-0.6B", "--machine", "cpu", "--seq-len", "128", "--global-batch", "1", "--json"]
    before = json.loads(child(plan, cwd=tmp_path, env=env).out)
    said = child(["probe", "--rates", "--machine", "cpu", "--json"], cwd=tmp_path, env=env)
    assert said.code == 0, said.err
    assert "never more than" in said.err and "Ctrl-C stops it" in said.err
    document = json.loads(said.out)
    # A busy core without bf16 kernels was seen at 1.8e8 in bf16.
    least = {"float32": 1e8, "bfloat16": 1e6}
    assert all(found["flops_per_s"] > least[found["dtype"]] for found in document["rates"]["products"])
    assert {found["kind"] for found in document["rates"]["collectives"]} == {"all_gather", "reduce_scatter"}
    after = json.loads(child(plan, cwd=tmp_path, env=env).out)
    assert any(note.startswith("this machine's rates are measured on ") for note in after["notes"])
    wide, narrow = (p["best"]["time"] for p in (before, after))
    assert narrow["high_s"] / narrow["low_s"] == pytest.approx(4.0, rel=0.01)
    assert wide["high_s"] / wide["low_s"] == pytest.approx(16.0, rel=0.01)
    shown = child(["probe", "--show"], cwd=tmp_path, env=env)
    assert "rates" in shown.out and shown.code == 0
    assert child(["probe", "--forget"], cwd=tmp_path, env=env).code == 0
    assert "nothing is measured" in child(["probe", "--show"], cwd=tmp_path, env=env).out


def cell(layers: int, sequence: int) -> dict[str, Any]:
    """40 MiB at rest and 10 a layer; 20 ms a layer and 64 tokens, 30 ms beside."""
    peaks = dict.fromkeys(("forward", "loss", "backward", "step"), (40 + 10 * layers) * 2**20)
    seconds = {"forward": 0.02 * layers * sequence / 64, "loss": 0.02, "backward": 0.0, "step": 0.01, "other": 0.0}
    return {"layers": layers, "sequence": sequence, "tokens": sequence, "peaks": peaks,
            "seconds": {**seconds, "step_s": sum(seconds.values())}}  # fmt: skip


def test_a_probe_on_one_box_serves_a_plan_on_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = {
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "on": {"device": "cpu", "threads": 1},
        "cells": [cell(layers, tokens) for layers in (1, 2) for tokens in (64, 128)],
    }
    (tmp_path / "answer.json").write_text(json.dumps(told))
    python, answers = tmp_path / "python", f"read x; cat {tmp_path}/answer.json"
    python.write_text(f'#!/bin/sh\ncase $1 in *measure_job.py) {answers};; *) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    env = command_environment(tmp_path, OMP_NUM_THREADS="1")
    words = ["config.json", "--machine", "cpu", "--seq-len", "128", "--global-batch", "1", "--pin", "recompute=none"]
    words += ["--pin", "loss_path=fused", "--python", str(python), "--no-trace"]
    stated = ["--stack", "torch=9.9.9"]
    said = child(["probe", *words, "--measure", "--json"], cwd=tmp_path, env=env)
    assert said.code == 0, said.err
    assert "1 and 2 layers of the job on the host: takes about" in said.err
    document = json.loads(said.out)
    plan = child(["plan", *words, "--json"], cwd=tmp_path, env=env)
    best = json.loads(plan.out)["best"]
    assert document["job"]["choice"] == {**best["choice"], "grad_accum": 1}
    assert (best["memory"]["evidence"], best["time"]["evidence"]) == ("measured", "measured")
    # 40 MiB and 8 layers of 10; 8 x 20 ms x 2 and 30 ms beside.
    assert best["memory"]["allocated_bytes"] == pytest.approx(120 * 2**20, abs=2)
    assert best["time"]["step_s"] == pytest.approx(0.35, rel=0.01)
    assert child(["probe", "--export", "box.json"], cwd=tmp_path, env=env).code == 0
    laptop = {**env, "XDG_CACHE_HOME": str(tmp_path / "laptop")}
    before = child(["plan", *words, "--json"], cwd=tmp_path, env=laptop)
    assert json.loads(before.out)["best"]["memory"]["evidence"] == "formula"
    assert child(["probe", "--import", "box.json"], cwd=tmp_path, env=laptop).code == 0
    again = json.loads(child(["plan", *words, "--json"], cwd=tmp_path, env=laptop).out)["best"]
    assert (again["memory"]["phases"], again["time"]) == (best["memory"]["phases"], best["time"])
    other = json.loads(child(["plan", *words, *stated, "--json"], cwd=tmp_path, env=laptop).out)
    assert other["best"]["memory"]["evidence"] == "formula"
    assert any("is not used for this stack" in note for note in other["notes"])
    for wrong, why in ((["--show", "--rates"], "--rates: --show runs no probe"), (["--limit", "9"], "--limit is for")):
        refused = child(["probe", *wrong], cwd=tmp_path, env=env)
        assert (refused.code, refused.out) == (2, "")
        assert why in refused.err


@pytest.mark.stack
def test_the_script_for_a_card_runs_on_a_cpu(tmp_path: Path) -> None:
    """What a card is held against, with the smallest case: a table of seen and predicted, better after the probe."""
    words = ["--cpu", "--only", "full", "-o", str(tmp_path / "results"), "--limit", "200"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *words],
        cwd=tmp_path,
        env=command_environment(tmp_path, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "results").glob("*.json")
    document = json.loads(written.read_text())
    assert (written.with_suffix(".md").read_text(), document["not_run"]) == (done.stdout, {})
    ((result,), rows) = document["results"], document["results"][0]["rows"]
    assert [row["tokens"] for row in rows] == [64, 128]
    for row in rows:
        seen = max(row["seen"]["peaks"].values())
        off = {when: abs(row[when]["allocated_bytes"] / seen - 1) for when in ("before", "after")}
        assert off["after"] < 0.03 and off["after"] < off["before"]
    assert len(result["probe"]) == 4
    assert f"| full | 64 | {seen_gib(rows[0])} |" in done.stdout


def seen_gib(row: dict[str, Any]) -> str:
    return f"{max(row['seen']['peaks'].values()) / 2**30:.3f}"
