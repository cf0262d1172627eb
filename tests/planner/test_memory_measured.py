"""The simulated peak against 54 published measurements of real runs, and against recorded out-of-memory failures.

Every bound is held at every tier: closed forms, bundled traces (what a plan of a bundled model uses) and after a probe.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from benchmarks.accuracy import asked_sets
from benchmarks.accuracy_cases import default_cases
from benchmarks.accuracy_page import PAGE, page
from launcher.evidence.coefficient_store import source_for
from launcher.evidence.tracing import trace
from planner.architecture import Architecture
from planner.memory.coefficients_json import CoefficientDocument
from planner.memory.formula import ActivationOptions
from planner.stack import Stack
from tests.planner.readings import READINGS, readings_of
from tests.planner.replay import (
    TIERS,
    Replay,
    Tier,
    bundled_coefficients,
    choice_of,
    longest_length,
    measured_problem,
    probed_documents,
    quantile,
    replay,
    rows,
)

RUNS = {tier: [replay(row, tier=tier) for row in rows("measured")] for tier in TIERS}
MEASURED = {tier: [r for r in runs if r.error is not None] for tier, runs in RUNS.items()}
BY_ID = {r.row["id"]: r for r in RUNS["best"]}
OUT_OF_MEMORY = [r for runs in RUNS.values() for r in runs if r.row["measured"].get("oom")]


def allocated(tier: Tier) -> list[Replay]:
    return [r for r in MEASURED[tier] if r.row["measured"]["metric"] == "max_allocated"]


ALLOCATED = allocated("best")
EVERY_TIER = pytest.mark.parametrize("tier", TIERS)


def sizes_of(errors: list[Replay]) -> list[float]:
    return [abs(r.error) for r in errors if r.error is not None]


def test_every_row_is_replayed() -> None:
    assert len(RUNS["best"]) == 70
    assert (len(MEASURED["best"]), len(ALLOCATED), len(OUT_OF_MEMORY)) == (54, 49, 6 * len(TIERS))


@EVERY_TIER
def test_single_gpu_rows_of_high_confidence(tier: Tier) -> None:
    found = sizes_of([r for r in allocated(tier) if r.single_gpu and r.row["confidence"] == "high"])
    assert len(found) == 20
    assert median(found) <= 0.03
    assert max(found) <= 0.05


@EVERY_TIER
def test_all_allocated_rows(tier: Tier) -> None:
    found = sizes_of(allocated(tier))
    assert median(found) <= 0.05
    assert quantile(found, 0.9) <= 0.12
    # Far inside the bounds that were promised, so that a step back shows.
    assert (median(found) <= 0.02, quantile(found, 0.9) <= 0.05) == (True, True)
    # One source says neither unit nor metric, another polled every 10 ms: see docs/accuracy.md.
    assert {r.row["id"] for r in allocated(tier) if abs(r.error or 0) > 0.05} == {
        "trl-long-qwen8b-1m-8xh100",
        "acc-fsdp2-fixed",
    }
    assert max(found) <= 0.11


def test_what_a_poll_does_not_see() -> None:
    """Qwen2.5-1.5B, 8 ranks of FSDP2, 256 tokens: at last the sum of two gradients of its tied embedding, 0.47 GB."""
    run = BY_ID["acc-fsdp2-fixed"]
    assert run.memory.peak_phase == "backward"
    without = run.predicted_bytes - 2 * 151_936 * 1536
    assert without == pytest.approx(run.row["measured"]["bytes"], rel=0.01)


def test_every_reading_is_of_a_row_and_changes_it() -> None:
    ids = [row["id"] for row in rows("measured")]
    for pattern, reading in READINGS.items():
        assert any(reading in readings_of(row_id) for row_id in ids), pattern


def test_a_residual_stream_in_fp32() -> None:
    """PowerLM-3B, 40 layers of 2,304: two more bytes a value and checkpoint, 184,320 bytes a token, as was measured."""
    baseline, accelerated = (
        BY_ID[f"fms-granite-{name}"]
        for name in (
            "018-PowerLM-3b-qlora-g1-bs8-baseline-peft-bnb",
            "022-PowerLM-3b-qlora-g1-bs8-accelerated-peft-bnb",
        )
    )
    tokens = 8 * 4096
    seen = baseline.row["measured"]["bytes"] - accelerated.row["measured"]["bytes"]
    assert seen == pytest.approx(tokens * 40 * 2304 * 2, rel=0.001)
    assert baseline.predicted_bytes - accelerated.predicted_bytes == pytest.approx(seen, rel=0.05)


@pytest.mark.parametrize("run", OUT_OF_MEMORY, ids=lambda run: run.row["id"])
def test_no_recorded_failure_is_called_fitting(run: Replay) -> None:
    assert not run.memory.fits


@EVERY_TIER
def test_runs_that_ran_are_mostly_called_fitting(tier: Tier) -> None:
    """A planner that refuses everything has no false fits either."""
    refused = [r for r in MEASURED[tier] if not r.memory.fits]
    # Within the reserve of 5 %: they ran at 80.3 GB on cards of 80 GiB.
    assert all(r.row["measured"]["bytes"] > 0.85 * (r.memory.capacity_bytes or 0) for r in refused)
    # One of them under ZeRO-3 on a single card, 82 GB of 85.9, where buckets and live parameters of DeepSpeed decide.
    assert len(refused) <= 6


@pytest.mark.parametrize(
    ("row", "gib", "peak"),
    [("trl-long-qwen4b-96k-noff", 59.9, "backward"), ("trl-long-qwen4b-96k-off", 48.8, "backward")],
)
def test_98304_tokens_of_qwen3_4b(row: str, gib: float, peak: str) -> None:
    memory = BY_ID[row].memory
    assert memory.allocated_bytes / 2**30 == pytest.approx(gib, rel=0.025)
    assert memory.peak_phase == peak


def test_checkpoint_bands_of_qwen3_4b() -> None:
    """One saved tensor per layer is 98,304 x 2,560 x 2 bytes = 0.469 GiB; offload leaves four of 36."""
    band = 98_304 * 2_560 * 2
    assert band / 2**30 == pytest.approx(0.469, abs=0.0005)
    saved = [
        next(p for p in BY_ID[row].memory.phases if p.name == "loss").parts["saved_activations"]
        for row in ("trl-long-qwen4b-96k-noff", "trl-long-qwen4b-96k-off")
    ]
    assert saved[0] - saved[1] == 32 * band
    # torch pins each in a block of a power of two.
    assert BY_ID["trl-long-qwen4b-96k-off"].memory.host.pinned_bytes == 36 * 2**29


COARSE = "trl-long-qwen4b-limit-chunked-off"
"""Recorded on a grid whose next length is not said: "one card stops just above 256k"."""


def limit_error(row_id: str, tier: Tier) -> float:
    row = BY_ID[row_id].row
    return float(longest_length(row, tier=tier) / row["measured"]["max_seq_len"] - 1)


@EVERY_TIER
def test_longest_lengths(tier: Tier) -> None:
    """Within 10 % below and 5 % above what was recorded, on a grid of 1,024 tokens or a coarser one."""
    limits = [row["id"] for row in rows("measured") if "max_seq_len" in row["measured"]]
    assert len(limits) == 7
    errors = {row_id: limit_error(row_id, tier) for row_id in limits}
    assert {row_id for row_id, error in errors.items() if not -0.10 <= error <= 0.05} == {COARSE}
    assert errors[COARSE] < 0.055


@pytest.mark.parametrize("name", ["nll", "chunked", "chunked-off"])
def test_a_later_step_would_not_reach_what_was_recorded(name: str) -> None:
    """AdamW's states are 8 bytes for each of 4,022,468,096 parameters in bf16: 16 GB of what a first step has."""
    row = BY_ID[f"trl-long-qwen4b-limit-{name}"].row
    assert longest_length(row, first_step=False) < row["measured"]["max_seq_len"]


def test_reserved_memory_of_runs_without_expandable_segments() -> None:
    reserved = [r for r in MEASURED["best"] if r.row["measured"]["metric"] == "max_reserved"]
    assert len(reserved) == 3
    # The constant is the median of steps that were played on the allocator, not fitted to these.
    assert max(abs(r.error or 0) for r in reserved) <= 0.02


def test_plans_use_the_coefficients_that_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing cached and no trace, the launcher's source and the replay's answer alike."""
    monkeypatch.setenv("TRLFIT_CACHE", str(tmp_path))
    evidence: set[str] = set()
    for row in rows("measured"):
        model = measured_problem(row).judge.memory
        architecture, options = model.job.architecture, model.activation_options(choice_of(row))
        source = source_for(architecture, Stack(versions=row["job"]["stack"]), trace=False, notes=[])
        assert source(architecture, options) == bundled_coefficients(architecture, options)
        evidence.add(source(architecture, options).evidence)
    assert evidence == {"traced", "formula"}


Asked = dict[str, tuple[Architecture, dict[str, ActivationOptions]]]


@pytest.fixture(scope="module")
def asked() -> Asked:
    return asked_sets(default_cases())


def test_recorded_probes_are_of_what_the_cases_ask(asked: Asked) -> None:
    """`python benchmarks/accuracy.py --probe` renews them."""
    assert {shape: set(sets) for shape, (_, sets) in asked.items()} == {
        shape: set(document.sets) for shape, document in probed_documents().items()
    }


@pytest.mark.stack
def test_a_recorded_probe_is_what_a_trace_says_today(asked: Asked) -> None:
    """The smallest of them; `python benchmarks/accuracy.py --probe` renews all."""
    shape, (architecture, sets) = min(asked.items(), key=lambda item: (len(item[1][1]), item[1][0].num_parameters))
    recorded = probed_documents()[shape]
    fresh = trace(architecture, sets.values())
    assert isinstance(recorded, CoefficientDocument)
    assert fresh.sets == recorded.sets


def test_the_page_says_what_is_so() -> None:
    """`make accuracy` renews it."""
    assert PAGE.read_text(encoding="utf-8") == page()
