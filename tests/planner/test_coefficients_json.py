from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from planner.architecture import Architecture, LayerKind
from planner.config.reader import read_architecture
from planner.memory.coefficients import Affine, Highest, Windowed
from planner.memory.coefficients_json import (
    BadDocument,
    CoefficientDocument,
    coefficients_of,
    option_key,
    pack_line,
    shape_hash,
)
from planner.memory.formula import ActivationOptions, formula_coefficients

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
FULL = ActivationOptions(residual_bytes=2, compute_bytes=2, trains_base=True, adapter_bytes=2)
LORA = replace(FULL, trains_base=False, lora_targets="all-linear", lora_r=16, adapter_bytes=4)


def read(**changes: Any) -> Architecture:
    return read_architecture({**LLAMA, **changes}, model="small", origin="config.json")


def mode(kept: float) -> dict[str, Any]:
    return {
        "kept": [[kept, 1000]],
        "forward": [[10]],
        "backward": [[100], [50, 4000], [0, 0, 0.5]],
        "attention_backward": [[20]],
        "work": {"matmul_flops": [7], "launches": [0, 150]},
    }


def document(sets: dict[str, Any], architecture: Architecture | None = None) -> CoefficientDocument:
    found = architecture or read()
    return CoefficientDocument(
        model="small",
        shape=shape_hash(found),
        kinds=tuple(kind.name for kind in found.kinds),
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
        rank=16,
        window=0,
        sets=sets,
    )


def entry() -> dict[str, Any]:
    layer = {"none": mode(3), "full": mode(2), "selective": mode(2.5)}
    return {"model_saved": [[16]], "final_norm_saved": [[8, 0, 1]], "layers": [layer]}


def test_lines_become_functions_of_tokens() -> None:
    notes: list[str] = []
    found = coefficients_of(document({"bf16/full/sdpa": entry()}), read(), FULL, notes)
    assert found is not None
    none = found.layers[0].none
    assert none.kept == Affine(3, 1000)
    # 100 tokens: 10,000 or 5,000 + 4,000 or 0.5 x 100 x 100; 50 tokens: 5,000 or 6,500 or 1,250.
    assert isinstance(none.backward, Highest)
    assert (none.backward.at(100, 100), none.backward.at(50, 50)) == (10_000, 6_500)
    assert none.backward.at(1000, 1000) == 500_000
    assert found.final_norm_saved.at(10, 10) == 180
    assert found.evidence == "traced"
    assert found.source == "trace of the real layers with torch 2.13.0, transformers 5.24.0"
    assert found.work[0].none.launches.at(12345, 1) == 150
    assert notes == []


def test_adapters_of_another_rank_follow_the_slope() -> None:
    traced = entry()
    traced["layers"][0]["none"]["kept"] = [[3, 1000, 0, 2, 100]]
    documented = document({"bf16/lora-fp32:all-linear/sdpa": traced})
    found = coefficients_of(documented, read(), replace(LORA, lora_r=20), [])
    assert found is not None
    # Four ranks above sixteen: 3 + 4 x 2 bytes a token, 1000 + 4 x 100 bytes in all.
    assert found.layers[0].none.kept.at(1, 1) == 11 + 1400
    lower = coefficients_of(documented, read(), replace(LORA, lora_r=15), [])
    assert lower is not None
    assert lower.layers[0].none.kept.at(1, 1) == 1 + 900


def test_shorter_sequences_than_the_window_take_other_lines() -> None:
    traced = entry()
    traced["model_saved"] = {"shorter": [[16]], "longer": [[16, 0, 1]]}
    found = coefficients_of(replace(document({"bf16/full/sdpa": traced}), window=100), read(), FULL, [])
    assert found is not None
    assert found.model_saved == Windowed(100, Affine(16), Affine(16, 0, 1))
    # transformers makes the mask from the window's own length on.
    assert [found.model_saved.at(s, s) for s in (99, 100)] == [99 * 16, 100 * 16 + 100 * 100]


def test_what_is_not_affine_is_left_to_closed_forms_and_said() -> None:
    notes: list[str] = []
    traced = entry() | {"not_affine": ["0.none.kept (+3.0%)"]}
    found = coefficients_of(document({"bf16/full/sdpa": traced}), read(), FULL, notes)
    assert found is not None
    assert found.layers == formula_coefficients(read(), FULL).layers
    assert notes == ["layers of kind full are priced by closed forms: their trace is not affine in the tokens"]


def test_what_is_not_affine_outside_the_layers_is_left_to_closed_forms_and_said() -> None:
    notes: list[str] = []
    traced = entry() | {"model_saved_none": [[1]], "not_affine": ["model_saved (+3.0%)"]}
    found = coefficients_of(document({"bf16/full/sdpa": traced}), read(), FULL, notes)
    assert found is not None
    closed = formula_coefficients(read(), FULL)
    assert (found.model_saved, found.final_norm_saved) == (closed.model_saved, closed.final_norm_saved)
    assert found.model_saved_none is None
    assert found.layers[0].none.kept == Affine(3, 1000)
    assert notes == ["what is kept outside the layers is priced by closed forms: its trace is not affine in the tokens"]


def test_without_recompute_other_bytes_are_kept_outside_the_layers() -> None:
    found = coefficients_of(document({"bf16/full/sdpa": entry() | {"model_saved_none": [[-7]]}}), read(), FULL, [])
    assert found is not None
    assert (found.model_saved, found.model_saved_none) == (Affine(16), Affine(-7))


def test_refused_and_absent_sets_give_nothing() -> None:
    documented = document({"bf16/full/sdpa": {"refused": "no such class"}})
    assert coefficients_of(documented, read(), FULL, []) is None
    assert coefficients_of(documented, read(), LORA, []) is None


def test_json_comes_back_whole() -> None:
    documented = document({"bf16/full/sdpa": entry()})
    assert CoefficientDocument.from_json(copy.deepcopy(documented.to_json())) == documented


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ([], "no JSON object"),
        ({"schema": "trlfit.plan/1"}, "'trlfit.plan/1'"),
        ({"schema": "trlfit.coefficients/1", "model": "x"}, "shape is missing"),
        ({"schema": "trlfit.coefficients/1", "model": 3}, "model is missing or no str"),
    ],
)
def test_other_documents_are_told_apart(broken: Any, said: str) -> None:
    with pytest.raises(BadDocument, match=said):
        CoefficientDocument.from_json(broken)


@pytest.mark.parametrize("damage", ["layers", "model_saved", "kept", "kinds"])
def test_damaged_sets_are_told(damage: str) -> None:
    traced: dict[str, Any] = copy.deepcopy(entry())
    if damage == "kept":
        traced["layers"][0]["full"]["kept"] = "many"
    elif damage == "kinds":
        traced["layers"] = traced["layers"] * 2
    else:
        del traced[damage]
    with pytest.raises(BadDocument):
        coefficients_of(document({"bf16/full/sdpa": traced}), read(), FULL, [])


def test_names_depth_and_vocabulary_do_not_change_the_shape() -> None:
    same = [
        read(num_hidden_layers=30),
        read(vocab_size=5000, tie_word_embeddings=True),
        read(max_position_embeddings=4096, rope_theta=1e6, torch_dtype="bfloat16", hidden_act="silu"),
        replace(read(), model="other"),
    ]
    assert {shape_hash(architecture) for architecture in same} == {shape_hash(read())}


def test_sizes_and_operators_change_the_shape() -> None:
    others = [
        read(),
        read(hidden_size=128),
        read(intermediate_size=256),
        read(num_key_value_heads=4),
        read(attention_bias=True),
        read(attention_dropout=0.1),
        read(hidden_act="relu2"),
        read(hidden_act="gelu_new"),
    ]
    assert len({shape_hash(architecture) for architecture in others}) == len(others)


def test_option_keys_hold_what_matters() -> None:
    plain, windowed = read(), read(model_type="mistral", sliding_window=32)
    norms = read(model_type="stablelm")
    wide = LayerKind(name="full", attention="full", linears=(), norm_parameters=0, head_dim=192, value_head_dim=128)
    latent = replace(read(), kinds=(wide,))
    keys = [
        (plain, FULL, "bf16/full/sdpa"),
        (plain, replace(FULL, attention="flash_attention_2", masked=True), "bf16/full/sdpa"),
        (plain, replace(FULL, residual_bytes=4), "fp32+bf16/full/sdpa"),
        (plain, replace(FULL, residual_bytes=4, compute_bytes=4), "fp32/full/sdpa"),
        (plain, replace(FULL, masked=True), "bf16/full/sdpa/masked"),
        (plain, replace(FULL, masked=True, mask_bias=False), "bf16/full/sdpa/masked/cpu"),
        (plain, replace(FULL, mask_bias=False), "bf16/full/sdpa"),
        (plain, LORA, "bf16/lora-fp32:all-linear/sdpa"),
        (plain, replace(LORA, lora_r=64), "bf16/lora-fp32:all-linear/sdpa"),
        (plain, replace(LORA, lora_targets=("q_proj", "v_proj")), "bf16/lora-fp32:q_proj,v_proj/sdpa"),
        (plain, replace(LORA, adapter_bytes=2, quantised=True), "bf16/lora-bf16:all-linear/quantised/sdpa"),
        (plain, replace(FULL, autocast=False), "bf16/full/sdpa"),
        (plain, replace(LORA, autocast=False), "bf16/lora-fp32:all-linear/no-autocast/sdpa"),
        (norms, FULL, "bf16/full/sdpa"),
        (norms, replace(FULL, autocast=False), "bf16/full/no-autocast/sdpa"),
        (norms, replace(FULL, mask_bias=False), "bf16/full/sdpa"),
        (latent, replace(FULL, mask_bias=False), "bf16/full/sdpa/cpu"),
        (norms, replace(FULL, residual_bytes=4), "fp32+bf16/full/sdpa"),
        (read(hidden_act="relu2"), replace(FULL, autocast=False), "bf16/full/no-autocast/sdpa"),
        (read(hidden_act="gelu"), replace(FULL, autocast=False), "bf16/full/sdpa"),
        (windowed, FULL, "bf16/full/sdpa"),
        (windowed, replace(FULL, mask_bias=False), "bf16/full/sdpa/cpu"),
        (windowed, replace(FULL, attention="flash_attention_2"), "bf16/full/flash_attention_2"),
    ]
    assert [option_key(architecture, options) for architecture, options, _ in keys] == [key for _, _, key in keys]


def test_numbers_are_stored_short() -> None:
    assert pack_line((8192.0, 0.0, 0.0)) == [8192]
    assert pack_line((0.333333, 123456789.0, 0.0)) == [0.33, 123460000]
    assert pack_line((1.0, 0.0, 2.0, 0.0, 0.0)) == [1, 0, 2]
    assert pack_line((1.0, 0.0, 0.0, 14.0, 151552.0)) == [1, 0, 0, 14, 151550]
