"""What if: a ledger with some of its cells set to other values, and the phases that follow from them.

A cell of a role holds bytes per parameter of one group, before sharding; a cell of a part holds bytes on one card. What
the cells make of the phases is proportion: a role that takes half takes half in every phase that holds it, and a role
that a choice does not have is held wherever its moments are. Nothing is searched and no library is asked: an edited
ledger need not be a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.units import format_bytes

ROLES = ("weights", "gradients", "master", "moment1", "moment2")
STATES = ("moment1", "moment2", "master", "gradients", "weights")
"""Whose phases a role that the choice does not have is held in: the first of these that it has."""

Json = Mapping[str, Any]


class Cell(NamedTuple):
    """One cell: a group and a role, or a part and no role."""

    row: str
    role: str = ""


class LedgerCells:
    """The cells of a `trlfit.ledger/1` document, and the memory that edits of them make."""

    def __init__(self, ledger: Json) -> None:
        """Read the cells.

        Args:
            ledger: the document.
        """
        self._memory: Json = ledger["memory"]
        self._groups: dict[str, Json] = {group["group"]: group for group in ledger["groups"]}
        self._method: str = ledger["choice"]["method"]
        peak = next(p for p in self._memory["phases"] if p["name"] == self._memory["peak_phase"])
        tensors = sum(size for part, size in peak["parts"].items() if part not in ("context", "slack"))
        self._slack_share = peak["parts"].get("slack", 0) / max(1, tensors)
        self._parts = {
            part: max(phase["parts"].get(part, 0) for phase in self._memory["phases"])
            for part in dict.fromkeys(name for phase in self._memory["phases"] for name in phase["parts"])
            if part not in (*ROLES, "slack")
        }

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of parameters."""
        return tuple(self._groups)

    @property
    def parts(self) -> tuple[str, ...]:
        """Everything that is no state of a parameter, but for the allocator's slack, which is a share of the rest."""
        return tuple(self._parts)

    def parameters(self, group: str) -> int:
        """Parameters of a group over all ranks."""
        return int(self._groups[group]["parameters"])

    def ranks(self, group: str, role: str) -> int:
        """How many ranks share a role of a group."""
        return int(self._roles(group)["divided_by"][role])

    def _roles(self, group: str) -> Json:
        """Of most of a group's parameters: a 4-bit base packs its linear layers alone."""
        fate = "frozen"
        if self._method == "full" and group != "reference":
            fate = "trained"
        elif group == "adapters":
            fate = "adapters"
        elif self._method == "qlora" and group in ("attention", "mlp", "experts"):
            fate = "quantised"
        roles: Json = self._memory["roles"]
        found: Json = roles.get(fate) or next(iter(roles.values()))
        return found

    def _whole(self, cell: Cell) -> float:
        """Bytes per parameter that every rank holds whole: a 4-bit base's scales."""
        return float(self._roles(cell.row).get("whole_weights", 0.0)) if cell.role == "weights" else 0.0

    def value(self, cell: Cell) -> float:
        """What a cell says: bytes per parameter of a role, bytes on one card of a part."""
        if not cell.role:
            return float(self._parts[cell.row])
        held = self._groups[cell.row]["bytes"][cell.role] / max(1, self.parameters(cell.row))
        whole = self._whole(cell)
        return float((held - whole) * self.ranks(cell.row, cell.role) + whole)

    def held_bytes(self, cell: Cell, edits: Mapping[Cell, float]) -> int:
        """Bytes of a cell on one card, with the edits."""
        if not cell.role:
            return int(edits.get(cell, self._parts[cell.row]))
        if cell in edits:
            whole = min(self._whole(cell), edits[cell])
            width = (edits[cell] - whole) / self.ranks(cell.row, cell.role) + whole
            return int(width * self.parameters(cell.row))
        return int(self._groups[cell.row]["bytes"][cell.role])

    def formula(self, cell: Cell, edits: Mapping[Cell, float]) -> str:
        """``622,329,856 x 4 B / 8 GPUs = 296.8 MiB`` of a role's cell."""
        ranks = self.ranks(cell.row, cell.role)
        width = edits.get(cell, self.value(cell))
        whole = min(self._whole(cell), width)
        shared = f" / {ranks} GPUs" if ranks > 1 else ""
        held = format_bytes(self.held_bytes(cell, edits))
        if whole and ranks > 1:
            return f"{self.parameters(cell.row):,} x ({width - whole:g} B{shared} + {whole:g} B of scales) = {held}"
        return f"{self.parameters(cell.row):,} x {width:g} B{shared} = {held}"

    def memory(self, edits: Mapping[Cell, float]) -> dict[str, Any]:
        """The memory document with the edits; without any it is the ledger's own.

        Args:
            edits: cell -> value, in the cell's unit.
        """
        roles = {role: self._role_bytes(role, {}) for role in ROLES}
        edited = {role: self._role_bytes(role, edits) for role in ROLES}
        phases = [
            {"name": phase["name"], "parts": self._edited_parts(phase["parts"], roles, edited, edits)}
            for phase in self._memory["phases"]
        ]
        sizes = [sum(phase["parts"].values()) for phase in phases]
        peak = phases[sizes.index(max(sizes))]
        tensors = sum(size for part, size in peak["parts"].items() if part != "context")
        slack = int(self._slack_share * tensors)
        if slack:
            peak["parts"]["slack"] = slack
        for phase in phases:
            phase["bytes"] = sum(phase["parts"].values())
        context = peak["parts"].get("context", 0)
        allocated = tensors + self._workspace_bytes()
        device = allocated + slack + context
        more = allocated - self._memory["allocated_bytes"]
        changed = {
            "low_bytes": self._memory["low_bytes"] + more,
            "high_bytes": self._memory["high_bytes"] + more,
            "phases": phases,
            "peak_phase": peak["name"],
            "allocated_bytes": allocated,
            "reserved_bytes": allocated + slack,
            "device_bytes": device,
        }
        before = self._memory["headroom_bytes"]
        if before is not None:
            changed["headroom_bytes"] = before + self._memory["device_bytes"] - device
        return {**self._memory, **changed} if edits else dict(self._memory)

    def _workspace_bytes(self) -> int:
        """What is allocated at the peak and is no part: cuBLAS's workspaces."""
        peak = next(p for p in self._memory["phases"] if p["name"] == self._memory["peak_phase"])
        tensors = sum(size for part, size in peak["parts"].items() if part not in ("context", "slack"))
        return int(self._memory["allocated_bytes"] - tensors)

    def _role_bytes(self, role: str, edits: Mapping[Cell, float]) -> int:
        return sum(self.held_bytes(Cell(group, role), edits) for group in self._groups)

    def _edited_parts(
        self,
        parts: Mapping[str, int],
        roles: Mapping[str, int],
        edited: Mapping[str, int],
        edits: Mapping[Cell, float],
    ) -> dict[str, int]:
        out: dict[str, int] = {}
        for role in ROLES:
            size = parts.get(role, 0)
            if roles[role]:
                size = int(size * edited[role] / roles[role])
            elif edited[role]:
                like = next((other for other in STATES if roles[other]), None)
                # Where nothing rests on the card there is no state whose phases it could share.
                size = edited[role] if like is None or parts.get(like) else 0
            if size:
                out[role] = size
        for part, size in parts.items():
            if part in ROLES or part == "slack":
                continue
            cell = Cell(part)
            out[part] = int(size * edits[cell] / self._parts[part]) if cell in edits and self._parts[part] else size
        return {part: size for part, size in out.items() if size}
