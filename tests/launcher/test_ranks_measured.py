"""A plan on all of its ranks as a probe: what is asked, what is made of the answers; and two ranks that really run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.children import measure_ranks
from launcher.errors import EnvironmentLacks, UsageError
from launcher.evidence.measured_ranks import RankRooms, ask_ranks, check_ranks, ranks_request, rooms_of
from launcher.planning import plan_inputs
from launcher.run_text.run_files import RunSpec, render_run
from planner.choice import Choice
from planner.job import Job
from planner.machine import Host, Machine
from planner.measured.probes import PHASES
from planner.planning import make_plan
from planner.problem import PlanInput, make_problem, with_job
from planner.units import GIB
from tests.launcher.command_line import child
from tests.launcher.warm_python import warm_environment, warm_python, warm_variables
from tests.planner.replay import inputs_of, named_machine

ROOT = Path(__file__).resolve().parents[2]
CPU_RANKS = Path(__file__).with_name("cpu_ranks")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
DDP = Choice(method="full", loss_path="fused", recompute="none", sharding="ddp", dp_replicate=2, mixed_precision="no")
FSDP = Choice(method="full", loss_path="fused", recompute="none", sharding="fsdp", dp_shard=2, weights="bf16")


def cards(*used_gib: int) -> Machine:
    """H100 of this box, with so much of each in use."""
    machine = named_machine(f"{len(used_gib)}xH100-80GB")
    machine.origin = "nvml"
    machine.host = Host(total_bytes=512 * GIB, available_bytes=400 * GIB, cores=16)
    for card, used in zip(machine.cards, used_gib, strict=True):
        card.uuid, card.used_bytes = f"GPU-{card.index}", used * GIB
        card.free_bytes = card.total_bytes - card.used_bytes
    return machine


def test_ranks_take_the_cards_of_the_run_and_leave_a_margin_on_each() -> None:
    machine = cards(30, 0, 0, 0)
    rooms = rooms_of(machine, FSDP)
    assert rooms.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert rooms.place == f"cards 1, 2 ({machine.cards[1].name})"
    assert rooms.memory_bytes == tuple(card.free_bytes - int(0.05 * card.free_bytes) for card in machine.cards[1:3])
    with pytest.raises(EnvironmentLacks, match="others work on card 0 of the 2"):
        rooms_of(cards(30, 0), FSDP)
    with pytest.raises(UsageError, match="takes 2 ranks and a run here 1 card;"):
        rooms_of(cards(0), FSDP)
    cpu = Machine(origin="cpu", spec="cpu", host=Host(total_bytes=64 * GIB, available_bytes=40 * GIB, cores=4))
    assert rooms_of(cpu, DDP).memory_bytes == (18 * GIB, 18 * GIB)


def big(**more: Any) -> PlanInput:
    return inputs_of({"model": "Qwen/Qwen3-8B", "machine": "2xH100-80GB", "seq_len": 2048, "global_batch": 2, **more})


def test_ranks_start_from_the_files_of_the_written_run() -> None:
    asked = big(data={"dataset": "rows.jsonl"})
    zero = Choice(
        method="full", loss_path="fused", recompute="full", sharding="zero3", dp_shard=2, weights="bf16", grad_accum=2,
        offload=frozenset({"optimizer"}),
    )  # fmt: skip
    rooms = RankRooms(device="cuda", cards=(), memory_bytes=(8, 9), used_bytes=(1, 2), environment={})
    for choice, files in ((FSDP, ["accelerate.yaml"]), (zero, ["accelerate.yaml", "deepspeed.json"])):
        request = ranks_request(asked, choice, rooms, [{"layers": 36, "sequence": 2048}], limit_s=60)
        spec = RunSpec(job=asked.job, choice=choice, architecture=asked.architecture, stack=asked.stack,
                       machine=asked.machine, plan_json="", python=None)  # fmt: skip
        written = render_run(spec)
        assert request["files"] == {name: written[name] for name in files}
        rank = request["rank"]
        assert (rank["memory_bytes"], rank["used_bytes"], rank["readers"]) == ([8, 9], [1, 2], 2)
        assert rank["arguments"]["gradient_accumulation_steps"] == choice.grad_accum
        assert rank["keeps_outputs"] is (choice is FSDP)


def test_what_does_not_run_on_all_ranks_is_one_line() -> None:
    problem, nodes = make_problem(big()), big()
    nodes.machine.nodes = 2
    with pytest.raises(UsageError, match="--whole: the plan runs on 2 nodes and a probe on one alone; pin gpus=2"):
        check_ranks(nodes, problem, replace(FSDP, dp_shard=4))
    with pytest.raises(UsageError, match="fsdp1 is only estimated"):
        check_ranks(big(), problem, Choice(method="full", loss_path="fused", recompute="none", sharding="fsdp1"))
    small = big()
    small.machine.host = Host(total_bytes=32 * GIB, available_bytes=32 * GIB, cores=16)
    # 8.19 billion weights of two bytes, twice, and two processes.
    with pytest.raises(EnvironmentLacks, match=r"the host has 28\.8 GiB that a probe may take, and 2 ranks take 31\.3"):
        check_ranks(small, make_problem(small), FSDP)
    # A reference is made beside the policy that no card has yet.
    pairs = with_job(small, trainer="dpo")
    with pytest.raises(EnvironmentLacks, match=r"and 2 ranks take 61\.8"):
        check_ranks(pairs, make_problem(pairs), FSDP)


def seen(bytes_: int, step_s: float) -> dict[str, Any]:
    seconds = {**dict.fromkeys(PHASES, step_s / 5), "other": step_s / 5, "step_s": step_s}
    return {"at": 1.0, "versions": {"torch": "2"}, "on": {"device": "cpu"},
            "cell": {"layers": 2, "sequence": 8, "tokens": 8, "peaks": dict.fromkeys(PHASES, bytes_),
                     "seconds": seconds, "wall_seconds": seconds, "reserved_bytes": 3 * bytes_}}  # fmt: skip


def test_one_cell_of_all_ranks() -> None:
    answer = measure_ranks.answer_of({0: seen(10, 2.0), 1: seen(30, 1.0)}, 2)
    (cell,) = answer["cells"]
    assert cell["peaks"] == dict.fromkeys(PHASES, 30)
    assert (cell["seconds"]["step_s"], cell["reserved_bytes"]) == (2.0, 90)
    assert [rank["peaks"]["loss"] for rank in cell["ranks"]] == [10, 30]
    assert "wall_seconds" not in cell and answer["versions"] == {"torch": "2"}


def test_a_rank_out_of_memory_is_the_answer_whatever_the_others_say() -> None:
    short = {"at": 2.0, "versions": {}, "on": {}, "layers": 2, "sequence": 8, "out_of_memory": "tried to allocate"}
    answer = measure_ranks.answer_of({0: {"at": 1.0, "failed": "RuntimeError: connection closed"}, 1: short}, 2)
    assert answer["cells"] == [
        {"layers": 2, "sequence": 8, "rank": 1, "out_of_memory": "rank 1 of 2: tried to allocate"}
    ]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({0: {"at": 2.0, "failed": "echo"}, 1: {"at": 1.0, "failed": "ValueError: no"}}, "rank 1 of 2: ValueError: no"),
        ({0: seen(10, 1.0)}, "rank 1 of 2 ended without a word; the kernel does that for want of host memory"),
    ],
    ids=["fails", "is killed"],
)
def test_a_rank_that_fails_says_why(found: dict[int, dict[str, Any]], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        measure_ranks.answer_of(found, 2)


WORDS = ["config.json", "--machine", "cpu", "--seq-len", "128", "--global-batch", "2", "--no-trace"]
PINS = {"gpus": "2", "sharding": "ddp", "recompute": "none", "loss_path": "fused", "micro_batch": "1"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    own = {"TRLFIT_CACHE": str(place / "cache"), "TMPDIR": str(place / "tmp"), "PYTHONPATH": str(ROOT)}
    return {**warm_environment(), **own}


def pinned(pins: dict[str, str]) -> list[str]:
    return [word for knob, value in pins.items() for word in ("--pin", f"{knob}={value}")]


def left(place: Path) -> list[str]:
    """What a probe left of its folder; libraries of others may leave theirs in the system's."""
    return [path.name for path in (place / "tmp").iterdir() if path.name.startswith("trlfit")]


def gone(pids: list[int]) -> bool:
    """Whether none of them runs any more, waited for by whoever took them over."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not any(measure_ranks.runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.launch
def test_two_ranks_through_the_command_line(place: Path) -> None:
    env, words = environment(place), [*WORDS, *pinned(PINS), "--python", warm_python()]
    one = [*WORDS, *pinned({**PINS, "gpus": "1", "sharding": "none"}), "--python", warm_python()]

    def planned(more: list[str]) -> dict[str, Any]:
        said = child(["plan", *more, "--json"], cwd=place, env=env)
        best: dict[str, Any] = json.loads(said.out)["best"]
        return best

    before, alone = planned(words), planned(one)
    said = child(["probe", *words, "--whole", "--json"], cwd=place, env=env)
    assert said.code == 0, said.err
    assert "three steps of the plan, 2 ranks of ddp, on the host: takes about" in said.err
    assert "2 ranks, 4 layers, 128 tokens" in said.err
    whole = json.loads(said.out)["whole"]
    assert whole["choice"] == before["choice"]
    (cell,) = whole["cells"]
    assert len(cell["ranks"]) == 2
    highest = max(cell["peaks"].values())
    assert before["memory"]["allocated_bytes"] == pytest.approx(highest, rel=0.05)
    after = planned(words)
    assert (after["memory"]["evidence"], after["time"]["evidence"]) == ("measured", "measured")
    assert after["memory"]["allocated_bytes"] == pytest.approx(highest, abs=64)
    assert after["time"]["step_s"] == pytest.approx(cell["seconds"]["step_s"], abs=1e-6)
    # One process holds no buckets and talks to nobody: nothing of what two saw is its own.
    again = planned(one)
    assert (again["memory"]["phases"], again["time"]) == (alone["memory"]["phases"], alone["time"])
    assert again["memory"]["evidence"] == "formula"
    shown = child(["probe", "--show"], cwd=place, env=env)
    assert "4 layers, 128 tokens, 2 ranks of ddp" in shown.out
    assert left(place) == []


@pytest.mark.launch
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_no_rank_outlives_whoever_asked(sent: signal.Signals, place: Path) -> None:
    # The kernel ends ranks whose launcher dies, where that is their parent and no process forked beforehand.
    python = sys.executable if sent == signal.SIGKILL else warm_python()
    asker = subprocess.Popen(
        [sys.executable, "-m", "tui", "probe", *WORDS, *pinned(PINS), "--whole", "--python", python],
        cwd=place, env=environment(place), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert asker.stderr is not None
    try:
        # By then both have met; a rank that still imports torch is ended by the same means.
        for line in asker.stderr:
            assert b"error" not in line, line
            if b"1 of 4: 2 ranks" in line:
                break
        pids = [int(path.read_text()) for path in (place / "tmp").glob("trlfit-ranks-*/rank-*.pid")]
        assert len(pids) == 2 and all(measure_ranks.runs(pid) for pid in pids)
    finally:
        asker.send_signal(sent)
        asker.wait()
        asker.stderr.close()
    assert asker.returncode == (-signal.SIGKILL if sent == signal.SIGKILL else 130)
    assert gone(pids)
    end = time.monotonic() + 10
    while left(place) and time.monotonic() < end:
        time.sleep(0.05)
    assert left(place) == []


@pytest.mark.launch
def test_out_of_memory_in_one_rank_is_an_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(place / "tmp"))
    (place / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 100_000}))
    job = Job(model=str(place), seq_len=128, global_batch=2, machine="cpu", pins=PINS)
    inputs = plan_inputs(job, {}, None, 1, trace=False)
    rooms = RankRooms(device="cpu", cards=(), memory_bytes=(2 * GIB, 60 * 2**20), used_bytes=(0, 0), environment={})
    request = ranks_request(inputs, DDP, rooms, [{"layers": 4, "sequence": 128}], limit_s=120)
    answer = ask_ranks(request, python=warm_python(), limit_s=120, environment=warm_variables())
    (cell,) = answer["cells"]
    assert (cell["layers"], cell["sequence"], cell["rank"]) == (4, 128, 1)
    assert cell["out_of_memory"].startswith("rank 1 of 2: ") and "allocate" in cell["out_of_memory"]
    assert "torch" in answer["versions"]
    assert left(place) == []


@pytest.mark.launch
def test_two_ranks_of_fsdp2_hold_what_was_predicted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of two H100, run here by the shim that `test_sharded_runs.py` trains with."""
    monkeypatch.setattr("tempfile.tempdir", str(place / "tmp"))
    pins = {"gpus": "2", "sharding": "fsdp", "recompute": "none", "loss_path": "fused"}
    job = Job(model=str(place), seq_len=128, global_batch=2, machine="2xH100-80GB", pins=pins)
    inputs = plan_inputs(job, {}, None, 1, trace=False)
    outcome = make_plan(inputs)
    assert outcome.best is not None
    choice, memory = outcome.best.choice, outcome.problem_of(outcome.best).judge.memory
    rooms = RankRooms(device="cpu", cards=(), memory_bytes=(4 * GIB, 4 * GIB), used_bytes=(0, 0), environment={})
    request = ranks_request(inputs, choice, rooms, [{"layers": 4, "sequence": 128}], limit_s=200)
    shim = {"PYTHONPATH": str(CPU_RANKS), "TRLFIT_TEST_CPU_RANKS": str(place / "seen.json")}
    answer = ask_ranks(request, python=warm_python(), limit_s=200, environment={**warm_variables(), **shim})
    (cell,) = answer["cells"]
    said = {phase.name: phase.bytes for phase in memory.frame(choice).phases(1, 1)}
    assert max(cell["peaks"].values()) == pytest.approx(max(said[phase] for phase in PHASES), rel=0.02)
    assert cell["parameters"] == memory.blocks("full").num_parameters
    # What a rank holds at rest is its share of the weights and of both moments, and the gradients of the step.
    assert cell["peaks"]["step"] == pytest.approx(4 * 4 * cell["parameters"] / 2, rel=0.02)
    assert [rank["peaks"] for rank in cell["ranks"]] == [cell["peaks"]] * 2
    assert left(place) == []
