"""What a choice holds and adds, part by part: the values that a frame puts together for every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from planner.architecture import Architecture
from planner.choice import FSDP2, SHARDED, ZERO, Choice, Method
from planner.hardware import Hardware
from planner.memory.activations import ActivationsAt, activations_at
from planner.memory.blocks import Blocks, parameter_blocks
from planner.memory.coefficients import Coefficients
from planner.memory.device import DeviceModel, device_model
from planner.memory.formula import ActivationOptions
from planner.memory.host import HostPart, largest_parameter_bytes
from planner.memory.loss import NO_METRICS, LossBytes, loss_bytes
from planner.memory.phases import HeldBytes, LayerWalk, LayerWalker, States, held_bytes, resident_states
from planner.memory.sharding import ShardingBytes, reads_resting_head, sharding_bytes
from planner.memory.states import (
    DTYPE_BYTES,
    RoleTable,
    adapter_bytes,
    compute_bytes,
    residual_bytes,
    role_table,
    runs_under_autocast,
    trainable_roles,
    uses_autocast,
)
from profiles.releases import LogitMetrics

if TYPE_CHECKING:
    from profiles.routes import Route

CoefficientSource = Callable[[Architecture, ActivationOptions], Coefficients]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryJob:
    """What the memory of every candidate of one job depends on besides the choice."""

    architecture: Architecture
    seq_len: int
    lora_r: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: bool = False
    quantization: str = "nf4"
    rows_per_sequence: int = 1
    """Rows that one training example makes: 2 for preference pairs (chosen and rejected)."""
    padded: bool = True
    """Rows differ in length, so a batch above one carries a padding mask."""
    reference_model: bool = False
    """A frozen copy of the model is held beside the policy (DPO, KTO without adapters)."""
    reference_in_loss: bool = False
    """It scores between the policy's forward and backward (DPO, KTO); RLOO's has done so when answers were made."""
    reference_before: bool = False
    """The reference scores all rows before training and is gone then: ``precompute_ref_log_probs``, no adapters."""
    evaluates: bool = False
    eval_rows: int | None = None
    """Examples of one evaluation batch on one rank; None is as many as in training."""
    scores_vocabulary: bool = True
    """The loss goes through the vocabulary head; a reward model's scalar head does not."""
    logit_metrics: LogitMetrics = NO_METRICS
    """What this TRL release's metrics hold beside full logits."""
    liger_in_place: bool = True
    """liger-kernel adds to the head's gradient in place (0.8.3 and later)."""
    fsdp_first_rank_loads: bool = False
    """transformers < 5 loads a model under FSDP on the first rank of a node alone."""
    saves_optimizer: bool = True
    """Checkpoints hold the optimizer's states."""
    expandable_segments: bool = True
    """torch's allocator maps pages where it needs them (PYTORCH_CUDA_ALLOC_CONF), as written runs tell it to."""
    head_in_tail_group: bool = True
    """accelerate >= 1.14: FSDP2 has groups for embedding and head; before it the root held both."""
    route: Route | None = None
    """The precision route below 16 bits; None is bf16."""
    emulated: bool = False
    """The route's numerics by the reference layer."""


class ReferenceBytes(NamedTuple):
    """A reference model's moments on one rank, beside its share of the weights at rest."""

    load: int
    """Alone on the card while it is loaded: the policy is still on the host."""
    forward_gather: int
    in_loss: bool
    """It scores between the policy's forward and backward."""


Key = tuple[object, ...]


@dataclass(slots=True)
class Shared:
    """What frames have in common, by what it depends on."""

    states: dict[Key, tuple[States, HeldBytes]] = field(default_factory=dict[Key, tuple[States, HeldBytes]])
    hosts: dict[Key, tuple[HostPart, ...]] = field(default_factory=dict[Key, tuple[HostPart, ...]])
    host_peaks: dict[Key, int] = field(default_factory=dict[Key, int])
    shards: dict[Key, ShardingBytes] = field(default_factory=dict[Key, ShardingBytes])
    activations: dict[Key, dict[int, tuple[Coefficients, ActivationsAt]]] = field(
        default_factory=dict[Key, dict[int, tuple[Coefficients, ActivationsAt]]]
    )
    losses: dict[Key, dict[int, LossBytes]] = field(default_factory=dict[Key, dict[int, LossBytes]])
    walkers: dict[Key, dict[bool, LayerWalker]] = field(default_factory=dict[Key, dict[bool, LayerWalker]])
    walks: dict[Key, dict[tuple[int, bool], LayerWalk]] = field(
        default_factory=dict[Key, dict[tuple[int, bool], LayerWalk]]
    )


@dataclass(slots=True)
class MemoryParts:
    """Parts of any choice for one job on one machine. Pure; keeps what candidates share."""

    job: MemoryJob
    hardware: Hardware
    reserve: float
    source: CoefficientSource
    usable_bytes: int = field(init=False)
    """Capacity less the reserve."""
    shared: Shared = field(default_factory=Shared, init=False)
    _blocks: dict[Method, Blocks] = field(default_factory=dict[Method, Blocks], init=False)

    def __post_init__(self) -> None:
        self.usable_bytes = int((self.hardware.capacity_bytes or 0) * (1 - self.reserve))

    def blocks(self, method: Method) -> Blocks:
        """Parameters by part and fate under ``method``, cached."""
        found = self._blocks.get(method)
        if found is None:
            found = parameter_blocks(self.job.architecture, method, self.job.lora_r, self.job.lora_targets)
            self._blocks[method] = found
        return found

    def roles(self, choice: Choice) -> RoleTable:
        """Bytes per parameter of every fate under ``choice``."""
        return role_table(choice, self.job.quantization)

    def states_of(self, choice: Choice) -> tuple[States, HeldBytes]:
        """What ``choice`` holds at rest, on the card and altogether."""
        blocks, roles = self.blocks(choice.method), self.roles(choice)
        held = held_bytes(blocks.total, roles)
        if self.job.reference_model:
            copy = blocks.num_parameters * DTYPE_BYTES[choice.weights] / roles.frozen.weights_ranks
            held = replace(held, weights=held.weights + copy)
        states = resident_states(choice, blocks, roles, held, tied=self.job.architecture.tied)
        buffer = largest_parameter_bytes(choice, self.job.architecture)
        if buffer:
            rest = {**states.rest, "offload_buffers": float(buffer)}
            states = replace(states, rest=rest, rest_bytes=states.rest_bytes + buffer)
        return states, held

    def activations_of(self, choice: Choice) -> tuple[Coefficients, ActivationsAt]:
        """Coefficients of ``choice`` and their values at its micro-batch."""
        job, tokens = self.job, rank_tokens(self.job, choice)
        coefficients = self.source(job.architecture, self.activation_options(choice))
        at = activations_at(coefficients, tokens, job.seq_len)
        if job.route is not None:
            from planner.precision.route_memory import with_route  # plans in bf16 do without

            at = with_route(at, job.architecture, job.route, tokens, emulated=job.emulated)
        return coefficients, at

    def shard_of(self, choice: Choice) -> ShardingBytes:
        """What the sharding of ``choice`` adds."""
        blocks, roles, job = self.blocks(choice.method), trainable_roles(choice), self.job
        return sharding_bytes(choice, job.architecture, blocks, roles, job.seq_len, job.head_in_tail_group)

    def reference_of(self, choice: Choice) -> ReferenceBytes:
        """What a frozen reference model adds to its copy of the weights.

        TRL wraps it as one FSDP2 group (trl/models/utils.py: ``prepare_fsdp``): ``fully_shard`` moves it to the card
        whole before it cuts it (_fsdp_init.py:567), and its forward gathers all of it. One that scores before training
        does so while the policy is on the host; without FSDP2 the policy itself does (dpo_trainer.py, kto_trainer.py).
        """
        if choice.sharding not in FSDP2 or not (self.job.reference_model or self.job.reference_before):
            return ReferenceBytes(0, 0, self.job.reference_in_loss and choice.sharding not in ZERO)
        count = self.blocks(choice.method).num_parameters
        if self.job.reference_before:
            return ReferenceBytes(load=DTYPE_BYTES[choice.weights] * count, forward_gather=0, in_loss=False)
        gathered = compute_bytes(choice) * count
        return ReferenceBytes(load=DTYPE_BYTES[choice.weights] * count, forward_gather=gathered, in_loss=True)

    def device_of(self, choice: Choice) -> DeviceModel:
        """How the tensors of ``choice`` become what the card shows."""
        return device_model(choice, self.hardware, expandable_segments=self.job.expandable_segments)

    def loss_of(self, choice: Choice) -> LossBytes:
        """What the loss of ``choice`` allocates."""
        job, arch = self.job, self.job.architecture
        if not job.scores_vocabulary:
            return LossBytes(0, 0, "one score per sequence", "trl reward_trainer.py")
        rests = reads_resting_head(choice, tied=arch.tied, tail_group=job.head_in_tail_group)
        gathered = choice.sharding in SHARDED and not rests
        return loss_bytes(
            choice.loss_path,
            tokens=rank_tokens(job, choice),
            vocab=arch.vocab,
            hidden=arch.hidden,
            hidden_bytes=residual_bytes(choice),
            head_bytes=compute_bytes(choice) if gathered else DTYPE_BYTES[choice.weights],
            compute_bytes=compute_bytes(choice),
            head_trains=choice.method == "full",
            autocast=uses_autocast(choice),
            softcap=arch.logit_softcap is not None,
            rows=choice.micro_batch * job.rows_per_sequence,
            metrics=job.logit_metrics,
            liger_in_place=job.liger_in_place,
        )

    def activation_options(self, choice: Choice) -> ActivationOptions:
        """The options under which coefficients for ``choice`` are asked."""
        full = choice.method == "full"
        targets = self.job.lora_targets
        padded = self.job.padded and choice.micro_batch * self.job.rows_per_sequence > 1
        return ActivationOptions(
            residual_bytes=residual_bytes(choice),
            compute_bytes=compute_bytes(choice),
            trains_base=full,
            lora_targets=None if full else targets,
            lora_r=0 if full else self.job.lora_r,
            lora_dropout=self.job.lora_dropout and not full,
            adapter_bytes=adapter_bytes(choice),
            attention=choice.attention,
            masked=(padded or choice.packing) and choice.attention != "flash_attention_2",
            quantised=choice.method == "qlora",
            mask_bias=self.hardware.device == "cuda",
            autocast=runs_under_autocast(choice),
        )


def rank_tokens(job: MemoryJob, choice: Choice) -> int:
    """Tokens of one micro-batch on one rank."""
    rows = choice.micro_batch * job.rows_per_sequence
    return rows * -(-job.seq_len // (choice.cp * choice.sp))
