"""Adapters: which modules PEFT's LoRA reaches in an architecture, and the parameters that adds.

As PEFT 0.21 resolves targets on transformers 5: ``all-linear`` is every ``nn.Linear`` but the
output head, vision towers included; a list matches the last parts of module names. In the mixtures
that PEFT converts from their older layout (Mixtral, Qwen3-MoE, Qwen3-Next, DeepSeek, OLMoE,
GLM-4-MoE) the old expert and router names, and so ``all-linear``, reach the stacked expert
parameters and the router through ``target_parameters``, and no longer the dense modules of the same
names. Other mixtures (gpt-oss, Qwen3.5-MoE, Qwen2-MoE, Granite-MoE) keep their experts out of reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.architecture import Architecture, FusedExperts, LayerKind, Linear

ALL_LINEAR = "all-linear"

_MIXTRAL = {"gate": "gate", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_QWEN_MOE = {
    "gate": "gate",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
_CONVERTED: dict[str, dict[str, str]] = {"mixtral": _MIXTRAL} | dict.fromkeys(
    ("qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe"), _QWEN_MOE
)
"""``model_type`` -> old module name -> the parameter that took its place, as PEFT's
``transformers_weight_conversion`` maps them."""


_PARENTS = {
    "self_attn": "attention",
    "linear_attn": "attention",
    "attention": "attention",
    "attn": "attention",
    "mlp": "mlp",
    "shared_expert": "mlp",
    "shared_experts": "mlp",
}
"""What may stand before the name in a target such as ``self_attn.q_proj``, and its role."""


class TargetError(ValueError):
    """Targets that PEFT refuses: one line for the user."""


def lora_modules(architecture: Architecture, targets: str | Sequence[str]) -> tuple[tuple[Linear, ...], ...]:
    """The adapted modules of one layer, for every kind of ``architecture.kinds``.

    A module of ``count`` n carries n adapters of the given rank. Stacked experts appear as one
    entry of role ``experts``: PEFT gives their fused gate and up projection twice the rank, which
    counts as two adapters an expert.

    Args:
        architecture: the model.
        targets: ``all-linear``, one module name, or several, each the end of a path (``q_proj``,
            ``self_attn.q_proj``).

    Raises:
        TargetError: half of a fused pair is named without the other.
    """
    wanted = _Targets(architecture, targets)
    return tuple(wanted.of_kind(kind) for kind in architecture.kinds)


def outer_lora_modules(architecture: Architecture, targets: str | Sequence[str]) -> tuple[Linear, ...]:
    """The adapted modules outside the layers: vision towers, and head or embedding when named."""
    return _Targets(architecture, targets).outside()


def adapter_parameters(modules: Iterable[Linear], r: int) -> int:
    """Parameters of adapters of rank ``r`` beside ``modules``: ``r x (in + out)`` for each."""
    return sum(r * m.count * (m.in_features + m.out_features) for m in modules)


def lora_parameters(architecture: Architecture, r: int, target_modules: str | Sequence[str]) -> int:
    """Trainable parameters of a LoRA of rank ``r``, all layers and what is outside them.

    Raises:
        TargetError: see ``lora_modules``.
    """
    per_kind = lora_modules(architecture, target_modules)
    outside = adapter_parameters(outer_lora_modules(architecture, target_modules), r)
    return outside + sum(adapter_parameters(per_kind[index], r) for index in architecture.order)


def unknown_targets(architecture: Architecture, targets: str | Sequence[str]) -> tuple[str, ...]:
    """The named targets that match nothing: PEFT ignores them, and fails when all are such."""
    if _is_all_linear(targets):
        return ()
    known = set(target_names(architecture))
    return tuple(name for name in _listed(targets) if name.rpartition(".")[2] not in known or not _parent_known(name))


def target_names(architecture: Architecture) -> tuple[str, ...]:
    """Every name that a target list may hold for this model, in the order of the layer."""
    names = [m.name for kind in architecture.kinds for m in kind.linears]
    names += [m.name for m in architecture.vision_linears]
    if any(kind.experts for kind in architecture.kinds):
        names += _conversion(architecture)
    return tuple(dict.fromkeys((*names, "embed_tokens", "lm_head")))


def adapts_experts(architecture: Architecture, targets: str | Sequence[str]) -> bool:
    """Whether expert or router parameters are adapted.

    PEFT then refuses a dropout other than 0, and every forward pass builds updated copies of the
    stacked expert parameters of a layer, as large as the experts themselves.
    """
    return any(m.role == "experts" for kind in lora_modules(architecture, targets) for m in kind)


def _is_all_linear(targets: str | Sequence[str]) -> bool:
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def _listed(targets: str | Sequence[str]) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else tuple(targets)


def _conversion(architecture: Architecture) -> dict[str, str]:
    return _CONVERTED.get(architecture.model_type, {})


class _Targets:
    """Targets resolved against one architecture."""

    def __init__(self, architecture: Architecture, targets: str | Sequence[str]) -> None:
        self._architecture = architecture
        self._conversion = _conversion(architecture)
        self._all = _is_all_linear(targets)
        self._names = frozenset(self._conversion if self._all else _listed(targets))
        last = {name.rpartition(".")[2] for name in self._names}
        self._converted = frozenset(self._conversion[name] for name in last if name in self._conversion)
        missing = [
            old
            for old, new in self._conversion.items()
            if new == "gate_up_proj" and new in self._converted and old not in last
        ]
        if missing:
            raise TargetError(
                f"lora targets lack {missing[0]}: PEFT adapts the fused gate and up projections of experts together"
            )

    def of_kind(self, kind: LayerKind) -> tuple[Linear, ...]:
        modules = [m for m in kind.linears if self._matches(m)]
        if kind.experts is not None:
            modules += (m for m in _expert_modules(kind.experts) if m.name in self._converted)
        return tuple(modules)

    def outside(self) -> tuple[Linear, ...]:
        a = self._architecture
        modules = [m for m in a.vision_linears if self._matches(m)]
        if not self._all:
            head = Linear(name="lm_head", in_features=a.hidden, out_features=a.vocab, role="other")
            ends: Iterable[Linear] = (head, replace(head, name="embed_tokens"))
            modules += (m for m in ends if self._matches(m))
        return tuple(modules)

    def _matches(self, module: Linear) -> bool:
        if module.name in self._conversion:
            return False
        return self._all or any(_names_module(name, module) for name in self._names)


def _expert_modules(experts: FusedExperts) -> tuple[Linear, ...]:
    """Router and stacked experts, as adapters of one rank see them."""
    hidden, width, count = experts.hidden, experts.intermediate, experts.num_experts
    share = experts.experts_per_token / count
    gate = Linear(name="gate", in_features=hidden, out_features=count, role="experts")
    up = Linear(
        name="gate_up_proj",
        in_features=hidden,
        out_features=2 * width,
        role="experts",
        count=2 * count,
        tokens_share=share,
    )
    down = Linear(
        name="down_proj",
        in_features=width,
        out_features=hidden,
        role="experts",
        count=count,
        tokens_share=share,
    )
    return (gate, up, down)


def _names_module(target: str, module: Linear) -> bool:
    parent, _, last = target.rpartition(".")
    if last != module.name:
        return False
    # Towers call their parts differently, so a path decides only inside the decoder.
    return not parent or (_parent_known(target) and module.role in ("other", _PARENTS[parent]))


def _parent_known(target: str) -> bool:
    parent = target.rpartition(".")[0]
    return not parent or parent in _PARENTS
