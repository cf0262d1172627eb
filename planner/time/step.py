"""Time: rooflines over counted work, with few physical constants, each with its source.

Matmuls and attention at a share of the card's rate, all else at a share of its bandwidth (``planner.time.rates``), the
loss by its release's code, the optimizer by bandwidth, communication over the link less what compute hides, offload
over the host link (both copies on the compute stream in transformers 5.17 and later, so it adds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from planner.choice import FSDP2, ZERO, Choice, Method
from planner.hardware import Hardware
from planner.memory.blocks import Blocks
from planner.memory.coefficients import LayerWork
from planner.memory.optimizers import find_optimizer
from planner.memory.parts import MemoryJob
from planner.memory.phases import held_bytes
from planner.memory.states import residual_bytes, role_table, trainable_roles
from planner.time.correction import MeasuredTimeSource
from planner.time.links import gathers_s, host_optimizer_s, offload_s, reduction_s, root_gather_s, sequence_s
from planner.time.loss import loss_s
from planner.time.rates import CPU_FACTOR, MEASURED_CPU_FACTOR, Rates, fp32_rates_of, rates_of
from planner.time.traced_work import WorkEvidence, forward_token_work, token_work
from planner.time.work import Work, mixed_work, recomputed_share

if TYPE_CHECKING:
    from profiles.routes import Route

RING_BYTES = 144.0
"""Bytes that the ring of context parallelism moves on the card outside its products per element of a query, token of
the rank and step: partial results are merged in fp32, forward, recompute and backward. Fitted together with the shares
of ``planner.time.rates``."""
LAUNCH_S = 6e-6
"""Host time per kernel launch of eager torch: about 6 microseconds. Not measured here."""
LAUNCH_FACTOR = 2.0
"""Hosts differ: where launches decide, a time is said up to this many times as long."""
HIDDEN_GATHERS = 0.8
HIDDEN_REDUCTION = 0.6
"""Shares of the computation that hide FSDP's gathers and DDP's all-reduce. Published FSDP2 runs over two H100 show
nothing exposed; not measured here."""

_FRAMEWORK = {
    **dict.fromkeys(("none", "ddp"), "autocast"),
    **dict.fromkeys(FSDP2, "fsdp2"),
    **dict.fromkeys(ZERO, "zero"),
    "fsdp1": "fsdp1",
}
"""Who decides which dtype a layer computes in."""

LayerWorkSource = Callable[[Choice, bool], tuple[LayerWork, ...]]
"""What was counted of each kind of layer for a choice, with a mask or without; empty where nothing was."""

TIME_PARTS = (
    "matmul",
    "elementwise",
    "attention",
    "recompute",
    "loss",
    "optimizer",
    "communication",
    "offload",
    "other",
)


def nothing_traced(choice: Choice, masked: bool) -> tuple[LayerWork, ...]:
    """No trace: closed forms throughout."""
    del choice, masked
    return ()


class TimeEstimate(NamedTuple):
    """Seconds of one optimizer step."""

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    seconds: tuple[float, ...]
    """One number for each of ``TIME_PARTS``, which add up to ``step_s``."""
    evidence: str = "formula"

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return dict(zip(TIME_PARTS, self.seconds, strict=True))


class _LayerSeconds(NamedTuple):
    """All layers of one rank, per token and per micro-batch."""

    matmul: float
    matmul_per_batch: float
    elementwise: float
    elementwise_per_batch: float
    attention: float
    recompute: float
    launches: float
    launches_per_batch: float
    useful_flops: float
    """Recomputed forwards and the head left out."""
    evidence: WorkEvidence


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
        "_sequence",
        "_tokens",
        "_whole_gathers",
    )

    def __init__(self, model: TimeModel, choice: Choice) -> None:
        job, hardware, arch = model.job, model.hardware, model.job.architecture
        self._model, self._choice = model, choice
        self._tokens = job.rows_per_sequence * -(-job.seq_len // (choice.cp * choice.sp))
        self._ranks = choice.num_gpus
        self._seconds: dict[bool, _LayerSeconds] = {}
        self._loss = model.loss_s(choice)
        self._ring = model.ring_s(choice)
        self._offload, self._per_batch_offload = offload_s(
            hardware,
            choice,
            parameters=model.num_parameters,
            held=held_bytes(model.blocks_of(choice.method).total, role_table(choice, job.quantization)),
            hidden=arch.hidden,
            layers=arch.num_layers,
            forwards=model.reference_forwards + model.policy_forwards,
        )
        self._optimizer = model.optimizer_s(choice)
        trainable = model.trainable(choice)
        # TRL wraps a reference of its own under FSDP2 as one group, which nothing hides (trl/models/utils.py).
        whole = model.reference_forwards if job.reference_model and choice.sharding in FSDP2 else 0
        self._gathers = gathers_s(
            hardware,
            choice,
            parameters=model.num_parameters,
            trainable=trainable,
            layers=arch.num_layers,
            forwards=model.reference_forwards + model.policy_forwards - whole,
        )
        self._whole_gathers = whole * root_gather_s(hardware, choice, parameters=model.num_parameters)
        self._reduction = reduction_s(hardware, choice, trainable=trainable, layers=arch.num_layers)
        self._sequence = sequence_s(hardware, choice, heads=model.attention_width, kv_heads=model.kv_width)

    def at(self, micro_batch: int, grad_accum: int) -> TimeEstimate:
        """Seconds per optimizer step."""
        model, choice, rates = self._model, self._choice, self._model.rates
        assert rates is not None
        masked = model.masked(choice, micro_batch)
        seconds = self._seconds.get(masked)
        if seconds is None:
            seconds = self._seconds[masked] = model.layer_seconds(choice, masked)
        tokens = self._tokens * micro_batch
        matmul = seconds.matmul * tokens + seconds.matmul_per_batch
        elementwise = seconds.elementwise * tokens + seconds.elementwise_per_batch
        recompute = seconds.recompute * tokens
        attention = seconds.attention * tokens + self._ring * micro_batch
        loss, offload = self._loss * tokens, self._offload * tokens + self._per_batch_offload
        busy = matmul + elementwise + recompute + attention + loss + offload
        launching = seconds.launches * tokens + seconds.launches_per_batch
        other = max(0.0, launching - busy)
        # Context parallelism's exchange runs beside attention; sequence parallelism's stands before and behind it.
        exchanged = self._sequence * tokens
        exposed = exchanged if choice.sp > 1 else max(0.0, exchanged - HIDDEN_GATHERS * attention)
        gathers = max(0.0, self._gathers - HIDDEN_GATHERS * busy)
        once = self._reduction
        if choice.sharding == "ddp":
            once = max(0.0, once - HIDDEN_REDUCTION * busy)
        communication = (gathers + self._whole_gathers + exposed) * grad_accum + once
        # In the order of TIME_PARTS; a tuple, because searches ask for tens of thousands.
        parts: tuple[float, ...] = (
            matmul * grad_accum,
            elementwise * grad_accum,
            attention * grad_accum,
            recompute * grad_accum,
            loss * grad_accum,
            self._optimizer,
            communication,
            offload * grad_accum,
            other * grad_accum,
        )
        step = (busy + other) * grad_accum + self._optimizer + communication
        evidence: str = seconds.evidence
        probe = None
        if model.measured is not None:
            probe = model.measured(replace(choice, micro_batch=micro_batch, grad_accum=grad_accum))
        if probe is not None:
            layers = model.job.architecture.num_layers
            parts, step = probe.time.corrected(parts, choice, layers, tokens, grad_accum, own=probe.own)
            evidence = "measured" if probe.own else evidence
        all_tokens = tokens * grad_accum * self._ranks
        mfu = None
        if model.hardware.device == "cpu":
            factor = MEASURED_CPU_FACTOR if model.hardware.measured else CPU_FACTOR
            low, high = step / factor, step * factor
        else:
            slow = max(0.0, LAUNCH_FACTOR * launching - busy) - other
            low, high = step * (1 - rates.error), step * (1 + rates.error) + slow * grad_accum
            mfu = (seconds.useful_flops + model.head_flops(choice)) * tokens * grad_accum / step / rates.peak
        if probe is not None and probe.own:
            # Of communication and of the host's optimizer no probe of one rank says anything.
            error = probe.time.error if probe.whole or (self._ranks == 1 and not choice.offload) else rates.error
            low, high = step * (1 - error), step * (1 + error)
        return TimeEstimate(step, low, high, all_tokens / step, all_tokens / step / self._ranks, mfu, parts, evidence)


@dataclass(slots=True)
class TimeModel:
    """Time of any choice for one job on one machine."""

    job: MemoryJob
    hardware: Hardware
    blocks_of: Callable[[Method], Blocks]
    layer_work: LayerWorkSource = nothing_traced
    linear_kernels: bool = False
    """Linear attention runs by the kernels of flash-linear-attention."""
    liger_patches_layers: bool = True
    """The loss path ``liger`` is ``use_liger_kernel``, which patches norms, rotary embedding and MLP as well."""
    reference_forwards: int = 0
    """Of every row, through the frozen base: a reference model's, or the policy's own without its adapters."""
    policy_forwards: int = 0
    """The same through the policy, adapters and all, without gradient."""
    measured: MeasuredTimeSource | None = None
    rates: Rates | None = field(init=False)
    _fp32_rates: Rates | None = field(init=False)
    num_parameters: int = field(init=False)
    attention_width: int = field(init=False)
    """Heads x head_dim, summed over the layers."""
    kv_width: int = field(init=False)
    """The same of keys."""
    _layer_seconds: dict[tuple[object, ...], _LayerSeconds] = field(init=False)

    def __post_init__(self) -> None:
        architecture = self.job.architecture
        self.rates, self._fp32_rates = rates_of(self.hardware), fp32_rates_of(self.hardware)
        self.num_parameters = architecture.num_parameters
        self.attention_width = sum(k.heads * k.head_dim for k in architecture.layers())
        self.kv_width = sum(k.kv_heads * k.head_dim for k in architecture.layers())
        self._layer_seconds = {}

    @property
    def known(self) -> bool:
        """Whether the card's rates are known."""
        return self.rates is not None

    def rates_for(self, choice: Choice) -> Rates | None:
        """What the card reaches in the dtype that ``choice`` computes in."""
        fp32 = choice.mixed_precision == "no" and choice.weights == "fp32"
        return self._fp32_rates if fp32 else self.rates

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

    def layer_seconds(self, choice: Choice, masked: bool) -> _LayerSeconds:
        """One token through the layers, shared by all choices that agree on what it depends on."""
        # Casts of weights that are no autocast's own are shared out among the ranks.
        ranks = choice.shard_ranks if choice.weights == "fp32" else 0
        key = (
            (choice.method, choice.recompute, choice.attention, masked, choice.loss_path == "liger"),
            (choice.weights, choice.mixed_precision, _FRAMEWORK[choice.sharding], ranks),
        )
        found = self._layer_seconds.get(key)
        if found is None:
            found = self._layer_seconds[key] = self._make_layer_seconds(choice, masked)
        return found

    def _make_layer_seconds(self, choice: Choice, masked: bool) -> _LayerSeconds:
        rates, job = self.rates_for(choice), self.job
        assert rates is not None
        work, evidence = token_work(
            job.architecture,
            choice,
            sequence=job.seq_len,
            lora_r=job.lora_r,
            lora_targets=job.lora_targets,
            lora_dropout=job.lora_dropout,
            masked=masked,
            fp32_residual=residual_bytes(choice) == 4,
            traced=self.layer_work(choice, masked),
            linear_kernels=self.linear_kernels,
            liger=choice.loss_path == "liger" and self.liger_patches_layers,
            quantization=job.quantization if choice.method == "qlora" else None,
        )
        work = self._with_forwards(work, choice, masked)
        again = work.recompute_flops / rates.matmul + work.recompute_expert_flops / rates.experts
        products = work.matmul_flops / rates.matmul + work.expert_flops / rates.experts
        products += work.linear_flops / rates.linear_kernels
        launch = LAUNCH_S if self.hardware.device == "cuda" else 0.0
        found = _LayerSeconds(
            matmul=products - again,
            matmul_per_batch=work.matmul_flops_per_batch / rates.matmul,
            elementwise=(work.elementwise_bytes - work.recompute_bytes) / rates.elementwise,
            elementwise_per_batch=work.elementwise_bytes_per_batch / rates.elementwise,
            attention=work.attention_flops / rates.attention_of(choice.attention)
            + work.masked_attention_flops / rates.masked_attention,
            recompute=again + work.recompute_bytes / rates.elementwise,
            launches=work.launches * launch,
            launches_per_batch=work.launches_per_batch * launch,
            useful_flops=work.useful_flops,
            evidence=evidence,
        )
        return found if job.route is None else self._with_route(found, job.route, choice)

    def _with_route(self, found: _LayerSeconds, route: Route, choice: Choice) -> _LayerSeconds:
        """The layers with the products that ``route`` covers at its rate, and its quantising beside them."""
        from planner.precision.route_time import route_seconds, route_work  # plans in bf16 do without

        rates, own = self.rates, self.rates_for(choice)
        assert rates is not None and own is not None
        again = recomputed_share(choice.recompute, self.job.architecture.num_layers)
        work, emulated = route_work(self.job.architecture, route, again), self.job.emulated
        more = route_seconds(work, route, self.hardware, rates, instead_of=own.matmul, emulated=emulated)
        return found._replace(
            matmul=found.matmul + more.matmul,
            recompute=found.recompute + more.recompute,
            elementwise=found.elementwise + more.quantising,
            elementwise_per_batch=found.elementwise_per_batch + more.quantising_per_batch,
        )

    def _with_forwards(self, work: Work, choice: Choice, masked: bool) -> Work:
        """Training's work and that of forwards without gradient, which are no recompute."""
        job = self.job
        for adapted, times in ((False, self.reference_forwards), (True, self.policy_forwards)):
            if not times:
                continue
            forward = forward_token_work(
                job.architecture,
                choice,
                sequence=job.seq_len,
                lora_r=job.lora_r,
                lora_targets=job.lora_targets,
                lora_dropout=job.lora_dropout,
                adapted=adapted and choice.method != "full",
                masked=masked,
                fp32_residual=residual_bytes(choice) == 4,
                linear_kernels=self.linear_kernels,
                # Kernels are patched into the policy, not into a reference of its own.
                liger=choice.loss_path == "liger"
                and self.liger_patches_layers
                and (adapted or not job.reference_model),
                quantization=job.quantization if choice.method == "qlora" else None,
            )
            work = mixed_work(work, 1.0, forward, float(times))
        return work

    def ring_s(self, choice: Choice) -> float:
        """Seconds per row of the micro-batch that context parallelism's ring adds to attention on the card."""
        if choice.cp == 1 or self.rates is None:
            return 0.0
        # A rank's tokens x its steps, one for every rank of the ring, are the whole sequence.
        return RING_BYTES * self.job.seq_len * self.attention_width / self.rates.elementwise

    def loss_s(self, choice: Choice) -> float:
        """Seconds per token: head matmuls and the passes over the logits, by the release's loss path."""
        rates = self.rates_for(choice)
        if not self.job.scores_vocabulary or rates is None:
            return 0.0
        arch, forwards = self.job.architecture, self.reference_forwards + self.policy_forwards
        return loss_s(choice, rates, vocab=arch.vocab, hidden=arch.hidden, forwards=forwards)

    def head_flops(self, choice: Choice) -> float:
        """Of one token through the vocabulary head: training's passes, and forwards without gradient."""
        if not self.job.scores_vocabulary:
            return 0.0
        # A frozen head has no weight gradient.
        passes = (6.0 if choice.method == "full" else 4.0) + 2.0 * (self.reference_forwards + self.policy_forwards)
        return passes * self.job.architecture.vocab * self.job.architecture.hidden

    def trainable(self, choice: Choice) -> int:
        """Trainable parameters under the choice's method."""
        return self.blocks_of(choice.method).total.trainable

    def optimizer_s(self, choice: Choice) -> float:
        """Seconds of the optimizer's step, and of clipping, which reads gradients twice and writes them once."""
        if self.rates is None:
            return 0.0
        local = self.trainable(choice) / choice.shard_ranks
        if "optimizer" in choice.offload and self.hardware.host_link is not None:
            return host_optimizer_s(self.hardware, choice, local)
        roles = trainable_roles(choice, adapter=choice.method != "full")
        moved = find_optimizer(choice.optimizer).moved_bytes(
            weights=roles.weights,
            gradients=roles.gradients,
            master=roles.master,
            moment1=roles.moment1,
            moment2=roles.moment2,
        )
        return (moved + 3.0 * roles.gradients) * local / self.rates.streaming
