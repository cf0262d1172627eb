"""Which models are traced on one rank of FSDP2, and in which ways: the cases of benchmarks/whole_sharded.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.whole_cases import GEMMA2, GPT_OSS, OLMO2, PHI3, Case, Model, bundled

PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")
_LLAMA = bundled("llama-3.2-1b", "meta-llama/Llama-3.2-1B")
_QWEN_MOE = bundled("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B")


@dataclass(frozen=True, kw_only=True)
class ShardedCase:
    """One model trained in one way on one of ``shard`` x ``replicate`` ranks."""

    case: Case
    """``autocast`` is off: accelerate puts none around a model under FSDP2."""
    shard: int
    replicate: int = 1
    reshard: bool = True
    offload: bool = False
    """Weights, gradients and optimizer on the host (CPUOffloadPolicy)."""
    older: bool = False
    """Wrapped by an accelerate before 1.14."""

    @property
    def sharding(self) -> str:
        """The planner's word."""
        return "hsdp" if self.replicate > 1 else "fsdp" if self.reshard else "fsdp_no_reshard"

    @property
    def id(self) -> str:
        """Everything that tells cases apart."""
        name, _, options = self.case.id.replace("-pure", "").partition("/")
        ranks = f"w{self.shard}" + (f"x{self.replicate}" if self.replicate > 1 else "")
        ways = {"noreshard": not self.reshard, "offloaded": self.offload, "older": self.older}
        return "-".join((f"{name}/{ranks}-{options}", *(way for way, taken in ways.items() if taken)))

    def job(self, version: Callable[[str], str]) -> dict[str, Any]:
        """As a job file would state it, every knob pinned."""
        job = self.case.job(version)
        job["machine"] = f"{self.shard * self.replicate}xH100-80GB"
        job["stack"] = {package: version(package) for package in PACKAGES}
        job["pins"] |= {
            "sharding": self.sharding,
            "dp_shard": self.shard,
            "dp_replicate": self.replicate,
            "mixed_precision": "bf16",
            "offload": ["optimizer", "params"] if self.offload else [],
        }
        return job


def _ways(model: Model, layers: int, long: int, short: int, attention: str = "sdpa") -> Iterator[ShardedCase]:
    """Full training and adapters of one model: long and recomputed, short and not, on few ranks and on many."""
    plain = Case(model=model, layers=layers, seq_len=short, attention=attention, autocast=False)
    again = replace(plain, seq_len=long, recompute="full")
    for ranks in (2, 4, 8, 64):
        yield ShardedCase(case=again, shard=ranks)
    for ranks in (2, 4):
        yield ShardedCase(case=replace(again, seq_len=short // 4), shard=ranks)
    yield ShardedCase(case=again, shard=8, reshard=False)
    yield ShardedCase(case=replace(plain, weights="fp32"), shard=2)
    for ranks in (4, 64):
        yield ShardedCase(case=replace(plain, loss="full_logits"), shard=ranks)
    yield ShardedCase(case=replace(plain, loss="full_logits"), shard=8, reshard=False)
    yield ShardedCase(case=replace(again, lora_r=16), shard=2)
    yield ShardedCase(case=replace(plain, lora_r=16), shard=64)
    yield ShardedCase(case=replace(plain, lora_r=16, loss="full_logits"), shard=8)
    yield ShardedCase(case=replace(again, lora_r=16, weights="fp32"), shard=8, reshard=False)


def _deeper(model: Model, layers: int, long: int, short: int) -> Iterator[ShardedCase]:
    """The same model again, with more layers."""
    plain = Case(model=model, layers=layers, seq_len=short, autocast=False)
    again = replace(plain, seq_len=long, recompute="full")
    for case in (again, plain, replace(plain, loss="full_logits"), replace(again, lora_r=16)):
        yield ShardedCase(case=case, shard=8)


def _replicated(model: Model, layers: int, long: int, short: int) -> Iterator[ShardedCase]:
    """Replicas of a shard group."""
    plain = Case(model=model, layers=layers, seq_len=short, autocast=False)
    again = replace(plain, seq_len=long, recompute="full")
    for shard, replicate in ((2, 2), (4, 2), (8, 8)):
        yield ShardedCase(case=again, shard=shard, replicate=replicate)
    yield ShardedCase(case=replace(plain, loss="full_logits"), shard=2, replicate=4)
    yield ShardedCase(case=replace(again, lora_r=16), shard=8, replicate=2)


def _offloaded(model: Model, layers: int, long: int, short: int) -> Iterator[ShardedCase]:
    """Nothing at rest on the card."""
    plain = Case(model=model, layers=layers, seq_len=short, autocast=False)
    again = replace(plain, seq_len=long, recompute="full")
    for case in (again, replace(plain, loss="full_logits"), replace(again, lora_r=16)):
        yield ShardedCase(case=case, shard=4, offload=True)
    yield ShardedCase(case=replace(again, seq_len=256), shard=2, offload=True)
    yield ShardedCase(case=again, shard=4, replicate=2, offload=True)


def _older(model: Model, layers: int, long: int, short: int) -> Iterator[ShardedCase]:
    """Full training with what accelerate left to the root; it made frozen weights fp32 too, which is not planned."""
    plain = Case(model=model, layers=layers, seq_len=short, autocast=False)
    again = replace(plain, seq_len=long, recompute="full")
    for case in (again, plain, replace(plain, loss="full_logits")):
        yield ShardedCase(case=case, shard=8, older=True)
    yield ShardedCase(case=replace(again, seq_len=256), shard=2, older=True)
    yield ShardedCase(case=again, shard=8, reshard=False, older=True)


CASES: tuple[ShardedCase, ...] = (
    # Tied; at two depths.
    *_ways(_LLAMA, 4, 8192, 2048),
    *_deeper(_LLAMA, 8, 16384, 1024),
    # Tied, a vocabulary of 256,000, capped logits, which take eager attention.
    *_ways(GEMMA2, 4, 2048, 1024, "eager"),
    # A mixture of 128 experts, head and embedding apart.
    *_ways(_QWEN_MOE, 4, 4096, 1024),
    # Fused projections, shorter than the window; heads apart.
    *_ways(PHI3, 6, 2000, 1024),
    # Norms after the blocks; heads apart.
    *_ways(OLMO2, 4, 8192, 2048),
    *_replicated(_LLAMA, 4, 8192, 1024),
    *_replicated(OLMO2, 6, 4096, 1024),
    *_offloaded(_LLAMA, 4, 8192, 1024),
    *_offloaded(OLMO2, 4, 4096, 1024),
    *_older(_LLAMA, 4, 8192, 1024),
    *_older(OLMO2, 4, 4096, 1024),
    # Experts with biases, sinks, eager.
    ShardedCase(
        case=Case(model=GPT_OSS, layers=4, seq_len=1024, attention="eager", lora_r=16, autocast=False), shard=8
    ),
)
