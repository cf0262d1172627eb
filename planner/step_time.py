"""Time: rooflines over counted work, with few physical constants, each with its source.

Matmuls and attention at a share of the card's rate, everything else at a share of its bandwidth, the loss by its
release's code, the optimizer by bandwidth, communication over the link less what compute hides, offload over the host
link (both copies on the compute stream in transformers 5.17 and later, so it adds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from planner.blocks import Blocks
from planner.choice import FSDP2, Choice, Method
from planner.hardware import Hardware
from planner.loss_memory import CHUNK_TOKENS
from planner.memory import MemoryJob, rank_tokens
from planner.states import residual_bytes, uses_autocast
from planner.work import Work, micro_batch_work

MATMUL = 0.73
ATTENTION = 0.55
MASKED_ATTENTION = 0.20
ELEMENTWISE = 0.50
STREAMING = 0.86
EXPERTS = 0.20
FP32_MATMUL = 0.79
RING_FACTOR = 1.44
"""Shares of the card's peak rates, fitted together on 20 published step times of TRL runs on H100 (mean error 3.2 %,
worst 12.7 %): matmul, causal flash attention, masked attention, eager elementwise, large streaming kernels, grouped
expert matmul, fp32 matmul without tensor cores; bytes of a ring step per token, head and layer over 100."""
LAUNCH_S = 6e-6
"""Host time per kernel launch of eager torch: about 6 microseconds. Not measured here."""
HEAD_BYTES_PER_LOGIT = 110.0
"""Bytes moved per logit outside the matmuls of a chunk, counted on the meta device."""
FUSED_BYTES_PER_LOGIT = 24.0
"""Bytes moved per logit by the fused tiles: two passes of reads and writes in bf16 and fp32. Not measured here."""
OPTIMIZER_BYTES = 28.0
"""Read and written per fp32 trainable parameter in one AdamW step; 12 more with clipping."""
RELATIVE_ERROR = 0.25
"""Half-width said for a prediction that no measurement on this card has corrected."""
CPU_FACTOR = 4.0
"""A CPU's rates are guessed from its cores: the interval is a factor of this each way."""

TIME_PARTS = (
    "matmul",
    "attention",
    "recompute",
    "loss",
    "optimizer",
    "communication",
    "offload",
    "other",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Seconds of one optimizer step."""

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    parts: dict[str, float]
    evidence: str = "formula"


@dataclass(slots=True)
class TimeModel:
    """Time of any choice for one job on one machine."""

    job: MemoryJob
    hardware: Hardware
    blocks_of: Callable[[Method], Blocks]
    num_parameters: int = field(init=False)
    attention_width: int = field(init=False)
    """Heads x head_dim, summed over the layers."""

    def __post_init__(self) -> None:
        architecture = self.job.architecture
        self.num_parameters = architecture.num_parameters
        self.attention_width = sum(k.heads * k.head_dim for k in architecture.layers())

    def estimate(self, choice: Choice) -> TimeEstimate | None:
        """Seconds per optimizer step, or None where the card's rates are not known."""
        hw, arch = self.hardware, self.job.architecture
        if hw.matmul_flops is None or hw.bandwidth is None:
            return None
        tokens = rank_tokens(self.job, choice)
        fp32_residual = residual_bytes(choice) == 4
        padded = self.job.padded and choice.micro_batch * self.job.rows_per_sequence > 1
        work = micro_batch_work(
            arch,
            choice,
            tokens=tokens,
            sequence=self.job.seq_len,
            lora_r=self.job.lora_r,
            lora_targets=self.job.lora_targets,
            fp32_residual=fp32_residual,
            masked=(padded or choice.packing) and choice.attention != "flash_attention_2",
        )
        parts = self._micro_batch(choice, work, tokens)
        busy = sum(parts.values())
        parts["other"] = max(0.0, work.launches * LAUNCH_S - busy) if hw.device == "cuda" else 0.0
        parts["communication"] = self._gathers(choice, busy)
        parts = {name: value * choice.grad_accum for name, value in parts.items()}
        parts["optimizer"] = self._optimizer(choice)
        parts["communication"] += self._reduction(choice, busy)
        return self._finish(choice, work, tokens, {name: parts.get(name, 0.0) for name in TIME_PARTS})

    def _finish(self, choice: Choice, work: Work, tokens: int, parts: dict[str, float]) -> TimeEstimate:
        hw = self.hardware
        step = sum(parts.values())
        all_tokens = tokens * choice.grad_accum * choice.num_gpus
        useful = work.matmul_flops + work.expert_flops + work.attention_flops - work.recompute_flops
        head = 6.0 * tokens * self.job.architecture.vocab * self.job.architecture.hidden
        mfu = None
        if hw.device == "cuda" and hw.matmul_flops:
            mfu = (useful + head) * choice.grad_accum / step / hw.matmul_flops
        spread = (
            (step / CPU_FACTOR, step * CPU_FACTOR)
            if hw.device == "cpu"
            else (step * (1 - RELATIVE_ERROR), step * (1 + RELATIVE_ERROR))
        )
        return TimeEstimate(
            step_s=step,
            low_s=spread[0],
            high_s=spread[1],
            tokens_per_s=all_tokens / step,
            tokens_per_s_per_gpu=all_tokens / step / choice.num_gpus,
            mfu=mfu,
            parts=parts,
        )

    def _micro_batch(self, choice: Choice, work: Work, tokens: int) -> dict[str, float]:
        hw = self.hardware
        assert hw.matmul_flops is not None and hw.bandwidth is not None
        rate, bandwidth = hw.matmul_flops, hw.bandwidth
        if choice.mixed_precision == "no" and choice.weights == "fp32" and hw.fp32_flops:
            rate = hw.fp32_flops
        dense_share = 1.0 - work.recompute_flops / max(1.0, work.matmul_flops + work.expert_flops)
        matmul = work.matmul_flops / (MATMUL * rate) + work.expert_flops / (EXPERTS * rate)
        attention = work.attention_flops / (ATTENTION * rate) + work.masked_attention_flops / (MASKED_ATTENTION * rate)
        moved = work.elementwise_bytes / (ELEMENTWISE * bandwidth)
        if choice.cp > 1:
            sequence = self.job.seq_len * choice.micro_batch
            attention += RING_FACTOR * 100.0 * sequence * self.attention_width / (ELEMENTWISE * bandwidth)
        return {
            "matmul": matmul * dense_share + moved * 0.775,
            "recompute": matmul * (1 - dense_share) + moved * 0.225,
            "attention": attention,
            "loss": self._loss(choice, tokens),
            "offload": self._offload(choice, tokens),
        }

    def _loss(self, choice: Choice, tokens: int) -> float:
        """Head matmuls and the passes over the logits, by the release's loss path."""
        hw, arch = self.hardware, self.job.architecture
        assert hw.matmul_flops is not None and hw.bandwidth is not None
        if not self.job.scores_vocabulary:
            return 0.0
        v, h, bandwidth = arch.vocab, arch.hidden, hw.bandwidth
        trains = choice.method == "full"
        path = choice.loss_path
        products = (4 if trains else 3) if path in ("chunked", "chunked_fp32", "fused") else (3 if trains else 2)
        if path in ("chunked", "chunked_fp32"):
            chunks = tokens / CHUNK_TOKENS
            flops = 2.0 * v * h * CHUNK_TOKENS
            one = max(
                flops / (MATMUL * hw.matmul_flops),
                (2.0 * v * h + 512.0 * v) / (STREAMING * bandwidth),
            )
            extra = HEAD_BYTES_PER_LOGIT * CHUNK_TOKENS * v
            if path == "chunked_fp32":
                if uses_autocast(choice):
                    extra += (36.0 if trains else 24.0) * v * h
                else:
                    one = flops / (FP32_MATMUL * (hw.fp32_flops or hw.matmul_flops / 16))
                    extra += (24.0 if trains else 12.0) * v * h
            return chunks * (products * one + extra / (STREAMING * bandwidth))
        per_logit = FUSED_BYTES_PER_LOGIT if path in ("fused", "liger") else HEAD_BYTES_PER_LOGIT
        matmul = products * 2.0 * v * h * tokens / (MATMUL * hw.matmul_flops)
        return matmul + per_logit * tokens * v / (STREAMING * bandwidth)

    def _offload(self, choice: Choice, tokens: int) -> float:
        hw, arch = self.hardware, self.job.architecture
        if not choice.offload or hw.host_link is None:
            return 0.0
        seconds = 0.0
        if "activations" in choice.offload:
            seconds += 2.0 * arch.num_layers * tokens * arch.hidden * residual_bytes(choice) / hw.host_link
        if "params" in choice.offload:
            # Gathered shards cross the host link once per pass.
            passes = 3.0 if choice.recompute != "none" else 2.0
            seconds += passes * 2.0 * self.num_parameters / choice.shard_ranks / hw.host_link
        return seconds

    def _trainable(self, choice: Choice) -> int:
        return self.blocks_of(choice.method).total.trainable

    def _optimizer(self, choice: Choice) -> float:
        hw = self.hardware
        assert hw.bandwidth is not None
        local = self._trainable(choice) / choice.shard_ranks
        width = (
            0.5 if choice.weights == "bf16" and choice.sharding in ("none", "ddp") and choice.method == "full" else 1.0
        )
        moved = (OPTIMIZER_BYTES + 12.0) * width * local
        if "optimizer" in choice.offload and hw.host_link is not None:
            # The update runs on the host: gradients down, weights up, states through the host's own memory.
            return local * 4.0 / hw.host_link + local * 28.0 / 60e9
        return moved / (ELEMENTWISE * hw.bandwidth)

    def _link(self, ranks: int) -> float:
        hw = self.hardware
        inside = hw.link or 16e9
        return inside if ranks <= hw.gpus_per_node else min(inside, hw.node_link)

    def _gathers(self, choice: Choice, busy: float) -> float:
        """Exposed seconds of weight gathers and gradient reductions that happen in every micro-batch."""
        ranks = choice.shard_ranks
        if ranks == 1:
            return 0.0
        share = (ranks - 1) / ranks
        if choice.sharding in FSDP2 or choice.sharding == "fsdp1":
            gathers = (1.0 if choice.sharding == "fsdp_no_reshard" else 2.0) * 2.0 * self.num_parameters * share
            reduced = 2.0 * self._trainable(choice) * share
        elif choice.sharding == "zero3":
            gathers = (3.0 if choice.recompute != "none" else 2.0) * 2.0 * self.num_parameters * share
            reduced = 2.0 * self._trainable(choice) * share
        else:
            gathers, reduced = 0.0, 2.0 * self._trainable(choice) * share
        seconds = (gathers + reduced) / self._link(ranks)
        return max(0.0, seconds - 0.8 * busy)

    def _reduction(self, choice: Choice, busy: float) -> float:
        """Exposed seconds of what happens once per optimizer step: DDP's all-reduce, ZeRO's gather of new weights."""
        ranks = choice.num_gpus
        share = (ranks - 1) / ranks
        trainable = self._trainable(choice)
        if choice.sharding == "ddp":
            width = 2.0 if choice.weights == "bf16" and choice.method == "full" else 4.0
            return max(0.0, 2.0 * share * width * trainable / self._link(ranks) - 0.6 * busy)
        if choice.sharding in ("zero1", "zero2"):
            return 2.0 * share * trainable / self._link(ranks)
        if choice.sharding == "hsdp" and choice.dp_replicate > 1:
            return 2.0 * 2.0 * trainable / choice.shard_ranks / self._link(ranks)
        return 0.0
