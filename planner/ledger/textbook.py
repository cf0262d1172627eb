"""The textbook count: five roles of bytes per parameter, 17 saved tensors per layer, ZeRO stages as dividers.

Kept beside the model of the real stack because people know it, argue about it (16, 18 or 20 bytes per parameter) and
deserve to see where their stack differs. It leaves out score matrices, the gathers of stage 3, and the loss.
Source: the ZeRO paper (arXiv 1910.02054) for roles and stages, Korthikanti et al. (arXiv 2205.05198) for
34 x s x b x h bytes per layer, which is 17 tensors of (batch x seq x hidden) at 2 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.units import GIB

ROLES = ("weights", "gradient", "master", "moment1", "moment2")
FIRST_STAGE = {"weights": 3, "gradient": 2, "master": 1, "moment1": 1, "moment2": 1}
"""The lowest stage that divides each role."""
SAVED_TENSORS = 17
MAX_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TextbookInput:
    """Every cell of the textbook sheet; all of them can be edited."""

    params: int = 8_000_000_000
    hidden: int = 4096
    layers: int = 32
    batch: int = 1
    seq_len: int = 4096
    card_bytes: int = 80 * GIB
    devices: int = 1
    stage: Literal[0, 1, 2, 3] = 0
    recompute: bool = False
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    mixed_precision: bool = True
    saved_tensors: int = SAVED_TENSORS
    bytes_per_element: int = 2
    role_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Edited widths: role -> bytes per parameter."""

    def widths(self) -> dict[str, int]:
        """Bytes per parameter of each role after optimizer, mixed precision and edits."""
        widths = {"weights": 2, "gradient": 2, "master": 4, "moment1": 4, "moment2": 4}
        if not self.mixed_precision:
            widths["master"] = 0
        if self.optimizer == "sgd":
            widths["moment1"] = 0
        if self.optimizer != "adam":
            widths["moment2"] = 0
        return {**widths, **self.role_bytes}


def role_total_bytes(sheet: TextbookInput, role: str) -> int:
    """Bytes of one role over all devices."""
    return sheet.params * sheet.widths()[role]


def states_bytes(sheet: TextbookInput, stage: int, devices: int) -> int:
    """Model states on one device under ``stage``, rounded up to whole bytes."""
    total = 0
    for role in ROLES:
        divider = devices if stage >= FIRST_STAGE[role] else 1
        total += -(-role_total_bytes(sheet, role) // divider)
    return total


def activations_bytes(sheet: TextbookInput) -> int:
    """Saved activations on one device; the stage never divides them."""
    tensors = 1 if sheet.recompute else sheet.saved_tensors
    return tensors * sheet.hidden * sheet.bytes_per_element * sheet.layers * sheet.seq_len * sheet.batch


def fewest_devices(sheet: TextbookInput, stage: int) -> int | None:
    """The smallest number of devices whose share fits the card, or None when no number does.

    Bytes per device fall with the number of devices, so a bisection finds it.
    """
    limit = sheet.card_bytes - activations_bytes(sheet)

    def fits(devices: int) -> bool:
        return states_bytes(sheet, stage, devices) <= limit

    if fits(1):
        return 1
    if not fits(MAX_DEVICES):
        return None
    low, high = 1, MAX_DEVICES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def textbook(sheet: TextbookInput) -> dict[str, object]:
    """The whole sheet as JSON-ready values: totals, roles, verdict, fewest devices by stage."""
    widths = sheet.widths()
    states = states_bytes(sheet, sheet.stage, sheet.devices)
    activations = activations_bytes(sheet)
    total = states + activations
    optimizer_only = sum(role_total_bytes(sheet, role) for role in ("master", "moment1", "moment2"))
    undivided = sum(role_total_bytes(sheet, role) for role in ROLES)
    inference = role_total_bytes(sheet, "weights")
    full_activations = activations * (sheet.saved_tensors if sheet.recompute else 1)
    return {
        "schema": "trlfit.textbook/1",
        "total_bytes": total,
        "states_bytes": states,
        "activations_bytes": activations,
        "activation_bytes_per_token_per_layer": activations // max(1, sheet.layers * sheet.seq_len * sheet.batch),
        "saved_by_recompute_bytes": full_activations - activations,
        "extra_matmul_passes": 1 / 3 if sheet.recompute else 0.0,
        "bytes_per_parameter": sum(widths.values()),
        "roles": {
            role: {
                "bytes_per_parameter": widths[role],
                "total_bytes": role_total_bytes(sheet, role),
                "divided_from_stage": FIRST_STAGE[role],
                "per_device_bytes": -(
                    -role_total_bytes(sheet, role) // (sheet.devices if sheet.stage >= FIRST_STAGE[role] else 1)
                ),
            }
            for role in ROLES
        },
        "optimizer_only_bytes": optimizer_only,
        "optimizer_only_share": optimizer_only / undivided if undivided else 0.0,
        "inference_bytes": inference,
        "times_inference": total / inference if inference else None,
        "card_bytes": sheet.card_bytes,
        "fits": total <= sheet.card_bytes,
        "short_bytes": max(0, total - sheet.card_bytes),
        "by_stage_bytes": {str(stage): states_bytes(sheet, stage, sheet.devices) + activations for stage in range(4)},
        "fewest_devices": {str(stage): fewest_devices(sheet, stage) for stage in range(4)},
        "left_out": "score matrices where a kernel makes them, the gathers of stage 3, the loss, allocator and context",
    }
