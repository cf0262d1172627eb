from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from launcher.evidence.coefficient_store import cache_folder, default_options, keep, may_trace, siblings, source_for
from launcher.evidence.tracing import request_for
from planner.architecture import Architecture
from planner.config.reader import read_architecture
from planner.memory.coefficients import Affine, Highest
from planner.memory.coefficients_json import CoefficientDocument, coefficients_of, option_key, shape_hash
from planner.memory.formula import ActivationOptions, formula_coefficients
from planner.memory.parts import CoefficientSource
from planner.stack import Stack
from profiles.coefficients import FOLDER, find_coefficients
from profiles.models import find_model, list_models
from tests.planner.replay import choice_of, quantile, rows, tensor_bytes, traced_model

ROOT = Path(__file__).resolve().parents[2]
FULL = ActivationOptions(residual_bytes=2, compute_bytes=2, trains_base=True, adapter_bytes=2)
LORA = replace(FULL, trains_base=False, lora_targets="all-linear", lora_r=16, adapter_bytes=4)
VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.2", "trl": "1.16.0"}
BUNDLED = sorted(FOLDER.glob("*.json"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRLFIT_CACHE", str(tmp_path / "cache"))


def bundled(model_id: str) -> Architecture:
    model = find_model(model_id)
    assert model is not None
    return read_architecture(model.config, model=model.id, origin="bundled")


def small(**changes: Any) -> Architecture:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        **changes,
    }
    return read_architecture(config, model="small", origin="config.json")


def document(architecture: Architecture, kept: float, *options: ActivationOptions) -> CoefficientDocument:
    mode = {name: [[kept]] for name in ("kept", "forward", "backward", "attention_backward")}
    layer = {"none": mode, "full": mode, "selective": mode}
    entry = {"model_saved": [[16]], "final_norm_saved": [[8]], "layers": [layer] * len(architecture.kinds)}
    return CoefficientDocument(
        model=architecture.model,
        shape=shape_hash(architecture),
        kinds=tuple(kind.name for kind in architecture.kinds),
        versions=VERSIONS | {"torch": "2.13.0+cpu"},
        rank=16,
        window=0,
        sets={option_key(architecture, o): entry for o in options},
    )


def source(architecture: Architecture, notes: list[str], stack: Stack | None = None) -> CoefficientSource:
    return source_for(architecture, stack or Stack(versions=VERSIONS), trace=False, notes=notes, warn=notes.append)


def installed(python: str) -> Stack:
    return Stack(python=python, versions=VERSIONS, origin=dict.fromkeys(VERSIONS, "installed"))


def kept(found: CoefficientSource, architecture: Architecture, options: ActivationOptions = FULL) -> int:
    return found(architecture, options).layers[0].none.kept.at(1, 1)


def test_without_anything_closed_forms_answer() -> None:
    notes: list[str] = []
    found = source(small(), notes)(small(), FULL)
    assert found == formula_coefficients(small(), FULL)
    assert notes == []


def test_what_was_kept_is_found_again_and_for_other_versions_it_says_so() -> None:
    keep(document(small(), 77, FULL))
    notes: list[str] = []
    assert kept(source(small(), notes), small()) == 77
    assert notes == []
    newer = Stack(versions=VERSIONS | {"transformers": "5.25.0"})
    assert kept(source(small(), notes, newer), small()) == 77
    said = "the layers of small were traced with transformers 5.24.0; this stack has transformers 5.25.0"
    assert [note.partition(" (")[0] for note in notes] == [said]
    notes.clear()
    # Accelerate changes nothing in a layer; a build tag does not either.
    other = Stack(versions=VERSIONS | {"accelerate": "1.15.0", "torch": "2.13.0+cu130"})
    assert kept(source(small(), notes, other), small()) == 77
    assert notes == []


def test_other_options_and_other_layers_are_other_entries() -> None:
    keep(document(small(), 77, FULL))
    found = source(small(), [])
    assert found(small(), LORA).evidence == "formula"
    assert found(small(hidden_size=128), FULL).evidence == "formula"
    assert found(small(num_hidden_layers=9), FULL).evidence == "traced"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": "trlfit.coefficients/1"}', "foreign", "\udcff"])
def test_unreadable_files_are_ignored_with_a_note_and_made_again(damage: str) -> None:
    keep(document(small(), 77, FULL))
    (path,) = cache_folder().glob("*.json")
    if damage == "foreign":
        damage = json.dumps(document(small(hidden_size=256), 1, FULL).to_json())
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    notes: list[str] = []
    assert source(small(), notes)(small(), FULL).evidence == "formula"
    assert len(notes) == 1
    assert str(path) in notes[0]
    keep(document(small(), 78, FULL))
    assert kept(source(small(), []), small()) == 78


def test_a_set_that_lost_its_layers_falls_back_with_a_note() -> None:
    broken = document(small(), 77, FULL)
    keep(replace(broken, sets={key: {"layers": []} for key in broken.sets}))
    notes: list[str] = []
    assert source(small(), notes)(small(), FULL).evidence == "formula"
    assert [note for note in notes if "not readable" in note]


def test_a_refusal_is_remembered_and_said() -> None:
    refused = document(small(), 0, FULL)
    keep(replace(refused, sets={key: {"refused": "it does not run"} for key in refused.sets}))
    notes: list[str] = []
    assert source(small(), notes)(small(), FULL).evidence == "formula"
    assert notes == ["it does not run; closed forms are used"]


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from launcher.evidence.coefficient_store import keep
from planner.memory.coefficients_json import CoefficientDocument
import json
found = CoefficientDocument.from_json(json.load(sys.stdin))
print("ready", flush=True)
while True:
    keep(found)
"""


def test_writers_at_once_and_killed_ones_leave_whole_files() -> None:
    text = json.dumps(document(small(), 77, FULL, LORA).to_json())
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    try:
        for writer in writers:
            assert writer.stdin is not None and writer.stdout is not None
            writer.stdin.write(text.encode())
            writer.stdin.close()
            assert writer.stdout.readline() == b"ready\n"
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            for path in cache_folder().glob("*.json"):
                CoefficientDocument.from_json(json.loads(path.read_text()))
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    assert len(list(cache_folder().glob("*.json"))) == 2
    notes: list[str] = []
    assert kept(source(small(), notes), small()) == 77
    assert notes == []


def test_leftovers_of_killed_writers_are_swept() -> None:
    cache_folder().mkdir(parents=True)
    old, young = cache_folder() / ".a.part", cache_folder() / ".b.part"
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    keep(document(small(), 77, FULL))
    assert (old.exists(), young.exists()) == (False, True)


def fake_tracer(folder: Path, answer: str) -> str:
    path = folder / "python"
    (folder / "answer.json").write_text(answer)
    path.write_text(f"#!/bin/sh\nhead -n 1 > /dev/null\necho run >> {folder}/runs\ncat {folder}/answer.json\n")
    path.chmod(0o755)
    return str(path)


def answered(versions: dict[str, str], num_sets: int) -> str:
    mode = {name: [[5, 0, 0]] for name in ("kept", "forward", "backward", "attention_backward")} | {"work": {}}
    one = {"layers": [{"none": mode, "full": mode, "selective": mode}], "not_affine": []}
    one |= {"model_saved": [16, 0, 0], "final_norm_saved": [8, 0, 0]}
    return json.dumps({"versions": versions, "ranks": [16, 64], "sets": [one] * num_sets})


ASKED = 4
"""Sets of ``siblings(FULL)``: weights in bf16 and in fp32, each with and without a padding mask."""


def test_a_trace_is_kept_and_serves_its_siblings(tmp_path: Path) -> None:
    stack = installed(fake_tracer(tmp_path, answered(VERSIONS, ASKED)))
    notes: list[str] = []
    found = source_for(small(), stack, trace=True, notes=notes)
    assert {kept(found, small(), o) for o in siblings(FULL)} == {5}
    assert len(request_for(small(), siblings(FULL))[0]) == ASKED
    assert (tmp_path / "runs").read_text() == "run\n"
    # Another plan, which may not trace, finds them.
    assert kept(source(small(), notes), small(), replace(FULL, residual_bytes=4)) == 5
    assert notes == []


@pytest.mark.parametrize("autocast", [True, False])
def test_siblings_have_the_autocast_of_the_runs_that_ask_for_them(autocast: bool) -> None:
    """fp32 weights compute in bf16 under autocast alone, and adapters stay in fp32 there; FSDP2 casts and has none."""
    full, lora = (siblings(replace(start, autocast=autocast)) for start in (FULL, LORA))
    assert {o.autocast for o in full if o.residual_bytes == 4} == {True}
    assert False in {o.autocast for o in full if o.residual_bytes == 2}
    adapters = {(o.quantised, o.adapter_bytes, o.autocast) for o in lora}
    assert adapters == {(False, 2, False), (False, 4, True), (True, 2, False), (True, 2, True), (False, 4, autocast)}


def test_other_installed_versions_are_traced_and_stated_ones_are_not(tmp_path: Path) -> None:
    keep(document(small(), 77, FULL))
    newer = VERSIONS | {"transformers": "5.25.0"}
    python = fake_tracer(tmp_path, answered(newer, ASKED))
    notes: list[str] = []
    stated = installed(python).model_copy(update={"versions": newer})
    stated.origin["transformers"] = "stated"
    # No trace could have versions that are only stated: an older trace serves, and it says so.
    assert kept(source_for(small(), stated, trace=True, notes=notes), small()) == 77
    assert not (tmp_path / "runs").exists()
    assert len(notes) == 1
    upgraded = installed(python).model_copy(update={"versions": newer})
    assert kept(source_for(small(), upgraded, trace=True, notes=notes), small()) == 5
    assert (tmp_path / "runs").read_text() == "run\n"


def test_plans_trace_what_is_not_bundled_where_the_parts_are_installed() -> None:
    here = installed("python")
    assert may_trace(small(), here)
    assert not may_trace(bundled("Qwen/Qwen3-8B"), here)
    assert not may_trace(small(), Stack(versions=VERSIONS, origin=dict.fromkeys(VERSIONS, "newest known")))


def test_a_failed_trace_is_said_once_and_closed_forms_answer(tmp_path: Path) -> None:
    warnings: list[str] = []
    notes: list[str] = []
    stack = installed(fake_tracer(tmp_path, "no json"))
    found = source_for(small(), stack, trace=True, notes=notes, warn=warnings.append)
    assert {found(small(), options).evidence for options in (FULL, LORA)} == {"formula"}
    assert (tmp_path / "runs").read_text() == "run\n"
    assert len(warnings) == 1
    assert warnings[0].startswith("no trace of small: the trace failed in ")
    assert notes == []


def test_an_unwritable_cache_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRLFIT_CACHE", str(tmp_path / "file"))
    answer = {"versions": VERSIONS, "ranks": [16, 64], "sets": [{"refused": "no"}] * ASKED}
    stack = installed(fake_tracer(tmp_path, json.dumps(answer)))
    warnings: list[str] = []
    found = source_for(small(), stack, trace=True, notes=[], warn=warnings.append)
    assert found(small(), FULL).evidence == "formula"
    assert any(note.startswith("traced coefficients are not kept: ") for note in warnings)


def test_popular_models_are_bundled_for_their_default_sets() -> None:
    assert len(BUNDLED) >= 30
    for path in BUNDLED:
        documented = CoefficientDocument.from_json(json.loads(path.read_text()))
        architecture = bundled(documented.model)
        assert shape_hash(architecture) == documented.shape
        assert set(documented.sets) == {option_key(architecture, o) for o in default_options(architecture)}
        assert path.stat().st_size < 50_000


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_bundled_sets_are_sound(path: Path) -> None:
    """Recompute keeps less than no recompute; the selective kind lies between; every value is positive."""
    documented = CoefficientDocument.from_json(json.loads(path.read_text()))
    architecture = bundled(documented.model)
    for options in default_options(architecture):
        found = coefficients_of(documented, architecture, options, [])
        if found is None:
            assert "refused" in documented.sets[option_key(architecture, options)]
            continue
        for layer in found.layers:
            keeps = [mode.kept.at(4096, 4096) for mode in (layer.full, layer.selective, layer.none)]
            assert 0 < keeps[0] <= keeps[1] < keeps[2]
            assert layer.full.backward.at(4096, 4096) > layer.none.backward.at(4096, 4096)
        assert found.work[0].full.matmul_flops.at(1000, 1000) > found.work[0].none.matmul_flops.at(1000, 1000)


def test_bundled_coefficients_are_used_and_say_other_versions() -> None:
    qwen = bundled("Qwen/Qwen3-8B")
    notes: list[str] = []
    assert source(qwen, notes)(qwen, FULL).evidence == "traced"
    assert notes == []
    older = Stack(versions=VERSIONS | {"transformers": "5.17.0"})
    assert source(qwen, notes, older)(qwen, FULL).evidence == "traced"
    said = "the layers of Qwen/Qwen3-8B were traced with transformers 5.24.0; this stack has transformers 5.17.0"
    assert [note.partition(" (")[0] for note in notes] == [said]


def test_eight_billion_by_hand() -> None:
    """Qwen3-8B in bf16: hidden 4,096, 32 heads and 8 key/value heads of 128, intermediate 12,288.

    Kept per token, in elements: two norms keep an fp32 copy and a bf16 value (2 x 3 of 4,096 x 2 bytes), q and k norms
    the same of 5,120; q, k, v and the attention's output; gate, its SiLU, up and their product. One more fp32 number
    per token for each norm's root and head's log-sum-exp.
    """
    norms = 2 * (4 + 2) * 4096 + (4 + 2) * 5120
    attention = 2 * (4096 + 1024 + 1024 + 4096)
    mlp = 4 * 2 * 12288
    inputs = 2 * 2 * 4096
    roots = 4 * (2 + 40 + 32)
    qwen = bundled("Qwen/Qwen3-8B")
    found = source(qwen, [])(qwen, FULL)
    assert found.layers[0].none.kept.at(1000, 1000) == 1000 * (norms + attention + mlp + inputs + roots)
    assert found.layers[0].full.kept == Affine(2 * 4096)
    assert isinstance(found.layers[0].full.backward, Highest)


def test_bundled_coefficients_against_recorded_whole_models() -> None:
    """Peaks composed from the bundle, beside traces of the whole models that closed forms are held against as well.

    Sliding windows are left out: the recorded traces ran the CPU's masked attention, the bundle is for CUDA's.
    """
    errors: list[float] = []
    for row in rows("traced"):
        model, choice = traced_model(row), choice_of(row)
        model.source = source(model.job.architecture, [])
        memory = model.estimate(choice)
        if row.get("refused") or any(kind.window for kind in model.job.architecture.kinds):
            continue
        assert memory.evidence == "traced", row["id"]
        errors.append(abs(max(tensor_bytes(memory).values()) / row["allocated_bytes"] - 1))
    assert len(errors) == 34
    assert median(errors) <= 0.005
    assert quantile(errors, 0.95) <= 0.0225
    assert max(errors) <= 0.03


def test_a_fine_tune_of_a_bundled_model_is_recognised() -> None:
    qwen = bundled("Qwen/Qwen3-8B")
    config = {**qwen.config, "num_hidden_layers": 4, "vocab_size": 1000, "_name_or_path": "mine"}
    mine = read_architecture(config, model="./mine", origin="folder")
    assert source(mine, [])(mine, FULL).evidence == "traced"


def test_a_model_that_is_not_bundled_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = Path.read_text

    def watching(self: Path, *args: Any, **kwargs: Any) -> str:
        read.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", watching)
    assert find_coefficients("0" * 32) is None
    assert read == []


def test_reading_a_bundled_file_costs_milliseconds() -> None:
    qwen = bundled("google/gemma-3-1b-pt")
    times: list[float] = []
    for _ in range(5):
        started = time.process_time()
        source(qwen, [])(qwen, FULL)
        times.append(time.process_time() - started)
    assert min(times) < 0.005


def test_default_sets_are_what_plans_ask_for() -> None:
    keys = {option_key(bundled("Qwen/Qwen3-8B"), o) for o in default_options(bundled("Qwen/Qwen3-8B"))}
    assert keys == {
        f"{words}{masked}"
        for words in (
            "bf16/full/sdpa",
            "fp32+bf16/full/sdpa",
            "bf16/lora-fp32:all-linear/sdpa",
            "bf16/lora-bf16:all-linear/sdpa",
            "bf16/lora-bf16:all-linear/quantised/sdpa",
        )
        for masked in ("", "/masked")
    }
    gemma = bundled("google/gemma-2-2b")
    assert {o.attention for o in default_options(gemma)} == {"eager", "flash_attention_2"}
    assert len(list_models()) > len(BUNDLED)
