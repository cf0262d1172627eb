"""Edited ledgers against hand arithmetic and against the choices that they imitate."""

from __future__ import annotations

from typing import Any

import pytest

from planner.ledger.edited import ROLES, Cell, LedgerCells
from planner.ledger.ledger import ledger
from planner.ledger.one_choice import choose_one
from tests.planner.replay import inputs_of

QWEN3_8B = 8_190_735_360
ATTENTION = 1_509_949_440
"""Of 36 layers: 2 x 4,096 x 4,096 + 2 x 4,096 x 1,024."""
PINS = {"gpus": 8, "sharding": "fsdp", "recompute": "full", "offload": "", "micro_batch": 1, "loss_path": "fused"}


def document(**changes: Any) -> dict[str, Any]:
    job = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "pins": {**PINS, **changes.pop("pins", {})}, **changes}
    one = choose_one(inputs_of(job, stack={"trl": "1.16.0", "bitsandbytes": "0.49.0"}))
    return ledger(one.problem, one.candidate)


def cells_of(**changes: Any) -> LedgerCells:
    return LedgerCells(document(**changes))


def parts(memory: dict[str, Any], phase: str) -> dict[str, int]:
    return next(found["parts"] for found in memory["phases"] if found["name"] == phase)


def test_no_edit_is_the_ledger_itself() -> None:
    found = document()
    assert LedgerCells(found).memory({}) == found["memory"]


def test_an_edit_to_the_same_value_changes_no_phase() -> None:
    found = document()
    cells = LedgerCells(found)
    cell = Cell("attention", "moment1")
    assert cells.value(cell) == 4.0
    again = cells.memory({cell: 4.0})
    for key in ("peak_phase", "allocated_bytes", "device_bytes", "headroom_bytes"):
        assert again[key] == pytest.approx(found["memory"][key], abs=1024)
    for before, after in zip(found["memory"]["phases"], again["phases"], strict=True):
        assert after["parts"] == pytest.approx(before["parts"], abs=1024)


def test_cells_say_bytes_per_parameter() -> None:
    """FSDP2 under mixed precision: fp32 shards, fp32 gradients, no master copy, two fp32 moments, over 8 ranks."""
    cells = cells_of()
    assert [round(cells.value(Cell("mlp", role)), 6) for role in ROLES] == [4, 4, 0, 4, 4]
    assert cells.held_bytes(Cell("attention", "weights"), {}) == pytest.approx(ATTENTION * 4 / 8, abs=8)
    assert cells.formula(Cell("attention", "weights"), {}) == "1,509,949,440 x 4 B / 8 GPUs = 720.0 MiB"


def test_half_of_the_moments_of_one_group() -> None:
    """Attention's first moment in 2 bytes instead of 4: 2 x 1,509,949,440 / 8 = 377,487,360 bytes less."""
    cells = cells_of()
    before, after = cells.memory({}), cells.memory({Cell("attention", "moment1"): 2.0})
    for phase in ("forward", "loss", "backward", "step", "save"):
        assert parts(before, phase)["moment1"] - parts(after, phase)["moment1"] == pytest.approx(377_487_360, abs=1024)
        assert parts(before, phase)["moment2"] == parts(after, phase)["moment2"]
    assert "moment1" not in parts(after, "load")
    # The allocator's slack is a share of what is left.
    saved = before["device_bytes"] - after["device_bytes"]
    assert saved == pytest.approx(377_487_360 * 1.03, rel=0.001)
    assert after["headroom_bytes"] == before["headroom_bytes"] + saved


def test_a_master_copy_that_the_choice_does_not_have() -> None:
    """4 bytes of every parameter over 8 ranks, held wherever the moments are."""
    cells = cells_of()
    edits = {Cell(group, "master"): 4.0 for group in cells.groups}
    after = cells.memory(edits)
    for phase in ("forward", "loss", "backward", "step"):
        assert parts(after, phase)["master"] == pytest.approx(QWEN3_8B * 4 / 8, abs=64)
    assert "master" not in parts(after, "load")


def test_gradients_grow_as_backward_descends() -> None:
    """Twice the width is twice what a phase holds of them, and nothing where there are none."""
    cells = cells_of()
    before = cells.memory({})
    after = cells.memory({Cell(group, "gradients"): 8.0 for group in cells.groups})
    for phase in ("backward", "step"):
        assert parts(after, phase)["gradients"] == pytest.approx(2 * parts(before, phase)["gradients"], abs=1024)
    assert "gradients" not in parts(after, "forward")


def test_eight_bit_moments_by_hand() -> None:
    """Qwen3-0.6B alone on a card: 596,049,920 parameters, moments of a byte instead of four, in fp32 weights."""
    cells = cells_of(model="Qwen/Qwen3-0.6B", machine="1xH100-80GB", pins={"gpus": 1, "sharding": "none"})
    before = cells.memory({})
    after = cells.memory({Cell(g, role): 1.0 for g in cells.groups for role in ("moment1", "moment2")})
    for phase in ("forward", "loss", "backward", "step"):
        for role in ("moment1", "moment2"):
            assert parts(before, phase)[role] == pytest.approx(596_049_920 * 4, rel=1e-6)
            assert parts(after, phase)[role] == pytest.approx(596_049_920, rel=1e-6)


def test_a_part_of_another_size() -> None:
    cells = cells_of()
    before = cells.memory({})
    loss = cells.value(Cell("loss"))
    after = cells.memory({Cell("loss"): loss + 2 * 2**30})
    assert parts(after, "loss")["loss"] - parts(before, "loss")["loss"] == pytest.approx(2 * 2**30, abs=1024)
    without = [{k: v for k, v in parts(m, "backward").items() if k != "slack"} for m in (before, after)]
    assert without[0] == without[1]


def test_the_peak_moves_and_takes_the_slack_along() -> None:
    cells = cells_of()
    after = cells.memory({Cell("loss"): 60 * 2**30})
    assert after["peak_phase"] == "loss"
    assert [phase["name"] for phase in after["phases"] if "slack" in phase["parts"]] == ["loss"]
    assert after["device_bytes"] == pytest.approx(parts_sum(after), rel=0.01)


def parts_sum(memory: dict[str, Any]) -> int:
    return int(sum(parts(memory, memory["peak_phase"]).values()))


def test_adapters_are_a_group_of_their_own() -> None:
    """rank 16 on all linear modules; the base is frozen and holds weights alone."""
    cells = cells_of(method="lora")
    assert "adapters" in cells.groups
    assert [cells.value(Cell("mlp", role)) for role in ROLES] == [2, 0, 0, 0, 0]
    assert cells.value(Cell("adapters", "moment1")) == 4.0
    # A base of half a byte instead of two: 1.5 bytes less of 5,435,817,984 parameters over 8 ranks, while loading too.
    before, after = cells.memory({}), cells.memory({Cell("mlp", "weights"): 0.5})
    for phase in ("forward", "backward"):
        less = parts(before, phase)["weights"] - parts(after, phase)["weights"]
        assert less == pytest.approx(5_435_817_984 * 1.5 / 8, rel=0.001)


def test_a_4_bit_base_keeps_its_scales_whole_on_every_rank() -> None:
    """nf4: half a byte of codes over 8 ranks, and 4 bytes of scale for each 64 values on all of them."""
    cells = cells_of(method="qlora", pins={"sharding": "fsdp"})
    cell = Cell("attention", "weights")
    assert cells.value(cell) == pytest.approx(0.5 + 4 / 64, rel=1e-6)
    assert cells.held_bytes(cell, {}) == pytest.approx(ATTENTION * (0.5 / 8 + 4 / 64), rel=1e-6)
    assert cells.formula(cell, {}) == "1,509,949,440 x (0.5 B / 8 GPUs + 0.0625 B of scales) = 180.0 MiB"


def test_the_interval_moves_with_the_peak() -> None:
    cells = cells_of()
    before, after = cells.memory({}), cells.memory({Cell("attention", "moment1"): 2.0})
    for key in ("low_bytes", "high_bytes"):
        assert before[key] - after[key] == before["allocated_bytes"] - after["allocated_bytes"] > 300e6


def test_a_state_that_is_put_where_none_rests() -> None:
    """ZeRO-3 with weights and states on the host: 2 bytes of every parameter over 8 ranks come to every phase."""
    cells = cells_of(pins={"sharding": "zero3", "offload": "optimizer,params"})
    edits = {Cell(group, "weights"): 2.0 for group in cells.groups}
    before, after = cells.memory({}), cells.memory(edits)
    assert all("weights" not in phase["parts"] for phase in before["phases"] if phase["name"] == "step")
    for phase in ("forward", "loss", "backward", "step"):
        assert parts(after, phase)["weights"] == pytest.approx(QWEN3_8B * 2 / 8, abs=64)
    assert after["device_bytes"] > before["device_bytes"]
