"""Composed from traces of few layers, the peak of any architecture is that of a trace of the whole model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from launcher.evidence.tracing import trace
from planner.architecture import LayerKind
from planner.config.families import FAMILIES
from planner.memory.coefficients_json import RMS_NORMS, option_key, shape_hash
from tests.planner.replay import quantile, rows
from tests.planner.replay_more import Compared, architecture_of, compared, documents, options_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = rows("traced_more")
EARLIER = {row["config"]["model_type"] for row in rows("traced")}
LIVE = "phi-2/bf16-full-none-fused-sdpa-2x2048"
"""A small model whose layers keep twice as much under autocast as without."""


def report(found: tuple[Compared, ...] | None = None) -> str:
    return "\n".join(f"{c.error:+.2%} {c.error_above_rest:+.2%} {c.row['id']}" for c in found or compared())


def test_the_rows_cover_what_they_should() -> None:
    pins = [row["job"]["pins"] for row in ROWS]
    families = {row["config"]["model_type"] for row in ROWS}
    assert len(ROWS) >= 50 and len(families) >= 30 and not families & EARLIER
    assert {pin["recompute"] for pin in pins} == {"none", "full", "selective", "every_2"}
    assert {pin["attention"] for pin in pins} == {"sdpa", "eager", "flash_attention_2"}
    assert {(pin["weights"], pin["mixed_precision"]) for pin in pins} == {
        ("bf16", "bf16"),
        ("bf16", "no"),
        ("fp32", "bf16"),
    }
    assert {pin["loss_path"] for pin in pins} == {"fused", "full_logits"}
    assert {row["job"]["method"] for row in ROWS} == {"full", "lora"}
    assert sum(row.get("padded", False) for row in ROWS) >= 3
    # Most are as deep as published; giants are cut, and say so.
    assert sum("layers_published" in row for row in ROWS) <= 10
    # Convolutions, state spaces, chunked attention: the reader refuses them, a trace does not.
    assert sum("kinds" in row for row in ROWS) == 7


def test_nothing_falls_back_to_closed_forms() -> None:
    trouble = {
        (document.model, key): entry.get("refused") or entry["not_affine"]
        for document in documents().values()
        for key, entry in document.sets.items()
        if "refused" in entry or "not_affine" in entry
    }
    assert trouble == {}
    needed = {(shape_hash(architecture_of(row)), option_key(architecture_of(row), options_of(row))) for row in ROWS}
    assert needed == {(shape, key) for shape, document in documents().items() for key in document.sets}


READ = [found for found in compared() if "kinds" not in found.row]


@pytest.mark.parametrize("found", READ, ids=lambda found: found.row["id"])
def test_parameters_are_exact(found: Compared) -> None:
    assert (found.parameters, found.trainable) == (found.row["params"], found.row["trainable"])


def loops_over_rows(found: Compared) -> bool:
    """Linear attention over more than one row: what it spares in each is counted once, see the last of these tests."""
    several = found.row["job"]["pins"]["micro_batch"] > 1
    return several and "linear" in {kind.attention for kind in architecture_of(found.row).kinds}


EVEN = tuple(found for found in compared() if not loops_over_rows(found))


def test_peaks() -> None:
    errors = [abs(found.error) for found in EVEN]
    assert median(errors) <= 0.0001, report()
    assert quantile(errors, 0.95) <= 0.0005, report()
    assert max(errors) <= 0.001, report()


def test_what_a_step_adds_to_weights_and_states() -> None:
    """Large states, which are counted exactly, hide nothing."""
    errors = [abs(found.error_above_rest) for found in EVEN]
    assert median(errors) <= 0.0001, report()
    assert quantile(errors, 0.95) <= 0.001, report()
    assert max(errors) <= 0.002, report()


def test_the_moments_before_backward() -> None:
    """No error of the forward is hidden behind a higher backward."""
    errors = {found.row["id"]: found.forward_error for found in compared()}
    sizes = [abs(error) for error in errors.values()]
    assert median(sizes) <= 0.0001, errors
    # The worst is a final LayerNorm, which autocast widens: the loss reads hidden states in fp32.
    assert max(sizes) <= 0.003, errors


def test_what_a_loop_over_chunks_spares_in_each_row_is_counted_once() -> None:
    """The first chunk of a row finds no state and the last hands none on: two of 16 heads, 128 by 128, in fp32.

    Layers are traced with one row, so a batch of two is counted that much too high in each of 18 layers.
    """
    (found,) = [found for found in compared() if loops_over_rows(found)]
    spared = 18 * 2 * 16 * 128 * 128 * 4
    assert found.predicted - found.seen == pytest.approx(spared, rel=0.03)
    assert found.error < 0.0025


def test_traces_beat_closed_forms() -> None:
    """What claims better evidence is better: most of these families have no closed forms of their own."""
    by_formula = [abs(found.by_formula / found.seen - 1) for found in compared()]
    by_trace = [abs(found.error) for found in compared()]
    assert median(by_trace) < median(by_formula) / 10
    assert quantile(by_formula, 0.95) > 0.10


@pytest.mark.stack
@pytest.mark.parametrize("model_type", sorted(name for name in FAMILIES if not name.startswith("qwen3_vl")))
def test_families_that_autocast_does_not_widen_have_no_layer_norm(model_type: str) -> None:
    """Such a norm is what sets the others apart, Arcee aside: its activation is a square."""
    import torch

    from tests.planner.real_models import build
    from tests.planner.test_config_reader import small

    norms = [module for module in build(small(model_type, {})).modules() if isinstance(module, torch.nn.LayerNorm)]
    mixed = any(kind.experts or kind.attention == "linear" for kind in small_kinds(model_type))
    assert (not norms) == (model_type in RMS_NORMS or mixed or model_type == "arcee")


def small_kinds(model_type: str) -> tuple[LayerKind, ...]:
    from tests.planner.test_config_reader import read, small

    return read(small(model_type, {})).kinds


@pytest.mark.stack
def test_a_live_trace_says_what_is_stored() -> None:
    row = next(row for row in ROWS if row["id"] == LIVE)
    architecture, options = architecture_of(row), options_of(row)
    live, stored = trace(architecture, [options]), documents()[shape_hash(architecture)]
    key = option_key(architecture, options)
    for now, then in zip(live.sets[key]["layers"], stored.sets[key]["layers"], strict=True):
        for mode, values in then.items():
            assert {name: now[mode][name] for name in values} == values


@pytest.mark.stack
def test_a_live_whole_model_is_the_stored_row(tmp_path: Path) -> None:
    script, out = ROOT / "benchmarks" / "whole_models.py", tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, str(script), "--only", LIVE, "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (now,) = map(json.loads, out.read_text().splitlines())
    then = next(row for row in ROWS if row["id"] == LIVE)
    assert {name: now[name] for name in now if name != "job"} == {name: then[name] for name in then if name != "job"}
