"""Closed forms by hand arithmetic: what a layer keeps per token, and what it needs while it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.memory.coefficients import Affine, Coefficients
from planner.memory.formula import CHECKED_ERROR, UNCHECKED_ERROR, ActivationOptions, formula_coefficients
from tests.planner.replay import bundled

BF16 = ActivationOptions(residual_bytes=2, compute_bytes=2, trains_base=True)
AUTOCAST = replace(BF16, residual_bytes=4)
LORA = replace(BF16, trains_base=False, lora_targets="all-linear", lora_r=16, adapter_bytes=2)

H, F, Q, K, HEADS = 4096, 12_288, 4096, 1024, 32
"""Qwen3-8B."""


def coefficients(model: str = "Qwen/Qwen3-8B", options: ActivationOptions = BF16) -> Coefficients:
    return formula_coefficients(bundled(model), options)


def none_kept(model: str = "Qwen/Qwen3-8B", options: ActivationOptions = BF16) -> Affine:
    (layer,) = coefficients(model, options).layers
    kept = layer.none.kept
    assert isinstance(kept, Affine)
    return kept


def test_what_a_bf16_layer_keeps() -> None:
    """Qwen3-8B, without recompute:

    two norms over H keep an fp32 copy (4) and the normalised value (2); q and k norms over Q and K the same; linears
    keep their common input H twice (2 bytes), attention keeps q, k, v and its output, and 4 bytes a head of
    statistics; the MLP keeps gate, activated gate, up and their product.
    """
    norms = 2 * 6 * H
    head_norms = 6 * (Q + K)
    inputs = 2 * 2 * H
    attention = 2 * (Q + K + K + Q) + 4 * HEADS
    mlp = 4 * 2 * F
    assert none_kept().per_token == norms + head_norms + inputs + attention + mlp
    assert none_kept().constant == none_kept().per_token_pair == 0


def test_autocast_casts_each_linears_input_on_its_own() -> None:
    """fp32 stream: norms keep 4 + 4, and five linears that read H keep a bf16 copy each."""
    norms = 2 * 8 * H + 8 * (Q + K)
    inputs = 2 * 3 * H + 2 * 2 * H
    attention = 2 * (Q + K + K + Q) + 4 * HEADS
    assert none_kept(options=AUTOCAST).per_token == norms + inputs + attention + 8 * F


def test_a_frozen_linear_keeps_no_input() -> None:
    """LoRA in bf16 on all linears: norms keep the fp32 value alone, adapters the inputs they share and rank-16 values.

    q, k and v share one H, gate and up another, o reads what attention keeps anyway, down the product F.
    """
    norms = 2 * 4 * H + 4 * (Q + K)
    attention = 2 * (Q + K + K + Q) + 4 * HEADS
    mlp = 3 * 2 * F
    adapters = 7 * 2 * 16 + 2 * (H + H + F)
    assert none_kept(options=LORA).per_token == norms + attention + mlp + adapters


def test_fp32_adapters_keep_a_cast_for_every_module() -> None:
    fp32 = replace(LORA, adapter_bytes=4)
    inputs = 3 * H + Q + 2 * H + F
    assert none_kept(options=fp32).per_token - none_kept(options=LORA).per_token == 2 * inputs - 2 * (H + H + F)
    dropped = replace(LORA, lora_dropout=True)
    # Dropout keeps what it lets through, and a mask of one byte a value.
    assert none_kept(options=dropped).per_token - none_kept(options=fp32).per_token == inputs


def test_an_fp32_adapter_on_the_down_projection_makes_backward_wider() -> None:
    """Three bytes a value of F more than one in bf16; adapters elsewhere leave the MLP alone."""

    def widening(targets: str | tuple[str, ...]) -> float:
        found: list[float] = []
        for width in (2, 4):
            (layer,) = coefficients(options=replace(LORA, lora_targets=targets, adapter_bytes=width)).layers
            assert isinstance(layer.full.backward, Affine)
            found.append(layer.full.backward.per_token)
        return found[1] - found[0]

    assert widening(("q_proj",)) == 0
    assert widening(("down_proj",)) == 3 * F


@pytest.mark.parametrize(("targets", "kept"), [(("q_proj", "v_proj"), H), (("o_proj",), 0), (("down_proj",), F)])
def test_adapters_keep_what_their_modules_read(targets: tuple[str, ...], kept: int) -> None:
    few = none_kept(options=replace(LORA, lora_targets=targets)).per_token
    bare = none_kept(options=replace(LORA, lora_targets=None)).per_token
    assert few - bare == 2 * kept + len(targets) * 2 * 16


def test_recompute_keeps_the_layers_input() -> None:
    (layer,) = coefficients().layers
    assert layer.full.kept == Affine(2 * H)
    # Selective recompute keeps attention's output and its statistics as well.
    assert layer.selective.kept == Affine(2 * H + 2 * Q + 4 * HEADS)
    (wide,) = coefficients(options=AUTOCAST).layers
    assert wide.full.kept == Affine(4 * H)


def test_backward_of_a_recomputed_layer() -> None:
    """Everything kept once more, the gradient of the output, two gradients of width F; and two weight gradients."""
    (layer,) = coefficients().layers
    backward = layer.full.backward
    assert isinstance(backward, Affine)
    assert backward.per_token == none_kept().per_token + 2 * H + 2 * 2 * F
    assert backward.constant == 2 * 2 * H * F
    attention = layer.full.attention_backward
    assert isinstance(attention, Affine)
    # When attention runs backward, the MLP's tensors are gone.
    mlp = 8 * F + 2 * H
    assert attention.per_token == none_kept().per_token - mlp + 2 * H + 2 * (Q + K + K + Q)


def test_four_mlp_tensors_at_a_million_tokens() -> None:
    """Qwen3-4B: 1,048,576 tokens x 9,728 x 2 bytes, four times, are 76 GiB (TRL's long-context guide)."""
    (layer,) = coefficients("Qwen/Qwen3-4B").layers
    without = 2 * 2560
    for kept, share in ((1_048_576, 76), (262_144, 19)):
        found = layer.none.kept.at(kept, kept)
        attention_alone = layer.full.attention_backward
        assert isinstance(attention_alone, Affine)
        widest = 2 * 2560 + 2 * (4096 + 1024 + 1024 + 4096)
        mlp = found - (attention_alone.per_token - widest) * kept - without * kept
        assert mlp / 2**30 == pytest.approx(share, rel=0.001)


def test_one_saved_tensor_per_layer_at_98304_tokens() -> None:
    (layer,) = coefficients("Qwen/Qwen3-4B").layers
    assert layer.full.kept.at(98_304, 98_304) == 503_316_480
    assert pytest.approx(0.469, abs=0.0005) == 503_316_480 / 2**30


def test_gemma_norms_keep_their_value_in_fp32() -> None:
    """Gemma multiplies by 1 + weight in fp32: 4 + 4 bytes over H, and over each q and k head."""
    architecture = bundled("google/gemma-3-1b-pt")
    kind = architecture.kinds[0]
    gemma = coefficients("google/gemma-3-1b-pt").layers[0].none.kept
    renamed = formula_coefficients(replace(architecture, model_type="llama"), BF16).layers[0].none.kept
    assert isinstance(gemma, Affine) and isinstance(renamed, Affine)
    widths = kind.num_norms * architecture.hidden + (kind.heads + kind.kv_heads) * kind.head_dim
    assert kind.num_norms == 4
    assert gemma.per_token - renamed.per_token == 2 * widths


def test_a_mask_repeats_keys_and_values_and_becomes_a_bias() -> None:
    plain, masked = none_kept(), none_kept(options=replace(BF16, masked=True))
    # Keys and values in 32 heads instead of 8, and the unrepeated ones as well.
    assert masked.per_token - plain.per_token == 2 * ((Q + Q) - (K + K)) + 2 * (K + K)
    assert (plain.per_token_pair, masked.per_token_pair) == (0, 2)
    flash = none_kept(options=replace(BF16, masked=True, attention="flash_attention_2"))
    assert flash == plain
    cpu = none_kept(options=replace(BF16, masked=True, mask_bias=False))
    assert cpu.per_token_pair == 0


@pytest.mark.parametrize(
    ("model", "options", "mask"),
    [
        ("Qwen/Qwen3-8B", BF16, 0),
        ("Qwen/Qwen3-8B", replace(BF16, masked=True), 1),
        ("Qwen/Qwen3-8B", replace(BF16, attention="eager"), 2),
        ("google/gemma-3-1b-pt", BF16, 1),
        ("google/gemma-3-1b-pt", replace(BF16, masked=True), 2),
        ("google/gemma-2-2b", replace(BF16, attention="eager"), 4),
        ("google/gemma-3-1b-pt", replace(BF16, attention="flash_attention_2"), 0),
    ],
)
def test_when_a_mask_is_made(model: str, options: ActivationOptions, mask: int) -> None:
    """Bytes per pair of positions, for the whole model, as traces of the real classes have them."""
    saved = coefficients(model, options).model_saved
    assert isinstance(saved, Affine)
    assert saved.per_token_pair == mask


def test_eager_attention_materialises_scores() -> None:
    eager = none_kept(options=replace(BF16, attention="eager"))
    # fp32 softmax and its bf16 copy for each of 32 heads.
    assert eager.per_token_pair == 32 * 6
    (layer,) = coefficients(options=replace(BF16, attention="eager")).layers
    backward = layer.full.backward
    assert isinstance(backward, Affine)
    assert backward.per_token_pair == 2 * 32 * 6
    gemma = formula_coefficients(bundled("google/gemma-2-2b"), replace(BF16, attention="eager")).layers[0].none.kept
    assert isinstance(gemma, Affine)
    # The soft cap keeps its tanh: 8 heads.
    assert gemma.per_token_pair == 8 * 8


def test_linear_attention_has_no_pairs() -> None:
    architecture = bundled("Qwen/Qwen3.5-4B")
    index = next(i for i, kind in enumerate(architecture.kinds) if kind.attention == "linear")
    layer = coefficients("Qwen/Qwen3.5-4B").layers[index]
    kept = layer.none.kept
    assert isinstance(kept, Affine)
    assert kept.per_token_pair == 0
    projections = [m for m in architecture.kinds[index].linears if m.role == "attention"]
    width = sum(m.out_features for m in projections[:-1])
    hidden = architecture.hidden
    mlp = 2 * hidden + 4 * 2 * architecture.kinds[index].intermediate
    norms = 2 * 6 * hidden
    assert kept.per_token == norms + 2 * hidden + 4 * 2 * width + mlp


def test_mixtures_keep_rows_once_per_chosen_expert() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of width 768 over H 2,048, and fp32 probabilities of the router."""
    h, q, k = 2048, 4096, 512
    norms = 2 * 6 * h + 6 * (q + k)
    attention = 2 * h + 2 * (q + k + k + q) + 4 * 32
    experts = 2 * 8 * (4 * 768 + 3 * h) + 8 * 128
    assert none_kept("Qwen/Qwen3-30B-A3B").per_token == norms + attention + experts


def test_adapted_experts_are_merged_on_every_forward() -> None:
    """PEFT merges the gate-and-up stack, two thirds of the experts' weights, and its update beside it."""
    options = replace(LORA, lora_targets="all-linear")
    (layer,) = coefficients("Qwen/Qwen3-30B-A3B", options).layers
    stack = 2 * 128 * 3 * 2048 * 768 * 2 / 3
    forward, kept = layer.full.forward, layer.none.kept
    assert isinstance(forward, Affine) and isinstance(kept, Affine)
    assert forward.constant == pytest.approx(2 * stack)
    assert kept.constant == pytest.approx(stack)
    (attention,) = coefficients("Qwen/Qwen3-30B-A3B", replace(LORA, lora_targets=("q_proj",))).layers
    assert isinstance(attention.full.forward, Affine)
    assert attention.full.forward.constant == 0


def test_outside_the_layers() -> None:
    """Two int64 a token, two rotary tables of 128 values, and the final norm with its output."""
    found = coefficients()
    assert found.model_saved == Affine(16 + 2 * 128 * 2)
    assert found.final_norm_saved == Affine(4 * H + 2 * H + 2 * H)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("Qwen/Qwen3-8B", CHECKED_ERROR),
        ("google/gemma-3-1b-pt", CHECKED_ERROR),
        ("allenai/OLMo-2-1124-7B", UNCHECKED_ERROR),
        ("openai/gpt-oss-20b", UNCHECKED_ERROR),
    ],
)
def test_families_that_were_not_traced_have_a_wider_interval(model: str, error: float) -> None:
    found = coefficients(model)
    assert (found.relative_error, found.evidence) == (error, "formula")


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "google/gemma-3-1b-pt", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-4B"])
@pytest.mark.parametrize("changes", [{}, {"residual_bytes": 4}, {"masked": True}, {"attention": "eager"}])
def test_orders_that_must_hold(model: str, changes: dict[str, Any]) -> None:
    """Recompute keeps less and needs more in backward; attention alone is never the widest moment."""
    for layer in coefficients(model, replace(BF16, **changes)).layers:
        for tokens in (512, 32_768):
            kept = [mode.kept.at(tokens, tokens) for mode in (layer.full, layer.selective, layer.none)]
            assert kept == sorted(kept)
            assert layer.full.backward.at(tokens, tokens) > layer.none.backward.at(tokens, tokens)
            for mode in (layer.none, layer.full, layer.selective):
                assert mode.attention_backward.at(tokens, tokens) <= mode.backward.at(tokens, tokens)


def test_affine_arithmetic() -> None:
    total = Affine(2.0, 10.0, 0.5) + Affine(1.0, 5.0, 0.25)
    assert total == Affine(3.0, 15.0, 0.75)
    assert total.at(100, 40) == 300 + 15 + 3000
