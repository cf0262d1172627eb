"""Where measurements live: found by card, driver and versions; whole whoever writes; carried to other boxes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from launcher.errors import UsageError
from launcher.evidence.measurement_store import (
    MAX_FILE_BYTES,
    export_measurements,
    forget_measurements,
    import_measurements,
    keep_measurement,
    measured_for,
    measurements_folder,
    read_measurements,
)
from launcher.paths import cache_dir
from planner.choice import Choice
from planner.machine import Machine
from planner.measured.probes import PHASES
from planner.memory.coefficients_json import shape_hash
from planner.stack import Stack
from tests.launcher.command_line import here
from tests.planner.replay import bundled, named_machine

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"torch": "2.13.0+cu130", "transformers": "5.24.0", "trl": "1.16.0", "peft": "0.21.2"}
STACK = Stack(versions={package: version.partition("+")[0] for package, version in VERSIONS.items()})
MODEL = bundled("Qwen/Qwen3-0.6B")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRLFIT_CACHE", str(tmp_path / "cache"))


def document(kind: str, driver: str = "580.1", taken: str = "2026-01-02T00:00:00+00:00", **body: Any) -> dict[str, Any]:
    return {
        "schema": "trlfit.measurement/1",
        "kind": kind,
        "device": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "card": "H100-80GB",
        "threads": None,
        "driver": driver,
        "versions": VERSIONS,
        "taken": taken,
        kind: body,
    }


def rates(flops: float = 700e12, **more: Any) -> dict[str, Any]:
    products = [
        {"dtype": "bfloat16", "m": 1, "n": 1, "k": 1, "flops_per_s": flops / 2},
        {"dtype": "bfloat16", "m": 8, "n": 8, "k": 8, "flops_per_s": flops},
        {"dtype": "float32", "m": 8, "n": 8, "k": 8, "flops_per_s": 50e12},
    ]
    links = [{"kind": "all_gather", "ranks": 8, "bytes": 1, "bytes_per_s": 330e9},
             {"kind": "reduce_scatter", "ranks": 8, "bytes": 1, "bytes_per_s": 310e9}]  # fmt: skip
    ways = {"host_to_device_bytes_per_s": 55e9, "device_to_host_bytes_per_s": 48e9}
    return document("rates", products=products, streaming_bytes_per_s=3e12, collectives=links, **ways, **more)


def job(**more: Any) -> dict[str, Any]:
    def cell(layers: int, tokens: int) -> dict[str, Any]:
        numbers = dict.fromkeys(PHASES, layers * tokens)
        return {"layers": layers, "sequence": tokens, "tokens": tokens, "peaks": numbers,
                "seconds": {**numbers, "other": 0.0, "step_s": 1.0}}  # fmt: skip

    choice = Choice(method="full", loss_path="fused", recompute="none").to_json()
    return document(
        "job",
        model=MODEL.model,
        trainer="sft",
        shape=shape_hash(MODEL),
        vocab=MODEL.vocab,
        tied=MODEL.tied,
        options="bf16/full/sdpa",
        lora_r=0,
        choice=choice,
        cells=[cell(1, 512), cell(1, 1024), cell(2, 512), cell(2, 1024)],
        **more,
    )


def live(driver: str | None = "580.1") -> Machine:
    machine = named_machine("8xH100-80GB")
    machine.driver_version = driver
    return machine


def test_the_cache_is_where_platformdirs_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRLFIT_CACHE")
    for base in ("", "/somewhere/else"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache_dir() == Path(platformdirs.user_cache_dir("trlfit", appauthor=False))


def test_nothing_measured_is_one_look_at_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    real = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path, **_: looks.append(path.name) or real(path))
    monkeypatch.setattr("os.scandir", lambda *_: pytest.fail("it reads on"))
    notes: list[str] = []
    assert measured_for(live(), STACK, MODEL, notes) is None
    assert (looks, notes) == (["measurements"], [])


def test_the_best_of_each_kind_of_work_is_found_for_its_card_and_driver() -> None:
    keep_measurement(rates())
    notes: list[str] = []
    found = measured_for(live(), STACK, MODEL, notes)
    assert found is not None and found.rates is not None
    seen = found.rates
    assert (seen.matmul_flops, seen.fp32_flops, seen.bandwidth) == (700e12, 50e12, 3e12)
    # A plan copies both ways, and gathers as well as reduces: the slower counts.
    assert (seen.host_link, seen.link) == (48e9, 310e9)
    where = "measured on NVIDIA H100 80GB HBM3, driver 580.1, torch 2.13.0+cu130"
    assert notes == [f"this machine's rates are {where}"]
    # A machine that was only named has no driver: what was measured anywhere on such a card serves.
    assert measured_for(live(driver=None), STACK, MODEL, []) == found
    assert measured_for(named_machine("8xA100-80GB"), STACK, MODEL, []) is None
    notes.clear()
    assert measured_for(live(driver="590.2"), STACK, MODEL, notes) is None
    assert notes == ["measured under driver 580.1, which is not this machine's 590.2: `trlfit probe` again"]


def test_a_job_counts_only_for_its_layers_and_versions() -> None:
    keep_measurement(job())
    found = measured_for(live(), STACK, MODEL, [])
    assert found is not None and found.rates is None
    (probe,) = found.jobs
    assert (probe.depths, probe.lengths) == ((1, 2), (512, 1024))
    assert measured_for(live(), STACK, bundled("Qwen/Qwen3-8B"), []) is None
    notes: list[str] = []
    newer = Stack(versions={**STACK.versions, "trl": "1.17.0"})
    assert measured_for(live(), newer, MODEL, notes) is None
    assert notes == [
        "a probe of these layers with trl 1.16.0 is not used for this stack: `trlfit probe --measure` again"
    ]


def whole(choice: Choice, **versions: str) -> dict[str, Any]:
    """A plan that ran on all of its ranks."""
    seen: dict[str, Any] = {"peaks": dict.fromkeys(PHASES, 7), "seconds": dict.fromkeys((*PHASES, "other"), 0.1)}
    cell = {"layers": 28, "sequence": 64, "tokens": 64, **seen, "ranks": [seen] * choice.num_gpus}
    body: dict[str, Any] = {**job()["job"], "choice": choice.to_json(), "cells": [cell]}
    return {**document("whole", **body), "versions": {**VERSIONS, **versions}}


def test_a_plan_that_ran_is_kept_by_its_ranks_and_counts_with_its_versions() -> None:
    zero = Choice(method="full", loss_path="fused", recompute="none", sharding="zero2", dp_shard=4)
    ddp = replace(zero, sharding="ddp", dp_shard=1, dp_replicate=4)
    kept = [whole(ddp), whole(replace(ddp, dp_replicate=8)), whole(zero, deepspeed="0.19.8"), whole(zero)]
    assert len({keep_measurement(found) for found in kept}) == 4
    notes: list[str] = []
    found = measured_for(live(), STACK, MODEL, notes)
    assert found is not None
    assert sorted(ran.choice.num_gpus for ran in found.wholes) == [4, 4, 4, 8]
    # What NCCL and the ranks hold beside is no machine's own.
    assert (found.jobs, found.machine_rates) == ((), None)
    newer = STACK.model_copy(update={"versions": {**STACK.versions, "deepspeed": "0.20.0"}})
    found = measured_for(live(), newer, MODEL, notes)
    assert found is not None and {ran.choice.sharding for ran in found.wholes} == {"ddp"}
    assert any(
        "with deepspeed 0.19.8 is not used for this stack: `trlfit probe --whole` again" in note for note in notes
    )


def test_a_job_that_ran_out_of_memory_is_kept_and_corrects_nothing() -> None:
    ended = job()
    ended["job"]["cells"][3] = {"layers": 2, "sequence": 1024, "out_of_memory": "Tried to allocate 20 GiB"}
    keep_measurement(ended)
    assert len(read_measurements()) == 1
    assert measured_for(live(), STACK, MODEL, []) is None


def test_the_same_again_replaces_and_the_newest_stands() -> None:
    keep_measurement(rates(600e12))
    keep_measurement(rates(700e12))
    assert len(list(measurements_folder().iterdir())) == 1
    older = rates(500e12) | {"driver": "570.0", "taken": "2025-12-31T00:00:00+00:00"}
    keep_measurement(older)
    found = measured_for(live(driver=None), STACK, MODEL, [])
    assert found is not None and found.rates is not None and found.rates.matmul_flops == 700e12


def test_what_is_here_and_was_taken_later_stays(tmp_path: Path) -> None:
    keep_measurement({**rates(), "taken": "2026-05-01T00:00:00+00:00"})
    export_measurements(tmp_path / "old.json")
    later = {**rates(), "taken": "2026-06-01T00:00:00+00:00"}
    keep_measurement(later)
    assert import_measurements(tmp_path / "old.json") == []
    assert [document["taken"] for _, document in read_measurements()] == [later["taken"]]


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[1]", '{"schema": "trlfit.measurement/2"}', '{"schema": "trlfit.measurement/1", "kind": "rates"}'],
)
def test_broken_files_are_ignored_with_a_note(damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = keep_measurement(rates())
    path.write_text(damage)
    assert measured_for(live(), STACK, MODEL, []) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"measurement {path} is ignored: " in said
    keep_measurement(rates())
    assert measured_for(live(), STACK, MODEL, []) is not None


def test_what_one_box_exports_another_takes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in (rates(), job()):
        keep_measurement(kept)
    assert len(export_measurements(tmp_path / "box.json")) == 2
    here = measured_for(live(), STACK, MODEL, [])
    monkeypatch.setenv("TRLFIT_CACHE", str(tmp_path / "laptop"))
    assert measured_for(live(), STACK, MODEL, []) is None
    assert len(import_measurements(tmp_path / "box.json")) == 2
    assert measured_for(live(), STACK, MODEL, []) == here
    assert len(forget_measurements(["rates"])) == 1
    assert len(forget_measurements([])) == 1
    assert read_measurements() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist; write one with `trlfit probe --export"),
        (" " * (MAX_FILE_BYTES + 1), "is larger than 32768 KiB"),
        ("{", "not JSON"),
        ("{}", "its schema is not trlfit.measurements/1"),
        ('{"schema": "trlfit.measurements/1"}', "no list"),
        ('{"schema": "trlfit.measurements/1", "measurements": [7]}', "measurements[0]: no JSON object"),
    ],
)
def test_an_import_of_anything_else_says_so_and_takes_in_nothing(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"--import .*box.json") as error:
        import_measurements(path)
    assert said in str(error.value)
    assert not measurements_folder().exists()


def test_half_of_an_import_is_nothing(tmp_path: Path) -> None:
    broken = job()
    del broken["job"]["choice"]
    whole = {"schema": "trlfit.measurements/1", "measurements": [rates(), broken]}
    (tmp_path / "box.json").write_text(json.dumps(whole))
    with pytest.raises(UsageError, match=r"measurements\[1\]"):
        import_measurements(tmp_path / "box.json")
    assert not measurements_folder().exists()


def test_pipes_are_written_to_and_never_waited_for_or_replaced(tmp_path: Path) -> None:
    keep_measurement(rates())
    os.mkfifo(measurements_folder() / "card-h100-80gb.a.json")
    assert len(read_measurements()) == 1
    (tmp_path / "stdout").symlink_to(tmp_path / "box.json")
    assert len(export_measurements(tmp_path / "stdout")) == 1
    assert (tmp_path / "stdout").is_symlink()
    assert len(import_measurements(tmp_path / "box.json")) == 1
    assert len(forget_measurements([])) == 1


WRITER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from launcher.evidence.measurement_store import keep_measurement
found = json.load(sys.stdin)
print("ready", flush=True)
while True:
    keep_measurement(found)
"""


def test_two_writers_at_once_and_killed_leave_whole_files() -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for writer, flops in zip(writers, (600e12, 700e12), strict=True):
            assert writer.stdin is not None and writer.stdout is not None
            writer.stdin.write(json.dumps(rates(flops)).encode())
            writer.stdin.close()
            assert writer.stdout.readline() == b"ready\n"
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            for path in measurements_folder().glob("*.json"):
                json.loads(path.read_text())
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    found = measured_for(live(), STACK, MODEL, [])
    assert found is not None and found.rates is not None
    assert found.rates.matmul_flops in (600e12, 700e12)


def test_a_plan_drops_offload_where_copies_were_measured_slow(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-32B", "--method", "lora", "--seq-len", "64k", "--global-batch", "8"]
    words += ["--machine", "8xH100-80GB", "--json"]
    before = json.loads(here(capsys, words).out)
    assert before["best"]["choice"]["offload"] == ["activations"]
    throttled = rates(700e12)
    throttled["rates"] |= {"device_to_host_bytes_per_s": 1e9}
    keep_measurement(throttled)
    after = json.loads(here(capsys, words).out)
    assert after["best"]["choice"]["offload"] == []
    assert [note for note in after["notes"] if note not in before["notes"]] == [
        "this machine's rates are measured on NVIDIA H100 80GB HBM3, driver 580.1, torch 2.13.0+cu130"
    ]


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (("streaming_bytes_per_s",), float("nan"), "rates.streaming_bytes_per_s is nan"),
        (("streaming_bytes_per_s",), 0, "streaming_bytes_per_s is '0', no float of 1 or more"),
        (("products", 0, "flops_per_s"), 10**400, "rates.products[0].flops_per_s is beyond all bounds"),
        (("products", 0, "flops_per_s"), -1.5, "rates.products[0].flops_per_s is -1.5"),
        (("collectives",), {}, "collectives is '{}', no list"),
        (("cells", 1, "seconds", "forward"), float("inf"), "seconds.forward is beyond all bounds"),
        (("cells", 1, "tokens"), 512, "cells[1].tokens is 512, not 1 x 1024"),
        (("cells", 3, "layers"), 3, "not two depths at two lengths"),
        (("cells", 0, "layers"), 0, "cells[0].layers is '0'"),
        (("choice", "dp_shard"), 2, "not what one rank runs alone"),
        (("choice", "optimizer"), "adamw", "choice.optimizer is 'adamw', which no probe runs"),
    ],
)
def test_what_no_machine_measures_is_not_taken_in(
    at: tuple[str | int, ...], value: object, said: str, tmp_path: Path
) -> None:
    found = job() if at[0] in ("cells", "choice") else rates()
    inner: Any = found[found["kind"]]
    for step in at[:-1]:
        inner = inner[step]
    inner[at[-1]] = value
    (tmp_path / "box.json").write_text(json.dumps({"schema": "trlfit.measurements/1", "measurements": [found]}))
    with pytest.raises(UsageError) as error:
        import_measurements(tmp_path / "box.json")
    assert said in str(error.value)


def test_a_model_of_fewer_layers_than_were_probed_is_planned_without_the_probe() -> None:
    shallow = replace(MODEL, order=MODEL.order[:1])
    keep_measurement(job())
    found = measured_for(live(), STACK, shallow, [])
    assert found is not None and found.jobs[0].is_of(MODEL) and not found.jobs[0].is_of(shallow)
