"""`trlfit plan --against plan.json`: exit code 0 while the choice holds, 3 when it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.command_line import H100, MODEL, assert_refused, here

WIDTH = 100


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    path.write_text(here(capsys, ["plan", MODEL, *H100, "--json"]).out, encoding="utf-8")
    return path


def test_its_own_job_is_held_against_it(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ["plan", "--against", plan])
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("job, machine and stack are those of that plan\n")
    assert said.out.endswith("the old choice still holds, and is still the best\n")
    document = json.loads(here(capsys, ["plan", "--against", plan, "--json"]).out)
    assert document["schema"] == "trlfit.against/1"
    assert document["job"]["model"] == MODEL


def test_flags_say_what_is_different(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--against", plan, "--machine", "8xRTX3090", "--seq-len", "8192", "--stack", "trl=1.12.0"]
    said = here(capsys, words)
    assert said.code == 3
    text = " ".join(said.out.split())
    for part in (
        "job seq_len: 4096 -> 8192",
        "machine cards: 8 x H100-80GB -> 8 x RTX3090",
        "stack trl: 1.16.0 -> 1.12.0",
        "note: this TRL computes the loss as chunked_fp32, not as fused",
        "the old choice does not fit any more",
    ):
        assert part in text
    assert max(map(len, said.out.splitlines())) <= WIDTH
    assert json.loads(here(capsys, [*words, "--json"]).out)["holds"] is False


def test_another_job_may_be_given(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ["plan", MODEL, *H100, "--global-batch", "16", "--against", plan])
    assert said.code == 0
    assert "job      global_batch: 8 -> 16" in said.out


def test_of_a_refused_choice_nothing_is_predicted(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ["plan", "--against", plan, "--method", "lora"])
    assert said.code == 3
    assert "predicted for its choice" not in said.out
    text = " ".join(said.out.split())
    assert "the old choice cannot run: it is full training, and the job asks for LoRA; what does: LoRA" in text


def test_a_plan_of_an_earlier_version(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields that it does not have are not missed, and those of later ones not looked at."""
    document: dict[str, Any] = json.loads(plan.read_text(encoding="utf-8"))
    for name in ("candidates", "near_misses", "rejected", "changes", "notes", "architecture"):
        del document[name]
    document["job"]["later"] = 1
    document["best"]["memory"] = {
        name: size for name, size in document["best"]["memory"].items() if name in ("device_bytes", "allocated_bytes")
    }
    plan.write_text(json.dumps(document), encoding="utf-8")
    assert here(capsys, ["plan", "--against", plan]).code == 0


BROKEN: dict[str, tuple[str, str]] = {
    "no file": ("", "does not exist"),
    "text": ("hello", "is not valid JSON"),
    "a list": ("[]", "is no plan"),
    "another document": ('{"schema": "trlfit.ledger/1"}', "is no plan"),
    "nothing fits": ('{"schema": "trlfit.plan/1", "best": null}', "chose nothing"),
    "half": ('{"schema": "trlfit.plan/1", "best": {}}', "job: field required"),
    "too many digits": ('{"schema": "trlfit.plan/1", "best": ' + "1" * 5000 + "}", "is not valid JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, part = BROKEN[name]
    path = tmp_path / "old.json"
    if text:
        path.write_text(text, encoding="utf-8")
    assert_refused(here(capsys, ["plan", "--against", path]), 2, part)


WRONG: tuple[tuple[str, Any], ...] = (
    ("job", 1),
    ("job.global_batch", "x"),
    ("machine", 3),
    ("machine.cards", [1]),
    ("machine.cards.0.total_bytes", "x"),
    ("stack", None),
    ("stack.versions", []),
    ("best.choice", []),
    ("best.choice.knob", 1),
    ("best.choice.dp_shard", 0),
    ("best.choice.dp_shard", 10**30),
    ("best.choice.micro_batch", "x"),
    ("best.choice.micro_batch", 10**300),
    ("best.choice.optimizer", "no such"),
    ("best.choice.offload", [["activations"]]),
    ("best.memory.device_bytes", "x"),
    ("best.time.step_s", 0),
)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_that_no_plan_has(field: str, value: Any, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document: Any = json.loads(plan.read_text(encoding="utf-8"))
    *path, last = field.split(".")
    inner = document
    for part in path:
        inner = inner[int(part) if part.isdigit() else part]
    inner[last] = value
    plan.write_text(json.dumps(document), encoding="utf-8")
    assert_refused(here(capsys, ["plan", "--against", plan]), 2, f"{field.split('.')[-1]}")
