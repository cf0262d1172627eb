"""Choice: one value for every knob. The inner loop's value type, plus the words that users pin with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

LossPath = Literal["full_logits", "chunked_fp32", "chunked", "fused", "liger"]
Recompute = Literal["none", "full", "selective", "every_2", "every_3", "every_4"]
OffloadTarget = Literal["activations", "optimizer", "params"]
Sharding = Literal["none", "ddp", "fsdp", "fsdp_no_reshard", "hsdp", "zero1", "zero2", "zero3", "fsdp1"]
Weights = Literal["fp32", "bf16", "fp16"]
MixedPrecision = Literal["bf16", "fp16", "no"]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
Alters = Literal["nothing", "numerics", "method"]
Method = Literal["full", "lora", "qlora"]

LOSS_PATHS: tuple[str, ...] = get_args(LossPath)
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
OFFLOAD_TARGETS: tuple[str, ...] = get_args(OffloadTarget)
SHARDINGS: tuple[str, ...] = get_args(Sharding)

FSDP2: frozenset[str] = frozenset({"fsdp", "fsdp_no_reshard", "hsdp"})
"""Shardings that accelerate runs through ``fully_shard``."""
ZERO: frozenset[str] = frozenset({"zero1", "zero2", "zero3"})
SHARDED: frozenset[str] = FSDP2 | ZERO | {"fsdp1"}
"""Shardings that divide weights, gradients or states of the optimizer over ranks."""
_PLAIN_KINDS: dict[str, type] = {
    **dict.fromkeys(("cp", "sp", "tp", "dp_shard", "dp_replicate", "micro_batch", "grad_accum"), int),
    "packing": bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value for every knob of section "Knobs" in docs/plan.md; sizes multiply to the number of GPUs."""

    method: Method
    loss_path: LossPath
    recompute: Recompute
    offload: frozenset[OffloadTarget] = frozenset()
    sharding: Sharding = "none"
    cp: int = 1
    sp: int = 1
    tp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    micro_batch: int = 1
    grad_accum: int = 1
    optimizer: str = "adamw_torch_fused"
    weights: Weights = "fp32"
    mixed_precision: MixedPrecision = "bf16"
    attention: Attention = "sdpa"
    precision: str = "bf16"
    packing: bool = False

    @property
    def num_gpus(self) -> int:
        """Processes of the run, over all nodes."""
        return self.cp * self.sp * self.tp * self.dp_shard * self.dp_replicate

    @property
    def data_parallel(self) -> int:
        """Ranks that read different data."""
        return self.dp_shard * self.dp_replicate

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.grad_accum * self.data_parallel

    @property
    def shard_ranks(self) -> int:
        """Ranks that divide sharded states: context-parallel ranks join FSDP2's shard group, SP ranks ZeRO's."""
        if self.sharding in FSDP2 or self.sharding == "fsdp1":
            return self.dp_shard * self.cp
        if self.sharding in ZERO:
            return self.num_gpus
        return 1

    def to_json(self) -> dict[str, object]:
        """Plain JSON, knobs in a stable order."""
        out: dict[str, object] = asdict(self)
        out["offload"] = sorted(self.offload)
        return out

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Choice:
        """The inverse of ``to_json``.

        Raises:
            TypeError: a knob is unknown or missing, or a number or a switch is something else.
        """
        values = dict(data)
        for knob, kind in _PLAIN_KINDS.items():
            # An exact look: true would pass for 1.
            if knob in values and type(values[knob]) is not kind:
                raise TypeError(f"{knob} is {values[knob]!r}, no {kind.__name__}")
        offload = values.pop("offload", [])
        assert isinstance(offload, list)
        return cls(**values, offload=frozenset(offload))  # type: ignore[arg-type]
