"""Screen 3: every byte of the chosen plan, by group and role and by part; any cell may be set to another value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable

from planner.ledger.edited import ROLES, Cell, LedgerCells
from planner.units import GIB, format_count, format_gib
from tui import choices
from tui.asked import pin_remark
from tui.cells import bars_title
from tui.keys import LEDGER, bindings
from tui.memory_bars import memory_bars
from tui.plain import Words
from tui.screens.base import Panel, PlanningScreen, Table
from tui.screens.modals import TextBox

COLUMNS = ("group", "params", "/", *ROLES, "GiB")
HEADERS = ("group", "params", "/", "weights", "grads", "master", "mom 1", "mom 2", "GiB")
EDITED = "*"
"""Behind the value of a cell that is not as planned."""


class LedgerScreen(PlanningScreen):
    """The bytes."""

    NAME = "ledger"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(LEDGER)]
    CSS = """
    #groups-panel { height: 1fr; min-height: 6; }
    #groups { height: 1fr; }
    #formula { height: auto; min-height: 2; max-height: 4; padding: 0 1; }
    #ledger-bars { height: auto; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: object = None
        self._document: Mapping[str, Any] = {}
        self._cells: LedgerCells | None = None
        self._edits: dict[Cell, float] = {}
        self._before: list[dict[Cell, float]] = []

    def body(self) -> ComposeResult:
        with Panel(id="groups-panel"):
            yield Table(id="groups", cursor_type="cell")
        yield Words("", id="formula")
        with Panel(id="ledger-bars-panel"):
            yield Words("", id="ledger-bars")

    def on_mount(self) -> None:
        table = self.table("groups")
        for key, name in zip(COLUMNS, HEADERS, strict=True):
            table.add_column(name, key=key)
        table.focus()

    def show(self) -> None:
        known = self.known
        if self._drawn != (known.edition, known.chosen):
            self._read()
        self.show_panel("ledger-bars-panel", self._cells is not None)
        if self._cells is None:
            self.query_one("#groups-panel", Panel).border_title = "Ledger: no plan is chosen; 2 shows them"
            self.query_one("#formula", Words).update("")
            return
        self._show_cells(self._edits)
        self._show_formula(self._edits)

    def _read(self) -> None:
        """The ledger of another plan; edits belong to the one that they were made in."""
        from planner.advice.reasons import PART_NAMES

        known, table = self.known, self.table("groups")
        self._drawn = (known.edition, known.chosen)
        self._edits, self._before = {}, []
        table.clear()
        document = known.ledger()
        self._document = document or {}
        self._cells = None if document is None else LedgerCells(document)
        if self._cells is None:
            return
        for group in self._cells.groups:
            ranks = self._cells.ranks(group, "weights")
            count = format_count(self._cells.parameters(group))
            table.add_row(group, count, str(ranks), *[""] * (len(ROLES) + 1), key=group)
        for part in self._cells.parts:
            label = PART_NAMES.get(part, part.replace("_", " "))  # as the reasons say it
            table.add_row(label, *[""] * (len(COLUMNS) - 1), key=part)

    def _show_cells(self, edits: Mapping[Cell, float]) -> None:
        """Values, sums and bars under ``edits``; only what changed is drawn."""
        cells, table = self._cells, self.table("groups")
        assert cells is not None
        for group in cells.groups:
            for role in ROLES:
                table.set_text(group, role, self._text(Cell(group, role), edits))
            held = sum(cells.held_bytes(Cell(group, role), edits) for role in ROLES)
            table.set_text(group, "GiB", format_gib(held, 2))
        for part in cells.parts:
            table.set_text(part, "GiB", self._text(Cell(part), edits))
        memory = cells.memory(edits)
        many = "" if len(edits) == 1 else "s"
        changed = f", {len(edits)} cell{many} edited" if edits else ""
        where = "on one card" if self.known.on_card else "in memory"
        title = f"Ledger of plan {self.known.chosen + 1}, bytes per parameter and GiB {where}{changed}"
        self.query_one("#groups-panel", Panel).border_title = title
        self.query_one("#ledger-bars-panel", Panel).border_title = bars_title(
            memory, width=self.size.width - 6, on_card=self.known.on_card
        )
        bars = memory_bars(memory, width=self.size.width - 4, unicode=self.known.unicode)
        self.query_one("#ledger-bars", Words).update(bars)

    def _text(self, cell: Cell, edits: Mapping[Cell, float]) -> str:
        assert self._cells is not None
        value = edits.get(cell, self._cells.value(cell))
        text = f"{value:.2f}" if cell.role else format_gib(value, 2)
        return text + (EDITED if cell in edits else "")

    def _cell(self) -> Cell | None:
        """The cell under the cursor, if it holds a value of its own."""
        table, cells = self.table("groups"), self._cells
        if cells is None or not table.row_count:
            return None
        key = table.coordinate_to_cell_key(table.cursor_coordinate)
        row, column = str(key.row_key.value), str(key.column_key.value)
        if row in cells.parts:
            return Cell(row)
        return Cell(row, column) if column in ROLES else None

    def on_data_table_cell_highlighted(self, event: DataTable.CellHighlighted) -> None:
        self._show_formula(self._edits)

    def _show_formula(self, edits: Mapping[Cell, float]) -> None:
        """Where the bytes of the cell under the cursor come from, under ``edits``."""
        cell, text = self._cell(), "arrows choose a cell, Enter sets it to another value"
        if cell is not None and self._cells is not None:
            name = cell.role or cell.row
            if cell.role:
                text = f"{cell.row} {cell.role}: {self._cells.formula(cell, edits)}"
            else:
                text = f"{cell.row}: {self._said_of(name, 'formula')}"
            source = self._said_of(name, "source")
            text += f"\n[{f'edited; the plan says {self._text(cell, {})}' if cell in edits else source}]"
        self.query_one("#formula", Words).update(text)

    def _said_of(self, part: str, what: str) -> str:
        """The formula or the source of a part, of the phase of the peak before the others."""
        peak = self._document["memory"]["peak_phase"]
        phases = sorted(self._document["phases"], key=lambda phase: phase["name"] != peak)
        found = (entry[what] for phase in phases for entry in phase["parts"] if entry["part"] == part)
        return str(next(found, "nothing in this plan"))

    # Edits

    def action_edit(self) -> None:
        cell = self._cell()
        if cell is None or self._cells is None or self.edit_line.is_open:
            return
        label = f"{cell.row} {cell.role}".strip()
        unit = "B/param" if cell.role else "GiB"
        cells = self._cells  # a plan that comes while somebody types has a ledger of its own
        self.edit_line.ask(
            f"{label}, {unit}",
            self._text(cell, self._edits).removesuffix(EDITED),
            lambda text: self._edited(cell, text) if self._cells is cells else None,
            says=lambda text: self._preview(cell, text) if self._cells is cells else "the plan is another one now",
        )

    def _value(self, cell: Cell, text: str) -> float | None:
        """What was typed, in the cell's unit; None where it is no size."""
        try:
            number = float(text.replace(",", ""))
        except ValueError:
            return None
        largest = 64.0 if cell.role else 1e6
        return number * (1 if cell.role else GIB) if 0 <= number <= largest else None

    def _preview(self, cell: Cell, text: str) -> str:
        """What the value would make of the peak, before it is taken."""
        value = self._value(cell, text)
        if value is None or self._cells is None:
            return "a number, please: 0 to 64 bytes" if cell.role else "a number of GiB, please"
        edits = self._with(cell, value)
        self._show_cells(edits)
        self._show_formula(edits)
        now, then = self._cells.memory(self._edits), self._cells.memory(edits)
        sizes = (now["device_bytes"], then["device_bytes"])
        digits = 1 if max(sizes) >= 10 * GIB else 2
        return f"{' -> '.join(format_gib(size, digits) for size in sizes)} GiB in {then['peak_phase']}"

    def _edited(self, cell: Cell, text: str) -> str | None:
        value = self._value(cell, text)
        if value is None:
            return self._preview(cell, text)
        edits = self._with(cell, value)
        if edits != self._edits:
            self._change(edits)
        return None

    def _with(self, cell: Cell, value: float) -> dict[Cell, float]:
        """The edits with one more; what is shown for a cell, typed again, is none."""
        assert self._cells is not None
        shown = self._cells.value(cell)
        same = abs(value - shown) < (0.005 if cell.role else 0.005 * GIB)
        others = {other: edited for other, edited in self._edits.items() if other != cell}
        return others if same else {**others, cell: value}

    def _change(self, edits: dict[Cell, float]) -> None:
        self._before.append(self._edits)
        self._edits = edits
        self.refresh_view()

    def action_reset(self) -> None:
        cell = self._cell()
        if cell in self._edits:
            self._change({other: value for other, value in self._edits.items() if other != cell})

    def action_undo_cell(self) -> None:
        if self._before:
            self._edits = self._before.pop()
            self.refresh_view()
        else:
            self.trlfit.action_undo()

    def key_escape(self) -> None:
        super().key_escape()
        self.refresh_view()  # what was typed is not what is

    def action_pin(self) -> None:
        self.edit_line.ask("pin", "", self._pinned, says=pin_remark, choices=choices.pins)

    def _pinned(self, text: str) -> str | None:
        if not text.strip():
            return None
        problem = pin_remark(text)
        if not problem:
            self.trlfit.pin(text)
        return problem or None

    def action_textbook(self) -> None:
        self.app.push_screen(TextBox("The textbook, and this plan", self.known.textbook_lines))
