"""Measured: what probes saw of a machine, and of a job at small depth on it, as the planner is handed it.

Rates enter as the peaks that would reach them under the shares of ``planner.time.rates`` and ``planner.time.links``;
a job's seconds and bytes correct what the models say of the same job (``planner.measured.memory``,
``planner.measured.time``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.architecture import Architecture
from planner.choice import FSDP2, ZERO, Choice
from planner.hardware import Hardware
from planner.memory.coefficients_json import option_key, shape_hash
from planner.memory.states import compute_bytes
from planner.time.links import HOST_LINK_SHARE, LINK_SHARE
from planner.time.rates import FP32_MATMUL, REFERENCE_CEILING, STREAMING

if TYPE_CHECKING:
    from planner.memory.model import MemoryModel

PHASES = ("forward", "loss", "backward", "step")
"""Phases of a step that a probe tells apart, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """What one card, or the CPU as a run would use it, reached; None where it was not measured."""

    matmul_flops: float | None = None
    """Best bf16 product (fp16 before Ampere), FLOP/s."""
    fp32_flops: float | None = None
    """Best fp32 product without tensor cores, FLOP/s."""
    bandwidth: float | None = None
    """Bytes read and written per second by kernels that stream large tensors."""
    host_link: float | None = None
    """Bytes per second one way between pinned host memory and the card: the slower way."""
    link: float | None = None
    """Bytes per second one way that each rank reached in collectives among the cards of the node: the slower kind."""
    context_bytes: int | None = None
    """Taken on the card by a process that holds no tensor."""
    source: str = ""
    """One sentence: where, with which driver and versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training step of the probed job at one depth and length, on one rank."""

    layers: int
    sequence: int
    """Tokens of one row."""
    tokens: int
    """Tokens of one micro-batch."""
    peaks: Mapping[str, int]
    """Phase -> most bytes of live tensors (``torch.cuda.max_memory_allocated`` on a card)."""
    seconds: Mapping[str, float]
    """Phase -> median seconds; ``other`` is what the step takes beside its phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """One job at two depths and two lengths."""

    trainer: str
    shape: str
    """``shape_hash`` of the architecture: the same layers at any depth."""
    vocab: int
    tied: bool
    options: str
    """``option_key`` of what the layers ran under."""
    lora_r: int
    choice: Choice
    """The knobs that ran: one rank, one micro-batch a step."""
    cells: tuple[Cell, ...]
    """Four, ordered: fewer layers first, then fewer tokens."""
    scored_beside: str = ""
    """``planner.problem.scored_beside`` of the job that ran."""
    context_bytes: int | None = None
    """Taken on the card beside torch's allocator, every kernel of the job loaded; None on a CPU."""
    source: str = ""

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of the two depths."""
        return self.cells[0].layers, self.cells[2].layers

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a micro-batch at the two lengths."""
        return self.cells[0].tokens, self.cells[1].tokens

    def is_of(self, architecture: Architecture) -> bool:
        """Whether ``architecture`` has these layers, no fewer than were probed, embedding and head."""
        same = (self.vocab, self.tied) == (architecture.vocab, architecture.tied)
        return same and self.depths[1] <= architecture.num_layers and self.shape == shape_hash(architecture)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWhole:
    """Three steps of a plan itself, at its own depth and length and on all of its ranks."""

    trainer: str
    shape: str
    """``shape_hash`` of the architecture."""
    vocab: int
    tied: bool
    options: str
    """``option_key`` of what the layers ran under."""
    lora_r: int
    choice: Choice
    """Every knob as it ran, the number of ranks among them."""
    layers: int
    sequence: int
    """Tokens of one row, before context or sequence parallelism splits it."""
    peaks: Mapping[str, int]
    """Phase -> most bytes of live tensors on the rank that held most then."""
    step_s: float
    """Seconds of an optimizer step on the slowest rank."""
    scored_beside: str = ""
    """``planner.problem.scored_beside`` of the job that ran."""
    out_of_memory: str = ""
    """What it said that ran short, on which rank; then there are no peaks and no seconds."""
    source: str = ""

    def is_of(self, architecture: Architecture, sequence: int) -> bool:
        """Whether ``architecture`` and the length are what ran."""
        same = (self.vocab, self.tied, self.layers) == (architecture.vocab, architecture.tied, architecture.num_layers)
        return same and self.sequence == sequence and self.shape == shape_hash(architecture)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that is known by measurement for one plan."""

    card: str | None
    """Id of the card in the card table, else its name; None is the CPU."""
    rates: MeasuredRates | None = None
    jobs: tuple[MeasuredJob, ...] = ()
    """Of this card, the planned layers and the stack's versions."""
    wholes: tuple[MeasuredWhole, ...] = ()
    """Of the same, newest first: each for its own choice alone."""

    @property
    def machine_rates(self) -> MeasuredRates | None:
        """``rates`` with the context of a job where one was probed, which has loaded more kernels."""
        contexts = [job.context_bytes for job in self.jobs if job.context_bytes]
        if not contexts:
            return self.rates
        return replace(self.rates or MeasuredRates(source=self.jobs[0].source), context_bytes=max(contexts))


def measured_hardware(hardware: Hardware, rates: MeasuredRates) -> Hardware:
    """``hardware`` with peaks that reach ``rates`` under the shares that the models take of peaks.

    A product in training reaches less than the best product alone: the share between the two is that of the card whose
    training was timed (``planner.time.rates``). What was not measured stays as it is.
    """
    changes: dict[str, object] = {}
    # The CPU's ranks share what was measured of all its cores.
    ranks = hardware.gpus_per_node if hardware.device == "cpu" else 1
    if rates.matmul_flops:
        peak = hardware.matmul_flops if hardware.device == "cuda" else None
        changes["matmul_flops"] = peak or rates.matmul_flops / REFERENCE_CEILING / ranks
        if peak:
            changes["matmul_ceiling"] = rates.matmul_flops / peak
    if rates.fp32_flops:
        changes["fp32_flops"] = rates.fp32_flops / FP32_MATMUL / ranks
    if rates.bandwidth:
        changes["bandwidth"] = rates.bandwidth / STREAMING / ranks
    if rates.host_link and hardware.device == "cuda":
        changes["host_link"] = rates.host_link / HOST_LINK_SHARE
    if rates.link:
        changes["link"] = rates.link / LINK_SHARE
    if rates.context_bytes and hardware.device == "cuda":
        changes["context_bytes"] = rates.context_bytes
    if rates.matmul_flops and rates.bandwidth:
        changes["measured"] = True
    return replace(hardware, **changes)  # type: ignore[arg-type]


def first_layers(architecture: Architecture, count: int) -> Architecture:
    """The text model of ``architecture`` cut to its first ``count`` layers, as a probe builds it."""
    return replace(architecture, order=architecture.order[:count], vision_parameters=0, vision_linears=())


def probe_depths(architecture: Architecture, recompute: str = "none") -> tuple[int, int]:
    """Two depths whose difference is what more depth adds: 1 and 2, or more where layers differ.

    The smaller holds every kind of layer. Where kinds alternate the larger holds the pattern twice; where they follow
    each other (dense layers before mixtures) it holds one layer more, of the kind that the rest is made of. Where every
    n-th layer is recomputed, both are multiples of n.
    """
    order = architecture.order
    every = int(recompute.removeprefix("every_")) if recompute.startswith("every_") else 1
    small = -(-(1 + max(order.index(kind) for kind in set(order))) // every) * every
    repeats = order[:small] == order[small : 2 * small]
    return min(small, len(order)), min(2 * small if repeats else small + every, len(order))


def probed_choice(choice: Choice) -> Choice:
    """``choice`` as one rank can run it alone, computing in the dtypes that its layers compute in.

    FSDP and DeepSpeed hold fp32 beside what they compute in; without them the same layers are those of bf16 weights.
    """
    bare = replace(
        choice,
        sharding="none",
        cp=1,
        sp=1,
        tp=1,
        dp_shard=1,
        dp_replicate=1,
        grad_accum=1,
        offload=choice.offload & {"activations"},
    )
    if choice.sharding not in FSDP2 | ZERO or choice.mixed_precision == "no":
        return bare
    return replace(bare, weights=choice.mixed_precision, mixed_precision="no")


def matching(jobs: tuple[MeasuredJob, ...], model: MemoryModel, choice: Choice) -> MeasuredJob | None:
    """The measured job whose layers and loss ``choice`` runs, None where none was measured.

    How states are held may differ: what a probe corrects is the work of one rank.
    """
    architecture = model.job.architecture
    for job in jobs:
        ran = job.choice
        if (
            (ran.recompute, ran.loss_path, ran.packing) == (choice.recompute, choice.loss_path, choice.packing)
            and ("activations" in ran.offload) == ("activations" in choice.offload)
            and ran.precision == choice.precision
            and choice.cp == choice.sp == choice.tp == 1
            and job.is_of(architecture)
            and (choice.method == "full" or job.lora_r == model.job.lora_r)
            and job.options == option_key(architecture, model.activation_options(choice))
        ):
            return job
    return None


class Matcher:
    """``matching`` for the tens of thousands of choices of one search, of which most ask the same."""

    __slots__ = ("_jobs", "_known", "_model", "_nearest")

    def __init__(self, jobs: tuple[MeasuredJob, ...], model: MemoryModel) -> None:
        self._jobs, self._model = tuple(job for job in jobs if job.is_of(model.job.architecture)), model
        self._known: dict[tuple[object, ...], MeasuredJob | None] = {}
        self._nearest: dict[tuple[object, ...], MeasuredJob | None] = {}

    def __call__(self, choice: Choice) -> MeasuredJob | None:
        """The measured job whose layers and loss ``choice`` runs."""
        key = self._key(choice)
        if key not in self._known:
            self._known[key] = matching(self._jobs, self._model, choice)
        return self._known[key]

    @staticmethod
    def _key(choice: Choice) -> tuple[object, ...]:
        """All of ``choice`` that a probe is told apart by."""
        return (
            *(choice.method, choice.recompute, choice.loss_path, choice.packing, choice.precision),
            *(choice.weights, choice.mixed_precision, choice.sharding, choice.attention),
            *("activations" in choice.offload, choice.cp * choice.sp * choice.tp == 1, choice.micro_batch > 1),
        )

    def nearest(self, choice: Choice) -> MeasuredJob | None:
        """The measured job of the same layers, method and dtype of products that differs least from ``choice``."""
        key = self._key(choice)
        if key not in self._nearest:
            same = (choice.method, choice.precision, compute_bytes(choice))
            alike = [
                job
                for job in self._jobs
                if (job.choice.method, job.choice.precision, compute_bytes(job.choice)) == same
            ]
            self._nearest[key] = min(alike, key=lambda job: _distance(job.choice, choice), default=None)
        return self._nearest[key]


def _distance(ran: Choice, choice: Choice) -> tuple[bool, ...]:
    """What matters most for the seconds of a layer comes first."""
    knobs = ("attention", "packing", "recompute", "loss_path", "weights")
    return tuple(getattr(ran, knob) != getattr(choice, knob) for knob in knobs)


def same_states(job: MeasuredJob, choice: Choice) -> bool:
    """Whether ``choice`` holds and updates its states as the probe did, so that the optimizer's step is its own."""
    ran = job.choice
    held = (ran.weights, ran.mixed_precision, ran.optimizer) == (
        choice.weights,
        choice.mixed_precision,
        choice.optimizer,
    )
    return held and choice.sharding in ("none", "ddp") and not choice.offload - {"activations"}


def near(job: MeasuredJob, tokens: int) -> bool:
    """Whether ``tokens`` of a micro-batch are near enough to the probed lengths to be called measured."""
    low, high = job.lengths
    return low <= 2 * tokens and tokens <= 2 * high
