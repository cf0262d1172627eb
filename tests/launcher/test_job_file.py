"""Job files: YAML to a validated job, merged with flags, and where every value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.errors import UsageError
from launcher.inputs.job_file import load_job_file, resolve_job
from launcher.inputs.small_file import read_text
from launcher.inputs.strict_yaml import MAX_DEPTH, MAX_VALUES, StrictLoader
from launcher.inputs.validation_text import shown
from planner.job import MAX_DEPTH as MAX_FREE_DEPTH
from planner.job import Job

EXAMPLE = """\
model: Qwen/Qwen3-8B
trainer: sft            # sft | dpo | kto | reward | grpo | rloo
method: full            # full | lora | qlora
lora: {r: 16, target_modules: all-linear}
quantization: nf4       # qlora only: nf4 | nf4-double | int8
data: {dataset: data/train.jsonl, packing: false}
seq_len: 4096
global_batch: 8         # sequences per optimizer step over all GPUs
machine: 8xH100-80GB    # or local, cpu
stack: {trl: 1.16.0}    # omitted entries: installed, else the newest known
allow: []               # numerics, method: what the planner may alter on its own
goal: fastest           # fastest | longest | fewest_gpus | headroom
reserve: 0.05           # share of each card kept free
trl: {learning_rate: 2.0e-5, num_train_epochs: 1}
pins: {loss_path: fused, recompute: full}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def load(text: str) -> Any:
    return yaml.load(text, Loader=StrictLoader)


def test_the_documented_job(tmp_path: Path) -> None:
    job, origins = resolve_job(write(tmp_path / "job.yaml", EXAMPLE), {}, {})
    assert job.model_dump(exclude_defaults=True) == {
        "model": "Qwen/Qwen3-8B",
        "machine": "8xH100-80GB",
        "data": {"dataset": "data/train.jsonl"},
        "stack": {"trl": "1.16.0"},
        "trl": {"learning_rate": 2e-5, "num_train_epochs": 1},
        "pins": {"loss_path": "fused", "recompute": "full"},
    }
    assert origins["seq_len"] == origins["lora.r"] == origins["pins.recompute"] == "job.yaml"
    assert origins["nodes"] == origins["lora.alpha"] == origins["data.split"] == "default"


def test_flags_over_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", "model: a/b\nseq_len: 2k\nlora: {r: 2, alpha: 4}\n")
    job, origins = resolve_job(file, {"lora": {"r": 3}, "nodes": 2}, {"lora.r": "--lora-r", "nodes": "--nodes"})
    assert (job.model, job.seq_len, job.lora.r, job.lora.alpha, job.nodes, job.global_batch) == (
        "a/b",
        2048,
        3,
        4,
        2,
        8,
    )
    assert origins["lora.r"] == "--lora-r"
    assert origins["lora.alpha"] == origins["model"] == "job.yaml"
    assert origins["global_batch"] == "default"


def test_without_a_file_flags_are_enough() -> None:
    job, origins = resolve_job(None, {"model": "a/b"}, {"model": "MODEL"})
    assert job == Job(model="a/b")
    assert origins["model"] == "MODEL"
    assert set(origins.values()) == {"MODEL", "default"}


def test_the_model_may_come_from_either(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", "seq_len: 16\n")
    assert resolve_job(file, {"model": "a/b"}, {"model": "MODEL"})[0].model == "a/b"
    with pytest.raises(UsageError, match=r"names no model; add a line such as model: Qwen/Qwen3-8B"):
        resolve_job(file, {}, {})


def test_a_wrong_field_is_the_files_even_where_a_flag_replaces_it(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", "model: a/b\nseq_len: lots\n")
    with pytest.raises(UsageError, match=r"job\.yaml': seq_len: 'lots' is not a number of tokens; write 4096"):
        resolve_job(file, {"seq_len": 16}, {"seq_len": "--seq-len"})


def test_a_pin_without_a_value_takes_the_pin_back(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", "model: a/b\npins: {recompute: null, cp: 2}\n")
    assert resolve_job(file, {}, {})[0].pins == {"recompute": None, "cp": 2}


def test_numbers_with_an_exponent_that_yaml_reads_as_text(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", "model: a/b\nreserve: 5e-2\nlora: {dropout: 1e-1}\n")
    job = resolve_job(file, {}, {})[0]
    assert (job.reserve, job.lora.dropout) == (0.05, 0.1)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("price_per_hour: true", "price_per_hour"),
        ("reserve: no", "reserve"),
        ("global_batch: 12:30:00", "global_batch"),
    ],
)
def test_what_is_no_number_is_not_read_as_one(text: str, field: str, tmp_path: Path) -> None:
    """YAML 1.1 counts 12:30:00 in sixties, and Python takes true for 1."""
    with pytest.raises(UsageError, match=field):
        resolve_job(write(tmp_path / "job.yaml", f"model: Qwen/Qwen3-8B\n{text}\n"), {}, {})


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    assert load_job_file(write(tmp_path / "job.yaml", "\ufeffmodel: a/b\n")) == {"model": "a/b"}


def test_defaults_are_not_shared_between_jobs() -> None:
    first, second = Job(model="a/b"), Job(model="a/b")
    first.pins["cp"] = 2
    first.lora.r = 99
    first.allow.append("method")
    assert second == Job(model="a/b")


def test_merging_and_anchors_are_yamls_own() -> None:
    text = "base: &b {r: 8, alpha: 16}\nlora:\n  <<: *b\n  r: 9\nagain: *b\n"
    assert load(text) == {
        "base": {"r": 8, "alpha": 16},
        "lora": {"r": 9, "alpha": 16},
        "again": {"r": 8, "alpha": 16},
    }
    with pytest.raises(yaml.YAMLError, match="'<<' is given twice"):
        load("<<: {a: 1}\nb: 2\n<<: {c: 3}\n")


def test_as_many_values_as_a_job_may_have() -> None:
    load(f"[{', '.join(['1'] * (MAX_VALUES - 1))}]")
    with pytest.raises(yaml.YAMLError, match="more than 10,000 values"):
        load(f"[{', '.join(['1'] * MAX_VALUES)}]")


def test_as_deep_as_a_job_may_be() -> None:
    assert load("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        load("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))


def test_free_values_are_what_json_can_say() -> None:
    deep: Any = 1
    for _ in range(MAX_FREE_DEPTH):
        deep = {"a": deep}
    Job(model="m", trl={"a": deep, "b": [1, "x", None, True, 2.5]})
    for wrong in ({"a": {"a": deep}}, {"a": 2**63}, {"a": float("nan")}, {"a": {1: 2}}, {"a": [{"b": b"x"}]}):
        with pytest.raises(ValueError, match="trl"):
            Job(model="m", trl=wrong)


def test_reading_is_bounded(tmp_path: Path) -> None:
    file = write(tmp_path / "f", "x" * 100)
    assert read_text(file, "file", 100) == "x" * 100
    with pytest.raises(UsageError, match="is larger than 0 KiB; is it the right file"):
        read_text(file, "file", 99)
    with pytest.raises(UsageError, match="is larger than 1 KiB"):
        read_text(Path("/dev/zero"), "file", 1024)


def test_what_is_shown_of_a_value_is_short() -> None:
    assert shown("a") == "'a'"
    assert shown(Path("a/b")) == "'a/b'"
    assert shown("ab" * 500) == "'" + "ab" * 28 + "..."
    assert shown(Path("/folder" * 100) / "end") == "'..." + ("/folder" * 100 + "/end'")[-196:]
    assert shown(10**5000) == "something too long to print"


@pytest.mark.parametrize("text", ["max_steps: nan", "max_steps: true", "max_steps: 2.5", "num_train_epochs: [1]"])
def test_the_length_of_a_run_is_a_number(tmp_path: Path, text: str) -> None:
    """The trainer would find out only after loading the model."""
    file = write(tmp_path / "job.yaml", f"model: a/b\ntrl: {{{text}}}\n")
    with pytest.raises(UsageError, match=rf"job.yaml': trl: {text.partition(':')[0]} is .*; give a .*number"):
        resolve_job(file, {}, {})


def test_lengths_that_trainers_take_are_taken(tmp_path: Path) -> None:
    trl = "trl: {max_steps: -1, num_train_epochs: 1e1}"
    job, _ = resolve_job(write(tmp_path / "job.yaml", f"model: a/b\n{trl}\n"), {}, {})
    assert job.trl == {"max_steps": -1, "num_train_epochs": "1e1"}
