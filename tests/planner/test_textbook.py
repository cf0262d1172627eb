"""The textbook sheet against a published teaching table, digit by digit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.ledger.textbook import TextbookInput, fewest_devices, textbook
from planner.units import GIB

OPENING = TextbookInput()
LLAMA_70B = replace(OPENING, params=70_000_000_000, layers=80, hidden=8192)


def shown(num_bytes: object) -> str:
    assert isinstance(num_bytes, int)
    return f"{num_bytes / GIB:.1f}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 16),
        ({"role_bytes": {"gradient": 4}}, 18),
        ({"role_bytes": {"gradient": 4, "weights": 4}}, 20),
        ({"mixed_precision": False}, 12),
        ({"optimizer": "momentum"}, 12),
        ({"optimizer": "sgd"}, 8),
    ],
)
def test_bytes_per_parameter(changes: dict[str, object], expected: int) -> None:
    assert textbook(replace(OPENING, **changes))["bytes_per_parameter"] == expected  # type: ignore[arg-type]


def test_opening_roles_and_states() -> None:
    sheet = textbook(OPENING)
    roles = sheet["roles"]
    assert isinstance(roles, dict)
    assert [shown(roles[r]["total_bytes"]) for r in roles] == ["14.9", "14.9", "29.8", "29.8", "29.8"]
    assert shown(sheet["states_bytes"]) == "119.2"
    assert shown(sheet["optimizer_only_bytes"]) == "89.4"
    assert sheet["optimizer_only_share"] == 0.75
    assert sheet["activations_bytes"] == 18_253_611_008
    assert shown(sheet["activations_bytes"]) == "17.0"
    assert sheet["activation_bytes_per_token_per_layer"] == 136 * 1024
    assert shown(sheet["total_bytes"]) == "136.2"
    assert sheet["fits"] is False
    assert shown(sheet["short_bytes"]) == "56.2"
    assert shown(sheet["inference_bytes"]) == "14.9"
    assert isinstance(sheet["times_inference"], float)
    assert f"{sheet['times_inference']:.1f}" == "9.1"


def test_recompute() -> None:
    sheet = textbook(replace(OPENING, recompute=True))
    assert shown(sheet["activations_bytes"]) == "1.0"
    assert shown(sheet["saved_by_recompute_bytes"]) == "16.0"
    assert isinstance(sheet["extra_matmul_passes"], float)
    assert f"{sheet['extra_matmul_passes']:.1%}" == "33.3%"
    assert shown(sheet["total_bytes"]) == "120.2"
    assert sheet["fits"] is False


def test_plain_sgd_fits() -> None:
    sheet = textbook(replace(OPENING, optimizer="sgd"))
    assert (shown(sheet["total_bytes"]), sheet["fits"]) == ("76.6", True)


def test_stage_ladder_on_eight_devices() -> None:
    ladder = [shown(textbook(replace(OPENING, devices=8, stage=s))["total_bytes"]) for s in (0, 1, 2, 3)]  # type: ignore[arg-type]
    assert ladder == ["136.2", "58.0", "44.9", "31.9"]
    both = textbook(replace(OPENING, devices=8, stage=3, recompute=True, card_bytes=24 * GIB))
    assert (shown(both["total_bytes"]), both["fits"]) == ("15.9", True)


def test_fewest_devices() -> None:
    assert textbook(OPENING)["fewest_devices"] == {"0": None, "1": 3, "2": 3, "3": 2}
    # 17 GiB of activations never fit a 16 GiB card, however many devices there are.
    assert fewest_devices(replace(OPENING, card_bytes=16 * GIB), 3) is None
    for stage in (1, 2, 3):
        count = fewest_devices(OPENING, stage)
        assert count is not None
        fits = [textbook(replace(OPENING, devices=n, stage=stage))["fits"] for n in (count - 1, count)]  # type: ignore[arg-type]
        assert fits == [False, True]


def test_70b_does_not_fit_a_thousand_devices_without_recompute() -> None:
    assert shown(textbook(LLAMA_70B)["activations_bytes"]) == "85.0"
    wide = replace(LLAMA_70B, stage=3, devices=1024)
    assert (shown(textbook(wide)["total_bytes"]), textbook(wide)["fits"]) == ("86.0", False)
    again = textbook(replace(wide, recompute=True))
    assert (shown(again["total_bytes"]), again["fits"]) == ("6.0", True)


def test_small_model_fits_whole() -> None:
    sheet = textbook(replace(OPENING, params=1_500_000_000, layers=24, hidden=2048))
    assert (shown(sheet["total_bytes"]), sheet["fits"]) == ("28.7", True)
