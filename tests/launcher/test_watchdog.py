"""Silence and room on the disk, by a clock and a disk of the test's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.ending.run_metrics import Predicted
from launcher.running import watchdog
from launcher.running.checkpoints import (
    disk_need,
    largest_checkpoint_bytes,
    last_checkpoint,
    set_incomplete_aside,
    why_not_loadable,
)
from launcher.running.watchdog import LEAST_SILENT_S, START_SILENT_S, DiskWatch, HangWatch, room_problem

MIB = 1 << 20


class Usage(NamedTuple):
    """Of a disk, as far as it is asked."""

    free: int


def step(number: int, time_s: float, step_s: float = 2.0) -> str:
    return json.dumps({"event": "step", "step": number, "time": time_s, "step_s": step_s}) + "\n"


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_silence_before_the_first_step_and_after(tmp_path: Path) -> None:
    watch = HangWatch(tmp_path, Predicted(step_s=2.0), None)
    assert watch.look(0.0) is None
    assert watch.look(START_SILENT_S - 1) is None
    assert watch.look(START_SILENT_S) is not None, "not even a log"
    add(tmp_path / "log.txt", "loading\n")
    assert watch.look(START_SILENT_S + 1) is None
    assert watch.look(START_SILENT_S + LEAST_SILENT_S + 2) is None, "no step yet: it may load for an hour"
    add(tmp_path / "metrics.jsonl", step(1, 0))
    assert watch.look(10_000) is None
    assert watch.look(10_000 + LEAST_SILENT_S - 1) is None
    found = watch.look(10_000 + LEAST_SILENT_S)
    assert found is not None
    assert found.sentence == "no step and no line in the log for 15 min 00 s, where a step takes 2.00 s"


def test_long_steps_and_rare_rows_are_waited_for(tmp_path: Path) -> None:
    watch = HangWatch(tmp_path, Predicted(), None)
    watch.look(0)
    add(tmp_path / "metrics.jsonl", step(1, 0, 300.0))
    watch.look(1)
    assert watch.limit_s == 3000, "ten steps"
    add(tmp_path / "metrics.jsonl", step(20, 6000, 300.0))
    watch.look(2)
    assert watch.limit_s == 60_000, "ten times the rows' own distance: logging is rare"


def test_a_checkpoint_that_is_being_written_is_a_sign_of_life(tmp_path: Path) -> None:
    """A terabyte to a slow disk takes longer than any limit, and says nothing."""
    watch = HangWatch(tmp_path, Predicted(), 60.0)
    watch.look(0)
    path = checkpoint(tmp_path, 5, 10, whole=False)
    assert watch.look(59) is None
    add(path / "optimizer.pt", "more")
    assert watch.look(118) is None
    assert watch.look(177) is None
    assert watch.look(178) is not None


def test_the_users_own_limit_and_never(tmp_path: Path) -> None:
    assert HangWatch(tmp_path, Predicted(), 60.0).limit_s == 60
    never = HangWatch(tmp_path, Predicted(), math.inf)
    never.look(0)
    assert never.look(1e9) is None


def checkpoint(folder: Path, number: int, size: int, *, whole: bool = True) -> Path:
    path = folder / "checkpoints" / f"checkpoint-{number}"
    path.mkdir(parents=True)
    (path / "optimizer.pt").write_bytes(b"x" * size)
    if whole:
        (path / "trainer_state.json").write_text("{}")
    return path


def plan(**trl: Any) -> dict[str, Any]:
    """A million parameters under plain AdamW in fp32: 4 bytes of weights, 8 of moments."""
    roles = {"weights": 4, "master": 0, "moment1": 4, "moment2": 4}
    choice = {"method": "full", "sharding": "none"}
    return {
        "job": {"trl": trl},
        "architecture": {"parameters": {"trainable": 10**6, "total": 10**6}},
        "best": {"choice": choice, "memory": {"roles": {"trained": roles}}},
    }


def test_what_a_run_writes() -> None:
    need = disk_need(plan())
    assert need is not None
    assert (need.checkpoint_bytes, need.model_bytes, need.whole_bytes) == (12 * 10**6, 4 * 10**6, 40 * 10**6)
    none = disk_need(plan(save_strategy=False))
    assert none is not None and (none.checkpoint_bytes, none.whole_bytes) == (0, 4 * 10**6)
    light = disk_need(plan(save_only_model=True, save_total_limit=1))
    assert light is not None and light.whole_bytes == 12 * 10**6, "two checkpoints and the model, weights alone"
    assert disk_need({}) is None


def test_room_before_the_start_and_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 0

    def usage(_: Path) -> Usage:
        return Usage(free)

    monkeypatch.setattr(watchdog.shutil, "disk_usage", usage)
    free = 11 * 10**6
    refused, _ = room_problem(tmp_path, disk_need(plan()))
    assert refused is not None and refused.endswith("and one checkpoint takes 11.4 MiB")
    watch = DiskWatch(tmp_path, plan())
    assert watch.look() == (
        "the disk has 10.5 MiB free and the next checkpoint takes 11.4 MiB: free some space, or the run ends when it"
        " is saved"
    )
    free = 30 * 10**6
    refused, note = room_problem(tmp_path, disk_need(plan()))
    assert refused is None and note is not None and "3 checkpoints" in note and "38.1 MiB" in note
    assert watch.look() is None
    checkpoint(tmp_path, 1, 40 * MIB)
    assert "takes 40.0 MiB" in (watch.look() or ""), "a checkpoint that is there tells better than a plan"
    free = 50 * MIB
    assert watch.look() is None


def test_a_half_written_checkpoint_is_none(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 9, 10)
    checkpoint(tmp_path, 10, 20)
    checkpoint(tmp_path, 11, 999, whole=False)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoints" / "checkpoint-10"
    assert largest_checkpoint_bytes(tmp_path) == 22
    assert set_incomplete_aside(tmp_path) == ["incomplete-checkpoint-11"]
    checkpoint(tmp_path, 11, 5, whole=False)
    assert set_incomplete_aside(tmp_path) == ["incomplete-checkpoint-11.2"]
    assert set_incomplete_aside(tmp_path) == []


CHOICE: dict[str, Any] = {
    "method": "full", "optimizer": "adamw_torch_fused", "weights": "fp32", "mixed_precision": "bf16",
    "sharding": "fsdp", "dp_shard": 4, "micro_batch": 2, "offload": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ({}, {"micro_batch": 1, "recompute": "full", "offload": ["activations"]}, None),
        ({}, {"sharding": "hsdp", "dp_shard": 2}, None),
        ({"sharding": "none"}, {"sharding": "ddp"}, None),
        ({}, {"sharding": "zero3"}, "sharding=zero3 cannot load"),
        ({"sharding": "zero3"}, {"sharding": "zero3", "dp_shard": 8}, "with dp_shard=4, not 8"),
        ({"sharding": "zero3"}, {"sharding": "zero3", "offload": ["optimizer"]}, "other states offloaded"),
        ({"sharding": "zero3"}, {"sharding": "zero3", "offload": ["activations"]}, None),
        ({}, {"optimizer": "adamw_bnb_8bit"}, "optimizer=adamw_bnb_8bit"),
        ({}, {"method": "lora"}, "method=lora"),
    ],
)
def test_which_checkpoints_another_plan_can_load(
    before: dict[str, Any], after: dict[str, Any], why: str | None
) -> None:
    found = why_not_loadable({**CHOICE, **before}, {**CHOICE, **after}, "5.24.0")
    assert found is None if why is None else why in (found or "")


def test_older_trainers_keep_the_micro_batch_of_the_checkpoint() -> None:
    after = {**CHOICE, "micro_batch": 1}
    assert "4.57.1 would take the micro-batch" in (why_not_loadable(CHOICE, after, "4.57.1") or "")
    assert why_not_loadable(CHOICE, CHOICE, "4.57.1") is None
