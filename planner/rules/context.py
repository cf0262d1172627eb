"""What the rules read: one job, model, machine and stack, boiled down to plain values once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.architecture import Architecture
from planner.job import Job
from planner.precision.route_time import covered_linears
from planner.precision.routes import Asked, asked_route, capability_of
from planner.rules.model import ModelFacts, read_model
from planner.rules.overrides import Overrides, read_overrides
from planner.stack import Stack
from profiles.releases import (
    TrlRelease,
    feature,
    newest_known,
    trl_release,
)

if TYPE_CHECKING:
    from planner.rules.book import Groups

FEATURES = (
    "fsdp2",
    "fsdp2_fp32_shards",
    "fsdp2_frozen_kept",
    "fsdp2_tied_embeddings",
    "parallelism_config",
    "zero",
    "context_parallel",
    "sequence_parallel",
    "recompute_every_n",
    "recompute_selective",
    "offload_activations",
    "flash_attention_2",
    "stacked_experts",
    "chunked_sharded_head",
    "lora",
    "qlora",
    "qlora_sharded",
    "fused_adamw_cpu",
)
"""Features of ``profiles.releases`` that a rule asks about."""
HEAD_MODULES = frozenset({"lm_head", "embed_out"})
"""Names that transformers gives the output head."""
DEFAULT_GENERATIONS = {"grpo": 8, "rloo": 2}
"""``num_generations`` of each config (grpo_config.py:480, rloo_config.py:301 @1.16.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """Everything a rule may look at besides the choice; read once per job by ``read_context``."""

    # The job.
    trainer: str
    method: str
    quantization: str
    packing: bool
    seq_len: int
    global_batch: int
    head_adapter: bool
    """The adapter names the output head among its targets."""
    num_generations: int
    asks: Overrides
    # The machine.
    on_cpu: bool
    gpus_per_node: int
    num_gpus: int
    """Processes that the machine has room for, over all nodes."""
    capability: str
    """Compute capability of the cards as people write it, or ``unknown``."""
    compute_capability: tuple[int, int] | None
    # The stack.
    release: TrlRelease
    loss_paths: frozenset[str]
    """Loss paths that this release has for this trainer."""
    versions: Mapping[str, str] = field(hash=False)
    lacks: Mapping[str, str] = field(hash=False)
    """Feature that the stack does not have -> what it needs and what is there."""
    model: ModelFacts
    asked_route: Asked | None = None
    """The precision route below 16 bits that the job pins."""
    route_covers: bool = True
    """Some layer of the model has widths that its groups divide."""
    cuda: str | None = None
    """The CUDA that torch was built for, where it is known."""
    # Rules that can have something against a choice here.
    rules: Groups = field(default=(), repr=False, compare=False)
    warnings: Groups = field(default=(), repr=False, compare=False)

    @property
    def old_card(self) -> bool:
        """A card without bfloat16 tensor cores, where that is known."""
        return self.compute_capability is not None and self.compute_capability < (8, 0)

    @property
    def min_micro_batch(self) -> int:
        """Rows that a micro-batch must hold: KTO's KL term pairs each with another."""
        return 2 if self.trainer == "kto" and self.asks.kl_batch else 1

    @property
    def adapter(self) -> bool:
        """The job trains an adapter."""
        return self.method != "full"

    @property
    def trl(self) -> str:
        """TRL's version."""
        return self.release.version


def read_context(
    job: Job,
    architecture: Architecture,
    stack: Stack,
    *,
    device: str,
    gpus_per_node: int,
    compute_capability: str | None,
) -> RuleContext:
    """Boil a job, a model, a stack and a machine down to what the rules read.

    Args:
        job: what the user wants.
        architecture: the model's shapes.
        stack: versions; torch, transformers, trl, accelerate and peft count as the newest known
            when they are left out, unless the stack says that they are absent.
        device: ``cuda`` or ``cpu``.
        gpus_per_node: cards of one node; on ``cpu``, processes of one node (at least one).
        compute_capability: of the cards, such as ``8.0``; None when it is not known.
    """
    versions = _versions(stack)
    lacks = _lacking(versions)
    release = trl_release(versions.get("trl", newest_known()["trl"]))
    asked = asked_route(job.pins)
    per_node = max(1, gpus_per_node)
    return RuleContext(
        trainer=job.trainer,
        method=job.method,
        quantization=job.quantization,
        packing=job.data.packing,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        head_adapter=_targets_head(job.lora.target_modules),
        num_generations=_generations(job),
        asks=read_overrides(job.trl),
        on_cpu=device == "cpu",
        gpus_per_node=per_node,
        num_gpus=per_node * job.nodes,
        capability=compute_capability or "unknown",
        compute_capability=capability_of(compute_capability),
        release=release,
        loss_paths=frozenset(release.loss_paths_for(job.trainer)),
        versions=versions,
        lacks=lacks,
        model=read_model(architecture, stacks_experts="stacked_experts" not in lacks),
        asked_route=asked,
        cuda=stack.cuda,
        route_covers=asked is None or any(covered_linears(kind, asked.route.features) for kind in architecture.kinds),
    )


def _versions(stack: Stack) -> dict[str, str]:
    assumed = {package: version for package, version in newest_known().items() if stack.origin.get(package) != "absent"}
    return {**assumed, **stack.versions}


def _lacking(versions: Mapping[str, str]) -> dict[str, str]:
    found = {name: feature(name, versions) for name in FEATURES}
    return {name: got.lacking for name, got in found.items() if not got.available}


def _targets_head(targets: str | list[str]) -> bool:
    # PEFT's `all-linear` leaves the output head out.
    return isinstance(targets, list) and any(target.rsplit(".", 1)[-1] in HEAD_MODULES for target in targets)


def _generations(job: Job) -> int:
    given = read_overrides(job.trl).num_generations
    return given if given is not None else DEFAULT_GENERATIONS.get(job.trainer, 1)
