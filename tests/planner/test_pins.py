"""Pins: words and numbers as flags and YAML give them, into typed values, or one line of what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from planner.pins import PARSERS, PinError, parse_pins


@pytest.mark.parametrize(
    ("knob", "given", "value"),
    [
        ("recompute", "full", "full"),
        ("recompute", " every_2 ", "every_2"),
        ("cp", "4", 4),
        ("gpus", 8, 8),
        ("offload", "activations,optimizer", frozenset({"activations", "optimizer"})),
        ("offload", "activations, params", frozenset({"activations", "params"})),
        ("offload", ["optimizer"], frozenset({"optimizer"})),
        ("offload", "", frozenset[str]()),
        ("offload", list[str](), frozenset[str]()),
        # A bare no in YAML is False; as a precision it is the word.
        ("mixed_precision", False, "no"),
        ("mixed_precision", "bf16", "bf16"),
        ("optimizer", "adamw_8bit", "adamw_bnb_8bit"),
        ("optimizer", " sgd ", "sgd"),
        ("precision", "bf16", "bf16"),
        ("precision", " fp8-ao-rowwise ", "fp8-ao-rowwise"),
        ("precision", "mxfp4-sr:emulated", "mxfp4-sr:emulated"),
        ("micro_batch", 1_000_000, 1_000_000),
    ],
)
def test_values(knob: str, given: Any, value: Any) -> None:
    assert parse_pins({knob: given}) == {knob: value}


@pytest.mark.parametrize(
    ("knob", "given", "message"),
    [
        ("colour", "red", "colour is not a knob; knobs: loss_path, recompute"),
        ("recompute", "sometimes", "recompute=sometimes is not a value of this knob; choose one of none, full"),
        ("recompute", False, "recompute=False is not a value"),
        ("weights", "fp8", "choose one of fp32, bf16, fp16"),
        ("cp", 0, "cp=0 is not a size; give a whole number from 1"),
        ("cp", "two", "cp=two is not a size"),
        ("cp", 1.5, "cp=1.5 is not a size"),
        ("gpus", True, "gpus=True is not a size"),
        ("gpus", 1_000_001, "gpus=1000001 is not a size"),
        ("offload", "activations,disk", "offload=disk is not a value of this knob; use a subset of activations"),
        ("optimizer", "adamax", "optimizer: optimizer 'adamax' is not known; known: adafactor"),
        ("precision", "fp8", "precision=fp8: no precision route 'fp8'; known: bf16, fp8-te-delayed"),
        ("precision", "", "precision=: no precision route ''; known: bf16"),
        ("precision", "bf16:emulated", "bf16 needs no emulation: pin precision=bf16"),
        ("recompute", "x" * 99, "recompute=" + "x" * 37 + "... is not a value"),
    ],
)
def test_what_is_wrong(knob: str, given: Any, message: str) -> None:
    with pytest.raises(PinError) as caught:
        parse_pins({knob: given})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pin_without_a_value_leaves_its_knob_open() -> None:
    assert parse_pins({"cp": None, "recompute": "none"}) == {"recompute": "none"}


def test_every_knob_of_a_choice_can_be_pinned() -> None:
    """All but what the job itself says, and the number of GPUs beside."""
    from planner.choice import Choice

    knobs = set(Choice.__dataclass_fields__) - {"method", "packing"}
    assert set(PARSERS) == knobs | {"gpus"}
