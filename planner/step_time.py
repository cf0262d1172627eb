"""Time: rooflines over counted work, with few physical constants, each with its source.

Matmuls and attention at a share of the card's rate, everything else at a share of its bandwidth, the loss by its
release's code, the optimizer by bandwidth, communication over the link less what compute hides, offload over the host
link (both copies on the compute stream in transformers 5.17 and later, so it adds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.blocks import Blocks
from planner.choice import FSDP2, Choice, Method
from planner.hardware import Hardware
from planner.loss_memory import CHUNK_TOKENS
from planner.memory import MemoryJob
from planner.states import adapter_bytes, residual_bytes, uses_autocast
from planner.work import token_work

MATMUL = 0.73
ATTENTION = 0.55
MASKED_ATTENTION = 0.20
ELEMENTWISE = 0.50
STREAMING = 0.86
EXPERTS = 0.146
FP32_MATMUL = 0.79
RING_FACTOR = 1.44
"""Shares of the card's peak rates, fitted together on 20 published step times of TRL runs on H100 (mean error 3.2 %,
worst 12.7 %): matmul, causal flash attention, masked attention, eager elementwise, large streaming kernels, grouped
expert matmul, fp32 matmul without tensor cores; bytes of a ring step per token, head and layer over 100. The fit gave
0.20 over all products of Qwen3-30B-A3B, which is 0.146 over its routed ones with the others at 0.73."""
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
RECOMPUTED_BYTES = 0.225
"""Share of the bytes outside matmuls that a full recompute moves again (Llama-3-8B, 79.7 against 61.6 MB per token)."""
HIDDEN_GATHERS = 0.8
HIDDEN_REDUCTION = 0.6
"""Shares of the computation that hide FSDP's gathers and DDP's all-reduce. Published FSDP2 runs over two H100 show
nothing exposed; not measured here."""
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


class TimeEstimate(NamedTuple):
    """Seconds of one optimizer step."""

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    parts: dict[str, float]
    evidence: str = "formula"


class _TokenSeconds(NamedTuple):
    """One token of one rank through the layers."""

    matmul: float
    recompute: float
    attention: float
    launches: float
    """Of a whole micro-batch."""
    useful_flops: float
    """Recomputed forwards and the head left out."""


class TimeFrame:
    """Step time of one choice at any micro-batch and accumulation."""

    __slots__ = (
        "_choice",
        "_gathers",
        "_loss",
        "_model",
        "_offload",
        "_optimizer",
        "_per_batch_offload",
        "_ranks",
        "_reduction",
        "_ring",
        "_seconds",
        "_tokens",
    )

    def __init__(self, model: TimeModel, choice: Choice) -> None:
        job = model.job
        self._model, self._choice = model, choice
        self._tokens = job.rows_per_sequence * -(-job.seq_len // (choice.cp * choice.sp))
        self._ranks = choice.num_gpus
        self._seconds: dict[bool, _TokenSeconds] = {}
        self._loss = model.loss_s(choice)
        self._ring = model.ring_s(choice)
        self._offload, self._per_batch_offload = model.offload_s(choice)
        self._optimizer = model.optimizer_s(choice)
        self._gathers = model.gathers_s(choice)
        self._reduction = model.reduction_s(choice)

    def at(self, micro_batch: int, grad_accum: int) -> TimeEstimate:
        """Seconds per optimizer step."""
        model, hw = self._model, self._model.hardware
        masked = model.masked(self._choice, micro_batch)
        seconds = self._seconds.get(masked)
        if seconds is None:
            seconds = self._seconds[masked] = model.token_seconds(self._choice, masked)
        tokens = self._tokens * micro_batch
        matmul, recompute = seconds.matmul * tokens, seconds.recompute * tokens
        attention = seconds.attention * tokens + self._ring * micro_batch
        loss, offload = self._loss * tokens, self._offload * tokens + self._per_batch_offload
        busy = matmul + recompute + attention + loss + offload
        other = max(0.0, seconds.launches - busy)
        gathers = max(0.0, self._gathers - HIDDEN_GATHERS * busy)
        once, hidden = self._reduction
        communication = gathers * grad_accum + max(0.0, once - hidden * busy)
        parts = {
            "matmul": matmul * grad_accum,
            "attention": attention * grad_accum,
            "recompute": recompute * grad_accum,
            "loss": loss * grad_accum,
            "optimizer": self._optimizer,
            "communication": communication,
            "offload": offload * grad_accum,
            "other": other * grad_accum,
        }
        step = (busy + other) * grad_accum + self._optimizer + communication
        all_tokens = tokens * grad_accum * self._ranks
        if hw.device == "cpu":
            low, high, mfu = step / CPU_FACTOR, step * CPU_FACTOR, None
        else:
            low, high = step * (1 - RELATIVE_ERROR), step * (1 + RELATIVE_ERROR)
            mfu = (seconds.useful_flops + model.head_flops) * tokens * grad_accum / step / model.rate
        return TimeEstimate(step, low, high, all_tokens / step, all_tokens / step / self._ranks, mfu, parts)


@dataclass(slots=True)
class TimeModel:
    """Time of any choice for one job on one machine."""

    job: MemoryJob
    hardware: Hardware
    blocks_of: Callable[[Method], Blocks]
    num_parameters: int = field(init=False)
    attention_width: int = field(init=False)
    """Heads x head_dim, summed over the layers."""
    head_flops: float = field(init=False)
    """Of one token, forward and backward."""
    _token_seconds: dict[tuple[object, ...], _TokenSeconds] = field(init=False)

    def __post_init__(self) -> None:
        architecture = self.job.architecture
        self.num_parameters = architecture.num_parameters
        self.attention_width = sum(k.heads * k.head_dim for k in architecture.layers())
        self.head_flops = 6.0 * architecture.vocab * architecture.hidden
        self._token_seconds = {}

    @property
    def known(self) -> bool:
        """Whether the card's rates are known."""
        return self.hardware.matmul_flops is not None and self.hardware.bandwidth is not None

    @property
    def rate(self) -> float:
        """The card's dense matmul rate."""
        assert self.hardware.matmul_flops is not None
        return self.hardware.matmul_flops

    @property
    def bandwidth(self) -> float:
        """The card's memory bandwidth."""
        assert self.hardware.bandwidth is not None
        return self.hardware.bandwidth

    def frame(self, choice: Choice) -> TimeFrame | None:
        """``choice`` at any micro-batch and accumulation, or None where the card's rates are not known."""
        return TimeFrame(self, choice) if self.known else None

    def estimate(self, choice: Choice) -> TimeEstimate | None:
        """Seconds per optimizer step, or None where the card's rates are not known."""
        frame = self.frame(choice)
        return frame.at(choice.micro_batch, choice.grad_accum) if frame else None

    def masked(self, choice: Choice, micro_batch: int) -> bool:
        """Whether a mask is materialised, so that full-attention layers lose the causal kernel."""
        padded = self.job.padded and micro_batch * self.job.rows_per_sequence > 1
        return (padded or choice.packing) and choice.attention != "flash_attention_2"

    def token_seconds(self, choice: Choice, masked: bool) -> _TokenSeconds:
        """One token through the layers, shared by all choices that agree on what it depends on."""
        fp32_residual, fp32_matmul = residual_bytes(choice) == 4, self._runs_fp32(choice)
        fp32_adapters = choice.method != "full" and adapter_bytes(choice) == 4
        key = (
            (choice.method, choice.recompute, choice.attention, masked),
            (fp32_residual, fp32_matmul, fp32_adapters),
        )
        found = self._token_seconds.get(key)
        if found is None:
            found = self._token_seconds[key] = self._make_token_seconds(choice, masked, fp32_residual, fp32_matmul)
        return found

    def _runs_fp32(self, choice: Choice) -> bool:
        return choice.mixed_precision == "no" and choice.weights == "fp32" and bool(self.hardware.fp32_flops)

    def _make_token_seconds(
        self, choice: Choice, masked: bool, fp32_residual: bool, fp32_matmul: bool
    ) -> _TokenSeconds:
        hw, rate = self.hardware, self.rate
        work = token_work(
            self.job.architecture,
            choice,
            sequence=self.job.seq_len,
            lora_r=self.job.lora_r,
            lora_targets=self.job.lora_targets,
            fp32_residual=fp32_residual,
            masked=masked,
        )
        if fp32_matmul and hw.fp32_flops:
            rate = hw.fp32_flops
        again = work.recompute_flops / max(1.0, work.matmul_flops + work.expert_flops)
        matmul = work.matmul_flops / (MATMUL * rate) + work.expert_flops / (EXPERTS * rate)
        attention = work.attention_flops / (ATTENTION * rate) + work.masked_attention_flops / (MASKED_ATTENTION * rate)
        moved = work.elementwise_bytes / (ELEMENTWISE * self.bandwidth)
        return _TokenSeconds(
            matmul=matmul * (1 - again) + moved * (1 - RECOMPUTED_BYTES),
            recompute=matmul * again + moved * RECOMPUTED_BYTES,
            attention=attention,
            launches=work.launches * LAUNCH_S if hw.device == "cuda" else 0.0,
            useful_flops=work.useful_flops,
        )

    def ring_s(self, choice: Choice) -> float:
        """Seconds per row of the micro-batch that context parallelism's ring adds to attention."""
        if choice.cp == 1:
            return 0.0
        return RING_FACTOR * 100.0 * self.job.seq_len * self.attention_width / (ELEMENTWISE * self.bandwidth)

    def loss_s(self, choice: Choice) -> float:
        """Seconds per token: head matmuls and the passes over the logits, by the release's loss path."""
        arch, bandwidth, rate = self.job.architecture, self.bandwidth, self.rate
        if not self.job.scores_vocabulary:
            return 0.0
        v, h = arch.vocab, arch.hidden
        trains = choice.method == "full"
        path = choice.loss_path
        products = (4 if trains else 3) if path in ("chunked", "chunked_fp32", "fused") else (3 if trains else 2)
        if path in ("chunked", "chunked_fp32"):
            flops = 2.0 * v * h * CHUNK_TOKENS
            one = max(flops / (MATMUL * rate), (2.0 * v * h + 512.0 * v) / (STREAMING * bandwidth))
            extra = HEAD_BYTES_PER_LOGIT * CHUNK_TOKENS * v
            if path == "chunked_fp32":
                if uses_autocast(choice):
                    extra += (36.0 if trains else 24.0) * v * h
                else:
                    one = flops / (FP32_MATMUL * (self.hardware.fp32_flops or rate / 16))
                    extra += (24.0 if trains else 12.0) * v * h
            return (products * one + extra / (STREAMING * bandwidth)) / CHUNK_TOKENS
        per_logit = FUSED_BYTES_PER_LOGIT if path in ("fused", "liger") else HEAD_BYTES_PER_LOGIT
        return products * 2.0 * v * h / (MATMUL * rate) + per_logit * v / (STREAMING * bandwidth)

    def offload_s(self, choice: Choice) -> tuple[float, float]:
        """Seconds of copies over the host link: per token, and per micro-batch."""
        link, arch = self.hardware.host_link, self.job.architecture
        if not choice.offload or link is None:
            return 0.0, 0.0
        per_token = per_batch = 0.0
        if "activations" in choice.offload:
            per_token = 2.0 * arch.num_layers * arch.hidden * residual_bytes(choice) / link
        if "params" in choice.offload:
            # Gathered shards cross the host link once per pass.
            passes = 3.0 if choice.recompute != "none" else 2.0
            per_batch = passes * 2.0 * self.num_parameters / choice.shard_ranks / link
        return per_token, per_batch

    def _trainable(self, choice: Choice) -> int:
        return self.blocks_of(choice.method).total.trainable

    def optimizer_s(self, choice: Choice) -> float:
        """Seconds of the optimizer's step."""
        local = self._trainable(choice) / choice.shard_ranks
        if "optimizer" in choice.offload and self.hardware.host_link is not None:
            # The update runs on the host: gradients down, weights up, states through the host's own memory.
            return local * 4.0 / self.hardware.host_link + local * 28.0 / 60e9
        width = (
            0.5 if choice.weights == "bf16" and choice.sharding in ("none", "ddp") and choice.method == "full" else 1.0
        )
        return (OPTIMIZER_BYTES + 12.0) * width * local / (ELEMENTWISE * self.bandwidth)

    def _link(self, ranks: int) -> float:
        hw = self.hardware
        inside = hw.link or 16e9
        return inside if ranks <= hw.gpus_per_node else min(inside, hw.node_link)

    def gathers_s(self, choice: Choice) -> float:
        """Seconds of weight gathers and gradient reductions of every micro-batch, before computation hides them."""
        ranks = choice.shard_ranks
        if ranks == 1:
            return 0.0
        share = (ranks - 1) / ranks
        moved = 2.0 * self._trainable(choice) * share
        if choice.sharding in FSDP2 or choice.sharding == "fsdp1":
            moved += (1.0 if choice.sharding == "fsdp_no_reshard" else 2.0) * 2.0 * self.num_parameters * share
        elif choice.sharding == "zero3":
            moved += (3.0 if choice.recompute != "none" else 2.0) * 2.0 * self.num_parameters * share
        return moved / self._link(ranks)

    def reduction_s(self, choice: Choice) -> tuple[float, float]:
        """(seconds, share of the computation that hides them) of what happens once per optimizer step.

        DDP's all-reduce, ZeRO's gather of new weights, HSDP's reduction over replicas.
        """
        ranks = choice.num_gpus
        share = (ranks - 1) / ranks
        trainable = self._trainable(choice)
        if choice.sharding == "ddp":
            width = 2.0 if choice.weights == "bf16" and choice.method == "full" else 4.0
            return 2.0 * share * width * trainable / self._link(ranks), HIDDEN_REDUCTION
        if choice.sharding in ("zero1", "zero2"):
            return 2.0 * share * trainable / self._link(ranks), 0.0
        if choice.sharding == "hsdp" and choice.dp_replicate > 1:
            return 2.0 * 2.0 * trainable / choice.shard_ranks / self._link(ranks), 0.0
        return 0.0, 0.0
