"""The session is a job file with edits over it, and every state of it is a command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import build_parser
from launcher.errors import UsageError
from launcher.planning import job_from_args
from planner.job import Job
from tui.fields import FIELDS, Field, fields_for
from tui.session import HERE, Session, nested


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_job_file_an_example_is_planned(folder: Path) -> None:
    assert (Session.here().file, Session.here().job()[0].model) == (None, "Qwen/Qwen3-8B")
    (folder / "job.yaml").write_text("model: google/gemma-3-1b-pt\nmethod: lora\n")
    found = Session.here()
    assert (found.edits, found.job()[0].model) == ({}, "google/gemma-3-1b-pt")


EDITS: list[dict[str, Any]] = [
    {"model": "Qwen/Qwen3-4B", "method": "lora", "lora.r": 64},
    {"model": "Qwen/Qwen3-4B", "seq_len": 131_072, "data.packing": True, "data.dataset": "some file.jsonl"},
    {"model": "Qwen/Qwen3-4B", "data.packing": False, "goal": "headroom", "reserve": 0.1},
    {"model": "Qwen/Qwen3-4B", "allow": ["numerics", "method"], "machine": "8xH100-80GB", "nodes": 2},
    {"model": "Qwen/Qwen3-4B", "trl.learning_rate": 2e-5, "trl.num_train_epochs": 2.0, "pins.recompute": "full"},
    {"model": "Qwen/Qwen3-4B", "pins.offload": "activations,optimizer", "stack.trl": "1.12.0", "trl.tf32": True},
    {"model": "Qwen/Qwen3-4B", "method": "qlora", "quantization": "int8", "trainer": "dpo", "global_batch": 32},
]


@pytest.mark.parametrize("edits", EDITS)
def test_the_command_means_the_same_job(edits: dict[str, Any]) -> None:
    session = Session(edits=edits)
    words = shlex.split(session.command())
    assert words[0] == "trlfit"
    from_words, _ = job_from_args(build_parser("plan").parse_args(words[1:]))
    assert from_words == session.job()[0]


def test_the_command_names_the_job_file(folder: Path) -> None:
    (folder / "my job.yaml").write_text("model: Qwen/Qwen3-8B\nseq_len: 2048\n")
    session = Session.here(Path("my job.yaml"))
    session.set("seq_len", 4096)
    assert session.command() == "trlfit plan --job 'my job.yaml' --seq-len 4096"
    job, origins = session.job()
    assert (job.seq_len, origins["seq_len"], origins["model"]) == (4096, HERE, "my job.yaml")


def test_edits_are_undone_one_by_one() -> None:
    session = Session(edits={"model": "Qwen/Qwen3-8B"})
    session.set("seq_len", 2048)
    session.set("seq_len", 8192)
    session.reset("seq_len")
    assert session.job()[0].seq_len == 4096
    seen = []
    while session.undo():
        seen.append(session.job()[0].seq_len)
    assert seen == [8192, 2048, 4096]


def test_a_wrong_value_is_a_line_and_changes_nothing() -> None:
    session = Session(edits={"model": "Qwen/Qwen3-8B"})
    problem = session.check("seq_len", 3)
    assert problem is not None and "at least 8" in problem
    assert session.check("seq_len", 512) is None
    assert session.job()[0].seq_len == 4096


def test_saving_makes_a_file_that_plans_the_same(folder: Path) -> None:
    session = Session(edits={"model": "Qwen/Qwen3-8B", "method": "lora", "pins.cp": 2, "data.dataset": "rows.jsonl"})
    before, _ = session.job()
    session.save(folder / "saved.yaml")
    assert (session.edits, session.file) == ({}, folder / "saved.yaml")
    assert session.job()[0] == before == Session.here(folder / "saved.yaml").job()[0]
    assert [path.name for path in folder.iterdir()] == ["saved.yaml"]


def test_nothing_is_written_of_a_wrong_job(folder: Path) -> None:
    session = Session(edits={"model": "Qwen/Qwen3-8B", "seq_len": 1})
    with pytest.raises(UsageError):
        session.save(folder / "saved.yaml")
    assert list(folder.iterdir()) == []


def test_nested() -> None:
    edits = {"data.packing": True, "data.split": "a", "pins.offload": "", "trl.a.b": 1, "seq_len": 8}
    expected = {"data": {"packing": True, "split": "a"}, "pins": {"offload": ""}, "trl": {"a.b": 1}, "seq_len": 8}
    assert nested(edits) == expected


# The form


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.label)
def test_what_a_field_shows_can_be_typed_back(field: Field) -> None:
    job = Job.model_validate(
        {
            "model": "Qwen/Qwen3-8B", "method": "qlora", "data": {"dataset": "rows.jsonl"}, "global_batch": 1024,
            "trl": {"num_train_epochs": 2.5, "learning_rate": 1e-4, "max_steps": 30},
            "allow": ["numerics", "method"], "seq_len": 131072, "pins": {"recompute": "full", "gpus": 8},
        }
    )  # fmt: skip
    text = field.text(job)
    assert text
    changed = Session(edits={"model": "Qwen/Qwen3-8B", field.path: field.value(text)}).job()[0]
    assert field.text(changed) == text
    if field.choices:
        steps = [text]
        for _ in field.choices:
            steps.append(field.next(steps[-1]))
        assert steps[-1] == text and set(steps) == set(field.choices)


@pytest.mark.parametrize("field", [field for field in FIELDS if not field.choices], ids=lambda field: field.label)
@pytest.mark.parametrize(
    "text", ["-1", "0", "9" * 400, "nan", "1e999", "\u0663", "\x1b[31m\0'\"", "/dev/zero", "x" * 9999]
)
def test_whatever_is_typed_is_a_job_or_a_sentence(field: Field, text: str) -> None:
    session = Session(edits={"model": "Qwen/Qwen3-8B", "method": "lora"})
    try:
        value = field.value(text)
    except ValueError as error:
        assert str(error)
        return
    if session.check(field.path, value) is None:
        session.set(field.path, value)
        job = session.job()[0]
        assert job.global_batch > 0 and job.seq_len > 0 and job.lora.r > 0 and 0 <= job.reserve < 1
        assert all(0 < job.trl.get(name, 1) < 1e308 for name in ("num_train_epochs", "learning_rate"))
        # The command that asks the same is one line that a shell reads back.
        assert shlex.split(session.command())[0] == "trlfit"


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("seq_len", "128k", 131_072),
        ("seq_len", "1M", 1_048_576),
        ("reserve", "8%", 0.08),
        ("reserve", "0.1", 0.1),
        ("data.packing", "on", True),
        ("global_batch", "1,024", 1024),
        ("allow", "numerics, method", ["numerics", "method"]),
    ],
)
def test_how_people_write_values(path: str, text: str, value: object) -> None:
    (field,) = [field for field in FIELDS if field.path == path]
    assert field.value(text) == value


@pytest.mark.parametrize(("path", "text"), [("seq_len", "long"), ("data.packing", "perhaps"), ("lora.r", "1.5")])
def test_what_is_no_value_is_a_sentence(path: str, text: str) -> None:
    (field,) = [field for field in FIELDS if field.path == path]
    with pytest.raises(ValueError, match=text):
        field.value(text)


def test_pins_are_one_field_and_one_by_one() -> None:
    (field,) = [field for field in FIELDS if field.path == "pins"]
    assert field.value("recompute=full,offload=activations,optimizer, cp=8") == {
        "recompute": "full",
        "offload": "activations,optimizer",
        "cp": "8",
    }
    for text, says in (("recompute", "knob=value"), ("recompute=all", "recompute=all"), ("cup=8", "is not a knob")):
        with pytest.raises(ValueError, match=says):
            field.value(text)
    session = Session(edits={"model": "Qwen/Qwen3-8B"})
    session.set("pins.cp", "8")
    session.set("pins", field.value("recompute=full"))
    session.set("pins.sharding", "fsdp")
    assert session.job()[0].pins == {"recompute": "full", "sharding": "fsdp"}
    assert session.edits["pins"] == {"recompute": "full"}
    assert session.command().endswith("--pin recompute=full --pin sharding=fsdp")
    session.reset("pins")
    assert session.job()[0].pins == {}
    assert session.undo() and field.text(session.job()[0]) == "recompute=full, sharding=fsdp"


def test_fields_of_a_method() -> None:
    assert "LoRA rank" not in {field.label for field in fields_for("full")}
    assert "quantization" in {field.label for field in fields_for("qlora")}
