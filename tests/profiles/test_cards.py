from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiles.cards import (
    CardNotFound,
    card_for_nvml_name,
    find_card,
    load_cards,
    nearest,
)

MIB = 1024**2


def test_every_card_has_figures_and_sources() -> None:
    cards = load_cards()
    assert len(cards) >= 34
    assert len({card.id for card in cards}) == len(cards)
    for card in cards:
        assert card.sources, card.id
        assert all(len(source) > 20 for source in card.sources), card.id
        assert 8 * 1024**3 < card.nvml_bytes < 512 * 1024**3
        assert 0.2 < card.driver_bytes / 1024**3 < 1.1, card.id
        assert card.hbm_gb_s > 100
        # A tensor core never does less than the plain cores beside it.
        assert (card.bf16_tflops or card.fp16_tflops or 0) >= card.fp32_tflops
        # No bf16 before Ampere, fp8 from Ada on, fp4 from Blackwell on.
        major_minor = tuple(map(int, card.compute_capability.split(".")))
        assert (card.bf16_tflops is not None) == (major_minor >= (8, 0)), card.id
        assert (card.fp8_tflops is not None) == (major_minor >= (8, 9)), card.id
        assert (card.fp4_tflops is not None) == (major_minor >= (10, 0)), card.id
        assert (card.nvlink == "none") == (card.nvlink_total_gb_s == 0), card.id


def test_published_figures_of_known_cards() -> None:
    # NVIDIA's data sheets: H100 SXM 1,979 sparse = 989.4 dense bf16, 3.35 TB/s, 700 W.
    h100 = find_card("H100-80GB")
    assert (h100.bf16_tflops, h100.hbm_gb_s, h100.tdp_w) == (989.4, 3350, 700)
    assert h100.nvml_bytes == 81559 * MIB
    # "GPU 0 has a total capacity of 79.11 GiB", as torch's OutOfMemoryError has it.
    assert (h100.nvml_bytes - h100.driver_bytes) / 1024**3 == pytest.approx(79.11, abs=0.001)
    a100 = find_card("A100-80GB")
    assert (a100.bf16_tflops, a100.fp8_tflops, a100.hbm_gb_s) == (312, None, 2039)
    assert find_card("T4").bf16_tflops is None


@pytest.mark.parametrize(
    ("text", "card_id"),
    [
        ("H100-80GB", "H100-80GB"),
        ("h100_80gb", "H100-80GB"),
        ("h100 80 gb", "H100-80GB"),
        ("H100-80", "H100-80GB"),
        ("H100", "H100-80GB"),
        ("h100-sxm", "H100-80GB"),
        ("H100-PCIe", "H100-80GB-PCIe"),
        ("h100nvl", "H100-NVL"),
        ("a100-40gb", "A100-40GB"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("rtx 4090", "RTX4090"),
        ("4090", "RTX4090"),
        ("GeForce RTX 3090", "RTX3090"),
        ("RTX-4060-Ti", "RTX4060Ti-16GB"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("l40s", "L40S"),
        ("A10", "A10"),
        ("rtx a6000", "A6000"),
        ("6000ada", "RTX6000Ada"),
    ],
)
def test_a_card_is_found_however_it_is_written(text: str, card_id: str) -> None:
    assert find_card(text).id == card_id


def test_every_id_alias_and_product_name_finds_its_own_card() -> None:
    for card in load_cards():
        for text in (card.id, card.id.lower(), card.id.replace("-", "_"), *card.aliases):
            assert find_card(text).id == card.id
        for name in card.nvml_names:
            assert find_card(name).id == card.id
            found = card_for_nvml_name(name, card.nvml_bytes)
            assert found is not None and found.id == card.id


def test_a_family_of_unlike_cards_is_ambiguous() -> None:
    with pytest.raises(CardNotFound, match="may be") as caught:
        find_card("A100")
    assert caught.value.ambiguous
    assert set(caught.value.candidates) == {
        "A100-40GB",
        "A100-80GB",
        "A100-40GB-PCIe",
        "A100-80GB-PCIe",
    }
    with pytest.raises(CardNotFound, match="V100-16GB, V100-32GB"):
        find_card("v100")


@pytest.mark.parametrize("text", ["L40", "RTX 4080 SUPER", "H20", "A1", "RTX40", "", "-", "x" * 9999])
def test_other_products_are_not_taken_for_a_neighbour(text: str) -> None:
    with pytest.raises(CardNotFound):
        find_card(text)


def test_nearest_ids() -> None:
    assert nearest("H100-80GBB")[0] == "H100-80GB"
    assert nearest("RTX4900")[0] == "RTX4090"
    assert "L40S" in nearest("L40")
    assert nearest("zzzzqqqq") == ()


@pytest.mark.parametrize(
    ("name", "total_mib", "card_id"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("A100-SXM4-40GB", 40537, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB-PCIe"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("NVIDIA H100 PCIe", 81559, "H100-80GB-PCIe"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL"),
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA A10", 23028, "A10"),
        ("NVIDIA A10", 24564, "A10"),  # ECC off
        ("NVIDIA A10G", 23028, "A10G"),
        ("NVIDIA RTX A6000", 46068, "A6000"),  # ECC on
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX4060Ti-16GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, None),
        ("NVIDIA GeForce RTX 3080", 10240, "RTX3080"),
        ("NVIDIA GeForce RTX 3080", 12288, None),
        ("NVIDIA GeForce RTX 3080 Ti", 12288, None),
        ("NVIDIA GeForce RTX 3080 Ti", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
        ("NVIDIA GeForce RTX 3060 Ti", 8192, None),
        ("NVIDIA L40", 46068, None),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA L4", 23034, "L4"),
        ("NVIDIA H200 NVL", 143771, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20096, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, "H100-80GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "RTXPRO6000-Server"),
        ("GRID A100D-40C", 40960, None),
        ("", 40960, None),
    ],
)
def test_product_names_of_nvml(name: str, total_mib: int | None, card_id: str | None) -> None:
    total_bytes = None if total_mib is None else total_mib * MIB
    found = card_for_nvml_name(name, total_bytes)
    assert (found.id if found else None) == card_id


def test_the_table_names_no_source_that_it_does_not_explain() -> None:
    import profiles.cards

    table = json.loads(Path(profiles.cards.__file__).with_name("cards.json").read_text())
    used = {key for entry in table["gpus"] for key in entry["sources"]}
    assert used == set(table["sources"])
