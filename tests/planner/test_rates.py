"""What a card reaches: shares of its peaks, the measured best product of its kind, and how wide the interval is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.time.rates import (
    CEILING_ERROR,
    DATA_SHEET_ERROR,
    FITTED_CARDS,
    FITTED_ERROR,
    FLASH_2_ON_HOPPER,
    Rates,
    rates_of,
)
from profiles.card_shares import load_card_shares, matmul_ceiling
from profiles.cards import find_card
from tests.planner.replay import problem_of
from tests.planner.test_links import H100


def rates(card: str) -> Rates:
    found = problem_of({"model": "Qwen/Qwen3-8B", "machine": f"1x{card}"}).judge.time.rates
    assert found is not None
    return found


def test_the_shares_of_an_h100_by_hand() -> None:
    """Shares of 989.4 TFLOP/s in bf16, 66.9 in fp32 and 3.35 TB/s."""
    found = rates("H100-80GB")
    assert found.matmul == pytest.approx(722.3e12, rel=1e-3)  # 0.73
    assert found.attention == pytest.approx(544.2e12, rel=1e-3)  # 0.55
    assert found.masked_attention == pytest.approx(197.9e12, rel=1e-3)  # 0.2
    assert found.elementwise == pytest.approx(1.675e12, rel=1e-3)  # 0.5
    assert found.streaming == pytest.approx(2.881e12, rel=1e-3)  # 0.86
    assert found.fp32_matmul == pytest.approx(52.85e12, rel=0.01)  # 0.79


def test_a_measured_product_scales_the_share() -> None:
    """271.2 of 312 TFLOP/s on A100 SXM where H100 SXM gives 794.5 of 989."""
    share = 0.73 * (271.2 / 312) / (794.5 / 989)
    assert rates("A100-80GB").matmul == pytest.approx(share * 312e12, rel=0.002)
    assert rates("B200").matmul == pytest.approx(0.73 * (1745 / 2250) / (794.5 / 989) * 2250e12, rel=0.002)
    assert rates("RTX4090").matmul == pytest.approx(0.73 * 165.2e12)


def test_measured_cards_are_in_the_table() -> None:
    for card, share in load_card_shares().items():
        assert find_card(card).id == card
        assert 0.7 < share.ceiling < 0.9
        assert share.note
    assert matmul_ceiling("RTX4090") is None


def test_flash_attention_2_is_slow_on_hopper() -> None:
    """606 s instead of 373 s for a million tokens, of which 27 s are not attention; 335 of 989 TFLOP/s."""
    assert pytest.approx(FLASH_2_ON_HOPPER, abs=0.005) == 0.55 * (373 - 27) / (606 - 27)
    assert pytest.approx(FLASH_2_ON_HOPPER, abs=0.01) == 335 / 989
    hopper, ampere = rates("H100-80GB"), rates("A100-80GB")
    assert hopper.attention_of("flash_attention_2") == pytest.approx(0.33 * 989.4e12)
    assert hopper.attention_of("sdpa") == pytest.approx(0.55 * 989.4e12)
    assert ampere.attention_of("flash_attention_2") == ampere.attention_of("sdpa")


def test_the_less_is_known_of_a_card_the_wider_its_interval() -> None:
    assert {find_card(card).id for card in FITTED_CARDS} == set(FITTED_CARDS)
    assert [rates(card).error for card in ("H100-80GB", "A100-80GB", "RTX4090")] == [
        FITTED_ERROR,
        CEILING_ERROR,
        DATA_SHEET_ERROR,
    ]


@pytest.mark.parametrize("missing", ["matmul_flops", "bandwidth"])
def test_no_rates_without_peaks(missing: str) -> None:
    assert rates_of(replace(H100, **{missing: None})) is None
