"""Checkpoints of a run folder: which are whole, what one takes on the disk, and which plan can go on from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.ending.run_metrics import as_integer, as_mapping, as_number
from launcher.running.run_record import CHECKPOINTS, MODEL

STATE = "trainer_state.json"
"""transformers writes it after everything else of a checkpoint (trainer.py, ``_save_checkpoint``)."""
KEPT = 2
"""Checkpoints that a written run keeps; an older one goes only after the next is whole."""
INCOMPLETE = "incomplete-"

_NAME = re.compile(r"checkpoint-(\d+)")
_FULL_STATE = frozenset({"fsdp", "fsdp_no_reshard", "hsdp", "fsdp1"})
_CUT = frozenset({"zero1", "zero2", "zero3"})
_ALONE = frozenset({"none", "ddp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """What a run writes beside its log, in bytes."""

    checkpoint_bytes: int
    """One checkpoint; 0 for a run that saves none."""
    model_bytes: int
    """The model that is saved at the end."""
    num_kept: int

    @property
    def whole_bytes(self) -> int:
        """The most at any time: the kept checkpoints, the one being written, and the model."""
        at_once = self.num_kept + 1 if self.checkpoint_bytes else 0
        return at_once * self.checkpoint_bytes + self.model_bytes


def disk_need(plan: Mapping[str, Any] | None) -> DiskNeed | None:
    """What the run of a plan writes, or None where the plan does not say enough.

    Weights as the checkpoint holds them and the optimizer's states of what trains, over all ranks: the safetensors and
    torch files around them add thousandths. Under adapters only these are saved (PEFT, ``save_pretrained``).

    Args:
        plan: plan.json.
    """
    data = as_mapping(plan)
    best, parameters = as_mapping(data.get("best")), as_mapping(as_mapping(data.get("architecture")).get("parameters"))
    choice, roles = as_mapping(best.get("choice")), as_mapping(as_mapping(best.get("memory")).get("roles"))
    settings = as_mapping(as_mapping(data.get("job")).get("trl"))
    trainable, total = as_integer(parameters.get("trainable")), as_integer(parameters.get("total"))
    adapters = choice.get("method") in ("lora", "qlora")
    of = as_mapping(roles.get("adapters" if adapters else "trained"))
    widths = [as_number(of.get(role)) for role in ("weights", "master", "moment1", "moment2")]
    if trainable is None or total is None or None in widths:
        return None
    weights, master, first, second = (width or 0.0 for width in widths)
    model_bytes = int((trainable if adapters else total) * weights)
    states = 0 if settings.get("save_only_model") is True else int(trainable * (master + first + second))
    if str(choice.get("sharding")) in _FULL_STATE | _CUT and states:
        states += model_bytes  # FSDP and DeepSpeed keep weights of their own beside the Hugging Face ones
    saves = settings.get("save_strategy", "epoch") not in ("no", False)
    kept = as_integer(settings.get("save_total_limit", KEPT))
    return DiskNeed(
        checkpoint_bytes=model_bytes + states if saves else 0,
        model_bytes=model_bytes,
        num_kept=KEPT if kept is None else max(1, kept),
    )


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or None."""
    return next((path for _, path in reversed(_numbered(folder)) if (path / STATE).is_file()), None)


def largest_checkpoint_bytes(folder: Path) -> int | None:
    """What the largest whole checkpoint of a run takes, or None before there is one."""
    return max((_size(path) for _, path in _numbered(folder) if (path / STATE).is_file()), default=None)


def newest_save_bytes(folder: Path) -> int:
    """Bytes of the newest checkpoint, whole or not, and of the trained model: they grow while it is saved."""
    newest = [path for _, path in _numbered(folder)[-1:]]
    return sum(_size(path) for path in (*newest, folder / MODEL))


def set_incomplete_aside(folder: Path) -> list[str]:
    """Rename checkpoints that a dead run left half-written, which a resumed trainer would take for the newest.

    Returns:
        Their new names.

    Raises:
        OSError: the folder is read-only.
    """
    moved: list[str] = []
    for _, path in _numbered(folder):
        if not (path / STATE).is_file():
            target = path.with_name(INCOMPLETE + path.name)
            number = 1
            while target.exists():
                number += 1
                target = path.with_name(f"{INCOMPLETE}{path.name}.{number}")
            path.rename(target)
            moved.append(target.name)
    return moved


def why_not_loadable(before: Mapping[str, Any], after: Mapping[str, Any], transformers: str | None) -> str | None:
    """Why a run of one choice cannot go on from a checkpoint of another, as a clause; None where it can.

    Recompute, loss path, attention, micro-batch and offloaded activations leave no trace in a checkpoint. DeepSpeed's
    is cut by stage and ranks; FSDP's is whole, for any number of ranks; one process and DDP write the same. Trainers
    of transformers before 5.3 took the micro-batch of the checkpoint (huggingface/transformers, pull request 43770).

    Args:
        before: knobs of the choice that saved the checkpoint.
        after: knobs of the choice that would go on.
        transformers: the version that would, where it is known.
    """
    for knob in ("method", "optimizer", "weights", "mixed_precision"):
        if before.get(knob) != after.get(knob):
            return f"it was saved with {knob}={before.get(knob)}, and the next plan has {knob}={after.get(knob)}"
    old, new = str(before.get("sharding")), str(after.get("sharding"))
    together = any({old, new} <= family for family in (_ALONE, _FULL_STATE - {"fsdp1"}, {"fsdp1"}))
    if old != new and not together:
        return f"it was saved under sharding={old}, which sharding={new} cannot load"
    if old in _CUT:
        for knob in ("dp_shard", "dp_replicate", "sp", "cp", "tp"):
            if before.get(knob) != after.get(knob):
                return f"it was saved under {old} with {knob}={before.get(knob)}, not {after.get(knob)}"
        if _states_offloaded(before) != _states_offloaded(after):
            return f"it was saved under {old} with other states offloaded"
    if before.get("micro_batch") != after.get("micro_batch") and not _reads_own_batch(transformers):
        return f"transformers {transformers or 'of this run'} would take the micro-batch of the checkpoint"
    return None


def _states_offloaded(choice: Mapping[str, Any]) -> set[str]:
    return {str(part) for part in choice.get("offload") or ()} - {"activations"}


def _reads_own_batch(version: str | None) -> bool:
    numbers = [int(part) for part in re.findall(r"\d+", version or "")[:2]]
    return numbers >= [5, 3]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    try:
        paths = list((folder / CHECKPOINTS).iterdir())
    except OSError:
        return []
    found = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted(found)


def _size(checkpoint: Path) -> int:
    total = 0
    for path in checkpoint.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # rotated away meanwhile
            continue
    return total
