"""Tracing through the command line: a plan of an unknown model traces once, `probe` on request, `--no-trace` never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.narration import StderrNarrator
from tests.launcher.command_line import Said, child, command_environment

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def plan(folder: Path, *more: str) -> Said:
    words = ["plan", "model", "--machine", "1xRTX4090", "--seq-len", "1024", "--json", *more]
    return child(words, cwd=folder, env=command_environment(folder, OMP_NUM_THREADS="1"))


def evidence(said: Said) -> str:
    return str(json.loads(said.out)["best"]["memory"]["evidence"])


@pytest.mark.stack
def test_an_unknown_model_is_traced_once_and_planned_from_what_was_kept(folder: Path) -> None:
    without = plan(folder, "--no-trace")
    assert evidence(without) == "formula"
    assert without.err == ""
    first = plan(folder)
    assert (first.code, evidence(first)) == (0, "traced")
    assert "tracing the model's layers on fake tensors, once; --no-trace plans with closed forms instead" in first.err
    assert "traced in " in first.err
    again = plan(folder)
    assert (again.out, again.err) == (first.out, "")
    # What was kept is evidence like any other: a plan that may not trace takes it.
    assert plan(folder, "--no-trace").out == first.out
    # The kept set is also what a ledger of the same job reads.
    words = ["ledger", "model", "--machine", "1xRTX4090", "--seq-len", "1024", "--json", "--no-trace"]
    ledger = json.loads(child(words, cwd=folder, env=command_environment(folder)).out)
    assert ledger["memory"]["evidence"] == "traced"
    # A version that is only stated cannot be traced: what was kept serves, and the plan says so.
    stated = plan(folder, "--stack", "transformers=5.17.0")
    assert evidence(stated) == "traced"
    assert "were traced with transformers" in json.loads(stated.out)["notes"][0]
    assert stated.err == ""


@pytest.mark.stack
def test_the_card_that_a_plan_on_a_cpu_offers_waits_for_no_trace(folder: Path) -> None:
    words = ["plan", "model", "--machine", "cpu", "--seq-len", "1024", "--json"]
    said = child(words, cwd=folder, env=command_environment(folder, OMP_NUM_THREADS="1"))
    assert (evidence(said), said.err.count("traced in ")) == ("traced", 1)
    assert any(change["lever"] == "another card" for change in json.loads(said.out)["changes"])


@pytest.mark.stack
def test_probe_traces_a_bundled_model_for_options_that_are_not_bundled(tmp_path: Path) -> None:
    job = ["Qwen/Qwen3-0.6B", "--method", "lora", "--lora-targets", "q_proj,v_proj", "--machine", "1xH100-80GB"]
    env = command_environment(tmp_path, OMP_NUM_THREADS="1")
    before = child(["plan", *job, "--json"], cwd=tmp_path, env=env)
    assert (evidence(before), before.err) == ("formula", "")
    probed = child(["probe", *job], cwd=tmp_path, env=env)
    assert probed.code == 0, probed.err
    assert "bf16/lora-fp32:q_proj,v_proj/sdpa, one layer at 4,096 tokens" in probed.out
    after = child(["plan", *job, "--json"], cwd=tmp_path, env=env)
    assert evidence(after) == "traced"


def test_probe_says_what_it_cannot_do(folder: Path) -> None:
    env = command_environment(folder)
    said = child(["probe", "model", "--no-trace"], cwd=folder, env=env)
    assert (said.code, said.out) == (2, "")
    assert "--no-trace: tracing is what probe does" in said.err
    bare = folder / "python"
    bare.write_text('#!/bin/sh\nexec python3 -S "$@"\n')
    bare.chmod(0o755)
    said = child(["probe", "model", "--python", str(bare), "--machine", "1xH100-80GB"], cwd=folder, env=env)
    assert (said.code, said.out) == (4, "")
    assert "torch" in said.err.splitlines()[-1]


def test_an_upgrade_elsewhere_is_planned_with_closed_forms_where_nothing_can_trace(folder: Path) -> None:
    bare = folder / "python"
    bare.write_text('#!/bin/sh\nexec python3 -S "$@"\n')
    bare.chmod(0o755)
    said = plan(folder, "--python", str(bare))
    assert (said.code, evidence(said), said.err) == (0, "formula", "")


def test_a_log_hears_the_start_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    narrator = StderrNarrator("; there is another way")
    for done in range(4):
        narrator.traced(done, 3, 2.0 * done)
    narrator.warn("the disk is full")
    assert capsys.readouterr().err.splitlines() == [
        "trlfit: tracing the model's layers on fake tensors, once; there is another way",
        "trlfit: traced in 6 s",
        "trlfit: the disk is full",
    ]


def test_a_terminal_sees_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.narration._is_terminal", lambda: True)
    narrator = StderrNarrator()
    narrator.traced(0, 4, 0.0)
    narrator.traced(1, 4, 3.2)
    narrator.traced(4, 4, 9.0)
    steps = capsys.readouterr().err.split("\r\x1b[K")
    assert "[--------------------] 0 of 4" in steps[1]
    assert "[#####---------------] 1 of 4, 3 s" in steps[2]
    assert steps[3] == ""
