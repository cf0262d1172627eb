"""`trlfit plan` and `trlfit ledger` from outside: the document and its schema, determinism, pins, origins, refusals."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tty
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launcher.cli import main
from planner.choice import Choice
from tests.launcher.command_line import H100, MODEL, TINY_CONFIG, child, command_environment, here, write_files

STACK = ("--stack", "torch=2.13.0,transformers=5.24.0,trl=1.16.0,accelerate=1.15.0,peft=0.21.2")
"""Stated, so that plans do not depend on what is installed beside the tests."""
SMALL = "Qwen/Qwen3-0.6B"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return command_environment(tmp_path / "home")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> Path:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    """Of what `trlfit schema plan` prints."""
    done = subprocess.run([sys.executable, "-m", "tui", "schema", "plan"], capture_output=True, check=True)
    schema = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0, command: str = "plan") -> dict[str, Any]:
    """The document of a plan, or of a ledger."""
    said = here(capsys, (command, *words, *STACK, "--json"))
    assert (said.code, said.err) == (code, "")
    document: dict[str, Any] = json.loads(said.out)
    return document


def pins(choice: dict[str, Any]) -> list[str]:
    """Flags that pin every knob of a choice."""
    knobs = {knob: value for knob, value in choice.items() if knob not in ("method", "packing")}
    return [f"--pin={knob}={','.join(value) if isinstance(value, list) else value}" for knob, value in knobs.items()]


# The document


JOBS: dict[str, tuple[tuple[str, ...], int]] = {
    "full": ((MODEL, *H100), 0),
    "lora": ((MODEL, "--machine", "1xRTX4090", "--method", "lora", "--seq-len", "1024"), 0),
    "qlora": ((MODEL, "--machine", "1xRTX4090", "--method", "qlora", "--seq-len", "2048"), 0),
    "lora-targets": ((MODEL, *H100, "--method", "lora", "--lora-targets", "q_proj,v_proj", "--lora-r", "64"), 0),
    "dpo": ((MODEL, *H100, "--trainer", "dpo"), 0),
    "dpo-lora": ((MODEL, *H100, "--trainer", "dpo", "--method", "lora"), 0),
    "kto": ((MODEL, *H100, "--trainer", "kto", "--global-batch", "16"), 0),
    "reward": ((MODEL, *H100, "--trainer", "reward"), 0),
    "grpo": ((MODEL, *H100, "--trainer", "grpo", "--global-batch", "64"), 0),
    "rloo": ((MODEL, *H100, "--trainer", "rloo", "--global-batch", "16"), 0),
    "packing": ((MODEL, *H100, "--packing", "--trl", "learning_rate=2e-5"), 0),
    "cpu": (("tiny", "--no-trace", "--machine", "cpu", "--seq-len", "64"), 0),
    "two-nodes": (("Qwen/Qwen3-32B", *H100, "--nodes", "2", "--global-batch", "16"), 0),
    "experts": (("Qwen/Qwen3-30B-A3B", *H100, "--nodes", "2", "--global-batch", "32", "--method", "lora"), 0),
    "long": ((MODEL, *H100, "--seq-len", "128k"), 0),
    "nothing-fits": ((MODEL, "--machine", "1xT4"), 3),
    "nothing-fits-anyhow": (("Qwen/Qwen3-32B", "--machine", "1xT4", "--seq-len", "64k"), 3),
    "longest": ((SMALL, "--machine", "1xRTX4090", "--goal", "longest"), 0),
    "fewest-gpus": ((MODEL, *H100, "--goal", "fewest_gpus", "--method", "lora"), 0),
    "headroom": ((MODEL, *H100, "--goal", "headroom"), 0),
    "numerics": ((MODEL, "--machine", "2xH100-80GB", "--allow", "numerics"), 0),
    "one-candidate": ((MODEL, *H100, "--top", "1"), 0),
    "every-candidate": ((MODEL, *H100, "--top", "1000"), 0),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_document_follows_its_schema(
    name: str, place: Path, capsys: pytest.CaptureFixture[str], validator: jsonschema.Draft202012Validator
) -> None:
    words, code = JOBS[name]
    write_files(place, {"tiny/config.json": json.dumps(TINY_CONFIG)})
    document = planned(capsys, *words, code=code)
    validator.validate(document)
    assert_consistent(document, code)


@pytest.mark.parametrize("release", ["1.12.0", "1.3.0", "0.20.0"])
def test_older_stacks_follow_the_schema_too(
    release: str, capsys: pytest.CaptureFixture[str], validator: jsonschema.Draft202012Validator
) -> None:
    said = here(capsys, ("plan", MODEL, *H100, "--stack", f"trl={release}", "--json"))
    assert said.code == 0
    document = json.loads(said.out)
    validator.validate(document)
    assert_consistent(document, 0)
    paths = {"1.12.0": {"chunked_fp32", "full_logits"}, "1.3.0": {"full_logits"}, "0.20.0": {"full_logits"}}[release]
    assert {candidate["choice"]["loss_path"] for candidate in document["candidates"]} <= paths
    assert document["stack"]["origin"]["trl"] == "stated"


def assert_consistent(document: dict[str, Any], code: int) -> None:
    """What the schema cannot say."""
    best, candidates = document["best"], document["candidates"]
    assert (best is not None) == (code == 0)
    fits = [candidate["fits"] for candidate in candidates]
    assert fits == sorted(fits, reverse=True), "those that fit come first"
    assert all(not candidate["fits"] for candidate in document["near_misses"])
    if best is None:
        assert document["near_misses"]
        assert all(change["candidate"]["fits"] for change in document["changes"])
    else:
        assert best == candidates[0]
        assert all(fits), "misses have a list of their own"
    rank = {"nothing": 0, "numerics": 1, "method": 2}
    groups = [rank[candidate["alters"]] for candidate in candidates]
    assert groups == sorted(groups), "a group never outranks the one before it"
    for candidate in [*candidates, *document["near_misses"], *(change["candidate"] for change in document["changes"])]:
        memory, choice = candidate["memory"], candidate["choice"]
        assert memory["low_bytes"] <= memory["allocated_bytes"] <= memory["high_bytes"]
        assert memory["allocated_bytes"] <= memory["reserved_bytes"] <= memory["device_bytes"]
        peak = max(memory["phases"], key=lambda phase: phase["bytes"])
        assert peak["name"] == memory["peak_phase"]
        # cuBLAS' workspaces, 2 x 32.06 MiB, are allocated, and no part of a phase.
        assert 0 <= memory["device_bytes"] - peak["bytes"] <= 65 << 20
        for phase in memory["phases"]:
            assert sum(phase["parts"].values()) == phase["bytes"], phase["name"]
        sizes = [choice[knob] for knob in ("cp", "sp", "tp", "dp_shard", "dp_replicate")]
        product = 1
        for size in sizes:
            product *= size
        assert product == candidate["num_gpus"]
        assert Choice.from_json(choice).to_json() == choice


def test_nothing_fits_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, MODEL, "--machine", "1xT4", code=3)
    assert document["best"] is None
    assert {change["lever"] for change in document["changes"]} & {"qlora", "more GPUs", "fewer tokens"}
    text = here(capsys, ("plan", MODEL, "--machine", "1xT4"))
    assert text.code == 3
    assert "nothing fits" in text.out


def test_a_change_can_be_asked_for_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags beside a change are flags of this command, and make that change's candidate the best."""
    words = ("Qwen/Qwen3-14B", "--machine", "1xRTX4090", "--seq-len", "2048")
    document = planned(capsys, *words, code=3)
    assert document["changes"]
    for change in document["changes"]:
        flags = change["flags"].split()
        again = planned(capsys, *without(words, flags), *flags)
        assert again["best"]["choice"] == change["candidate"]["choice"], change["flags"]


def without(words: tuple[str, ...], flags: list[str]) -> tuple[str, ...]:
    """``words`` less the flags that are given anew."""
    kept = list(words)
    for flag in flags:
        if flag in kept and flag != "--stack":
            at = kept.index(flag)
            del kept[at : at + 2]
    return tuple(kept)


def test_the_longest_sequence_becomes_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, SMALL, "--machine", "1xRTX4090", "--goal", "longest")
    assert document["job"]["seq_len"] == document["longest"] > 4096
    stairs = [stair["tokens"] for stair in document["staircase"]]
    assert stairs == sorted(stairs)
    assert stairs[-1] == document["longest"]
    fixed = planned(capsys, SMALL, "--machine", "1xRTX4090", "--seq-len", str(document["longest"]))
    assert fixed["best"]["choice"] == document["best"]["choice"]


# Same inputs, same bytes


def test_the_same_bytes_each_time_and_everywhere(tmp_path: Path, place: Path, env: dict[str, str]) -> None:
    words = ["plan", MODEL, *H100, "--json"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = child(words, cwd=place, env={**env, "PYTHONHASHSEED": "1"})
    assert first.code == 0
    for cwd, change in (
        (place, {"PYTHONHASHSEED": "2"}),
        (elsewhere, {"PYTHONHASHSEED": "3"}),
        (elsewhere, {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C", "COLUMNS": "20"}),
    ):
        assert child(words, cwd=cwd, env={**env, **change}).out == first.out, change
    assert str(place) not in first.out


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["table", "json"])
def test_the_same_bytes_on_a_terminal(more: tuple[str, ...], place: Path, env: dict[str, str]) -> None:
    words = ["plan", MODEL, *H100, *more]
    assert on_terminal(words, place, env) == child(words, cwd=place, env=env).out.encode()


def on_terminal(words: list[str], cwd: Path, env: dict[str, str]) -> bytes:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)  # or the terminal itself would turn line ends into \r\n
    process = subprocess.Popen([sys.executable, "-m", "tui", *words], cwd=cwd, env=env, stdin=theirs, stdout=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        said += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return said


# Flags, file, defaults


def test_flags_beat_the_file_and_the_file_beats_the_defaults(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"model: {MODEL}\nseq_len: 2048\nglobal_batch: 16\nlora: {{r: 8}}\npins: {{recompute: full, cp: 1}}\n"
    write_files(place, {"my.yaml": text})
    flags = ("--job", "my.yaml", *H100, "--seq-len", "1024", "--pin", "recompute=none", "--trl", "max_steps=5")
    job = planned(capsys, *flags)["job"]
    assert (job["model"], job["seq_len"], job["global_batch"], job["reserve"]) == (MODEL, 1024, 16, 0.05)
    assert job["lora"] == {"r": 8, "alpha": None, "dropout": 0.0, "target_modules": "all-linear"}
    assert job["pins"] == {"recompute": "none", "cp": 1}
    assert job["trl"] == {"max_steps": 5}
    origin = job["origin"]
    assert origin["model"] == origin["global_batch"] == origin["lora.r"] == origin["pins.cp"] == "my.yaml"
    assert origin["seq_len"] == "--seq-len"
    assert origin["machine"] == "--machine"
    assert origin["pins.recompute"] == "--pin"
    assert origin["trl.max_steps"] == "--trl"
    assert origin["reserve"] == origin["lora.alpha"] == origin["trainer"] == "default"


def test_a_batch_of_pinned_parts_is_their_product(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ("--pin", "micro_batch=2", "--pin", "grad_accum=3")
    every_card = planned(capsys, MODEL, *H100, *parts)["job"]
    assert every_card["global_batch"] == 2 * 3 * 8
    assert every_card["origin"]["global_batch"] == "pins micro_batch, grad_accum"
    assert planned(capsys, SMALL, *H100, *parts, "--pin", "gpus=4")["job"]["global_batch"] == 2 * 3 * 4
    assert planned(capsys, SMALL, *H100, *parts, "--pin", "sharding=none")["job"]["global_batch"] == 2 * 3
    stated = planned(capsys, MODEL, *H100, *parts, "--global-batch", "48")["job"]
    assert (stated["global_batch"], stated["origin"]["global_batch"]) == (48, "--global-batch")


@pytest.mark.parametrize("name", ["full", "qlora", "grpo", "packing", "two-nodes", "longest", "lora-targets"])
def test_the_echoed_job_plans_the_same(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, _ = JOBS[name]
    first = planned(capsys, *words)
    job = {field: value for field, value in first["job"].items() if field != "origin"}
    write_files(place, {"job.yaml": yaml.safe_dump(job)})
    said = here(capsys, ("plan", "--job", "job.yaml", "--json"))
    assert (said.code, said.err) == (0, "")
    again = json.loads(said.out)
    assert set(again["job"].pop("origin").values()) == {"job.yaml"}
    del first["job"]["origin"]
    assert again == first


# Pins


def test_a_complete_set_of_pins_is_the_first_candidate_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = planned(capsys, MODEL, *H100)["candidates"][3]
    document = planned(capsys, MODEL, *H100, *pins(wanted["choice"]))
    assert document["candidates"][0]["choice"] == wanted["choice"]
    assert document["candidates"][0]["memory"] == wanted["memory"]
    assert len(document["candidates"]) == 1
    assert document["best"] == document["candidates"][0]


def test_a_complete_set_of_pins_is_the_first_candidate_where_it_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = planned(capsys, MODEL, *H100)["near_misses"][0]
    document = planned(capsys, MODEL, *H100, *pins(wanted["choice"]), code=3)
    assert document["best"] is None
    assert document["candidates"][0]["choice"] == wanted["choice"]
    assert not document["candidates"][0]["fits"]
    ledger = planned(capsys, MODEL, *H100, *pins(wanted["choice"]), code=3, command="ledger")
    assert ledger["choice"] == wanted["choice"]
    assert ledger["memory"] == wanted["memory"]
    assert ledger["refusals"] == []


# What the libraries refuse


REFUSED = {
    "method": "full",
    "loss_path": "fused",
    "recompute": "selective",
    "offload": ["activations"],
    "sharding": "fsdp",
    "cp": 1,
    "sp": 1,
    "tp": 1,
    "dp_shard": 8,
    "dp_replicate": 1,
    "micro_batch": 1,
    "grad_accum": 1,
    "optimizer": "adamw_torch_fused",
    "weights": "fp32",
    "mixed_precision": "bf16",
    "attention": "sdpa",
    "precision": "bf16",
    "packing": False,
}


def test_a_plan_refuses_what_the_libraries_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ("plan", MODEL, *H100, *pins(REFUSED), *STACK))
    assert (said.code, said.out) == (2, "")
    reason = "offload activations moves the checkpoints of recompute full, and recompute is selective"
    assert said.err == f"trlfit: error: no run is possible: {reason}\n"


def test_the_ledger_explains_it_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, MODEL, *H100, *pins(REFUSED), command="ledger")
    assert document["choice"] == REFUSED
    assert document["fits"]
    assert [refusal["rule"] for refusal in document["refusals"]] == ["offload-activations-full"]
    (refusal,) = document["refusals"]
    assert "recompute is selective" in refusal["reason"]
    assert set(refusal) == {"rule", "reason", "why", "source"}
    assert all(refusal.values())
    weights = {group["group"]: group["bytes"]["weights"] for group in document["groups"]}
    assert weights["embedding"] == 151_936 * 4096 * 4 // 8, "fp32, over eight cards"
    text = here(capsys, ("ledger", MODEL, *H100, *pins(REFUSED), *STACK))
    assert f"the libraries refuse this: {refusal['reason']}  [{refusal['source']}]" in text.out.splitlines()


def test_a_published_run_of_an_old_stack_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP 1 is estimated only, and a release with FSDP 2 refuses it."""
    choice = {**REFUSED, "loss_path": "full_logits", "recompute": "full", "offload": [], "sharding": "fsdp1"}
    said = here(capsys, ("ledger", MODEL, *H100, *pins(choice), "--stack", "trl=0.20.0", "--json"))
    document = json.loads(said.out)
    assert document["choice"] == choice
    assert said.code == (0 if document["fits"] else 3)
    assert document["memory"]["allocated_bytes"] > 0
    assert any("fsdp1 is only estimated" in refusal["reason"] for refusal in document["refusals"])


def test_open_knobs_of_a_refused_choice_break_no_further_rule(capsys: pytest.CaptureFixture[str]) -> None:
    words = (MODEL, *H100, "--pin", "loss_path=chunked_fp32")
    document = planned(capsys, *words, command="ledger")
    (refusal,) = document["refusals"]
    assert "chunked_fp32" in refusal["reason"]
    assert document["fits"], "of what breaks one rule alone, the best is shown"


def test_the_ledger_of_a_legal_choice_has_no_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, MODEL, *H100, command="ledger")
    best = planned(capsys, MODEL, *H100)["best"]
    assert document["refusals"] == []
    assert document["choice"] == best["choice"]
    assert document["memory"] == best["memory"]
    assert document["time"] == best["time"]
    assert document["warnings"] == best["warnings"]


# Hosts that nobody knows


def test_offload_to_an_unknown_host_is_warned_about(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (MODEL, "--pin", "offload=activations", "--pin", "recompute=full")
    document = planned(capsys, *words, *H100)
    for candidate in document["candidates"]:
        host = candidate["memory"]["host_bytes"]
        assert host["pinned"] > 0
        (warning,) = [text for text in candidate["warnings"] if "host" in text]
        assert f"needs {host['peak'] / 2**30:,.1f} GiB of memory per node" in warning
        assert f"for offload ({host['pinned'] / 2**30:,.1f} pinned)" in warning
    card = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "card_id": "H100-80GB", "total_bytes": 80 << 30}
    box = {
        "schema": "trlfit.machine/1",
        "origin": "file",
        "spec": "box",
        "cards": [{**card, "index": index} for index in range(8)],
        "host": {"total_bytes": 1 << 40, "available_bytes": 1 << 40, "cores": 64},
    }
    write_files(place, {"box.json": json.dumps(box)})
    known = planned(capsys, *words, "--machine", "box.json")
    assert known["candidates"]
    assert not any("named machine" in text for entry in known["candidates"] for text in entry["warnings"])


def test_without_offload_the_host_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, MODEL, *H100, "--pin", "offload=")
    assert all(candidate["choice"]["offload"] == [] for candidate in document["candidates"])
    assert not any("named machine" in text for candidate in document["candidates"] for text in candidate["warnings"])


def test_help_shows_the_same_flags_for_plan_and_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    """What a plan takes, its ledger takes."""
    flags: list[set[str]] = []
    for command in ("plan", "ledger", "write", "launch"):
        capsys.readouterr()
        assert main([command, "--help"]) == 0
        flags.append(
            {word.strip("[],") for word in capsys.readouterr().out.split() if word.strip("[]").startswith("--")}
        )
    shared = flags[0] - {"--top", "--explain", "--compare", "--against", "--cards", "--count", "--price"}
    assert all(shared <= other for other in flags[1:])
