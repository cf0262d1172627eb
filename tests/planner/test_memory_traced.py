"""The closed forms against whole-model traces of the real classes: 43 on one card, 20 on one rank of FSDP2."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from planner.choice import Choice
from planner.memory import MemoryModel
from tests.planner.replay import choice_of, eager_peak, quantile, rows, traced_model, traced_peak

RAN = [row for row in rows("traced") if not row.get("refused")]
SHARDED = rows("traced_fsdp")


def one_card(row: dict[str, Any]) -> tuple[MemoryModel, Choice]:
    return traced_model(row), choice_of(row)


def peak_error(row: dict[str, Any]) -> float:
    seen: int = row["allocated_bytes"]
    return traced_peak(row) / seen - 1


def test_there_is_something_to_compare() -> None:
    assert (len(RAN), len(SHARDED)) == (43, 20)
    # transformers refuses the grouped expert matmul under autocast; such rows have no peak.
    assert {row["id"] for row in rows("traced")} - {row["id"] for row in RAN} == {
        "qwen3-30b-a3b-l2/fp32-full-chunkedfp32",
        "qwen3-30b-a3b-l2/fp32-none-fused",
    }


@pytest.mark.parametrize("row", RAN, ids=lambda row: row["id"])
def test_parameters_are_exact(row: dict[str, Any]) -> None:
    model, choice = one_card(row)
    blocks = model.blocks(choice.method)
    assert (blocks.num_parameters, blocks.total.trainable) == (row["params"], row["trainable"])


def left_over_bytes(row: dict[str, Any]) -> int:
    """Hidden states that the traced chunked losses leave referenced until the next step: one, three with adapters."""
    job, pins = row["job"], row["job"]["pins"]
    if not pins["loss_path"].startswith("chunked"):
        return 0
    width = 4 if pins["weights"] == "fp32" else 2
    hidden_states: int = job["seq_len"] * pins["micro_batch"] * row["config"]["hidden_size"] * width
    return hidden_states * (1 if job["method"] == "full" else 3)


@pytest.mark.parametrize("row", RAN, ids=lambda row: row["id"])
def test_states_at_rest(row: dict[str, Any]) -> None:
    model, choice = one_card(row)
    parts = model.estimate(choice).phases[1].parts
    states = sum(parts[role] for role in ("weights", "master", "moment1", "moment2"))
    assert states + left_over_bytes(row) == pytest.approx(row["at_rest_bytes"], rel=0.005)


def test_peaks_of_one_card() -> None:
    errors = [abs(peak_error(row)) for row in RAN]
    assert median(errors) <= 0.005
    assert quantile(errors, 0.95) <= 0.03
    assert max(errors) <= 0.04


def test_no_regime_hides_behind_the_median() -> None:
    """Each way of recomputing, method and dtype stays inside the interval said for the families that were checked."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in RAN:
        pins = row["job"]["pins"]
        groups.setdefault((row["job"]["method"], pins["weights"], pins["recompute"]), []).append(peak_error(row))
    assert len(groups) == 7
    assert {
        key: round(max(map(abs, errors)), 3) for key, errors in groups.items() if max(map(abs, errors)) > 0.04
    } == {}


def test_peaks_of_one_rank_of_fsdp2() -> None:
    """With the prefetched layer the model is above an eager trace; without that named part it agrees."""
    with_prefetch = [abs(peak_error(row)) for row in SHARDED]
    eager = [abs(eager_peak(row) / row["allocated_bytes"] - 1) for row in SHARDED]
    assert median(eager) <= 0.02
    assert quantile(eager, 0.95) <= 0.05
    # 4.1 % in the median today: the price of assuming that a card overlaps the next gather.
    assert median(with_prefetch) <= 0.05
    assert all(peak_error(row) > -0.01 for row in SHARDED)


@pytest.mark.parametrize("row", SHARDED, ids=lambda row: row["id"])
def test_sharded_states_at_rest(row: dict[str, Any]) -> None:
    """One rank's shards: fp32 where they train, bf16 where they are frozen.

    A mebibyte is left for rows that do not divide: an adapter's 16 rows over 64 ranks are one whole row on rank 0.
    """
    model, choice = one_card(row)
    assert choice.dp_shard == row["job"]["pins"]["dp_shard"]
    parts = model.estimate(choice).phases[1].parts
    states = sum(parts[role] for role in ("weights", "master", "moment1", "moment2"))
    assert parts["weights"] == pytest.approx(row["at_rest_params_bytes"], rel=0.003, abs=2**20)
    assert states == pytest.approx(row["at_rest_bytes"], rel=0.005, abs=2**20)
