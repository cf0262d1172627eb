"""Readings: what the sources of recorded runs say elsewhere than where a row was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a source says elsewhere than where the row was read, and no knob of the row can say."""

    why: str
    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    lora_dropout: float | None = None
    adapters_fp32: bool = False
    """Adapters of a quantised base rest and multiply in fp32."""
    residual_fp32: bool = False
    """The residual stream is fp32 though the embedding is bf16."""
    padded: bool = False
    """Rows of a batch differ in length, so it carries a mask."""
    first_step: bool = False
    """The longest length is of one step, whose activations are gone before AdamW makes its states."""
    fused_adapters: bool = False
    """Adapters are multiplied by fused kernels in the dtype of the base: PEFT's operators, which a trace counts, do not
    run; time has the closed forms of adapters in 2 bytes."""
    mean_tokens: int | None = None
    """Tokens of a row on average, where ``seq_len`` is only the longest: what a step's time goes by."""


_BF16_UNDER_FSDP2 = "its own accelerate config says mixed_precision bf16, so FSDP2 holds fp32 shards"
READINGS: dict[str, Reading] = {
    "peft-mm-*": Reading(
        why="the result files count 4,198,051 tokens in 20,000 rows; rows of a batch are of like length",
        mean_tokens=210,
    ),
    "trl-long-qwen8b-1m-*": Reading(why=_BF16_UNDER_FSDP2, pins={"mixed_precision": "bf16"}),
    "acc-fsdp2-fixed": Reading(
        why="the benchmark's script says mixed_precision bf16", pins={"mixed_precision": "bf16"}
    ),
    "fms-*lora-g*": Reading(
        why="the scenarios (scripts/benchmarks/scenarios-*.yaml) say lora_dropout 0.1", lora_dropout=0.1
    ),
    "fms-*-qlora-g1-*": Reading(
        why="PEFT 0.12 makes adapters fp32 and nothing casts them back: fms-acceleration adds them itself, and the "
        "peft_module_casting_to_bf16 of that TRL leaves them out",
        adapters_fp32=True,
    ),
    "fms-*-qlora-*-foak-*": Reading(
        why="sample-configurations/accelerated-peft-bnb-nf4-foak-liger-*.yaml says fused_lora: true",
        fused_adapters=True,
    ),
    "fms-granite-*-qlora-g1-*-baseline-peft-bnb": Reading(
        why="prepare_model_for_kbit_training makes norms, embeddings and head fp32 and peft_module_casting_to_bf16 all "
        "but the norms bf16 again; bitsandbytes' Linear4bit answers in the dtype of its input, so from the first MLP "
        "on the residual stream is fp32",
        residual_fp32=True,
    ),
    "trl-long-qwen4b-limit-*": Reading(
        why="one step: the guide's own figures (30 GiB with gradients and AdamW's states, 59.9 GiB at 98,304 tokens) "
        "extend to 79.8 GiB at the 163,840 that ran, and the card holds 79.2 with its context; without the states all "
        "three lengths fit and the next do not. The guide does not say so",
        first_step=True,
    ),
    "trl-115-DPO-limit-*": Reading(
        why="chosen and rejected answers differ in length, as in any set of preferences, so the pair carries masks",
        padded=True,
    ),
}
"""Pattern of row ids -> what the source says of them."""


def readings_of(row_id: str) -> list[Reading]:
    """All readings of a row."""
    return [reading for pattern, reading in READINGS.items() if fnmatch(row_id, pattern)]
