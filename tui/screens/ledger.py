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
from tui.columns import GAP
from tui.keys import LEDGER, bindings
from tui.memory_bars import memory_bars, short_legend
from tui.plain import Words
from tui.screens.base import Panel, PlanningScreen, Table
from tui.screens.modals import TextBox

COLUMNS = ("group", "params", "/", *ROLES, "GiB")
HEADERS = ("group", "params", "/", "weights", "grads", "master", "mom 1", "mom 2", "GiB")
EDITED = "*"
"""Behind the value of a cell that is not as planned."""
TOLD_BELOW = ("/", "params")
"""Columns that a narrow terminal leaves out, in this order: the line below the table says both of any cell."""
FRAME_CELLS = 3
"""Of a line: the frame's two, and the scrollbar."""


class LedgerScreen(PlanningScreen):
    """The bytes."""

    NAME = "ledger"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(LEDGER)]
    CSS = """
    #groups-panel { height: 1fr; min-height: 6; }
    #groups { height: 1fr; scrollbar-size-vertical: 1; }
    #formula { height: auto; min-height: 2; max-height: 4; padding: 0 1; }
    #ledger-bars { height: auto; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: object = None
        self._laid_out: int | None = None
        """The width that the columns were chosen for."""
        self._rows: dict[str, list[str]] = {}
        """Row -> its cells as planned, in the order of all columns."""
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
        self.table("groups").focus()

    def show(self) -> None:
        known = self.known
        if self._drawn != (known.edition, known.chosen):
            self._read()
        self._lay_out()
        self.show_panel("ledger-bars-panel", self._cells is not None)
        if self._cells is None:
            self.query_one("#groups-panel", Panel).border_title = "Ledger: no plan is chosen; 2 shows them"
            self.query_one("#formula", Words).update("")
            return
        self._show_cells(self._edits)
        self._show_formula(self._edits)

    def _read(self) -> None:
        """The ledger of another plan; edits belong to the one that they were made in."""
        from planner.search.shortage import PART_NAMES

        known = self.known
        self._drawn = (known.edition, known.chosen)
        self._edits, self._before, self._laid_out = {}, [], None
        document = known.ledger()
        self._document = document or {}
        cells = self._cells = None if document is None else LedgerCells(document)
        self._rows = {}
        if cells is None:
            return
        for group in cells.groups:
            counts = [format_count(cells.parameters(group)), str(cells.ranks(group, "weights"))]
            self._rows[group] = [group, *counts, *(self._text(Cell(group, role), {}) for role in ROLES), ""]
        for part in cells.parts:
            label = PART_NAMES.get(part, part.replace("_", " "))  # as the reasons say it
            self._rows[part] = [label, *[""] * (len(COLUMNS) - 2), self._text(Cell(part), {})]

    def _lay_out(self) -> None:
        """The columns that the width has room for, and the cursor where it was, at first on a value."""
        table, width = self.table("groups"), self.size.width
        if self._laid_out == width:
            return
        self._laid_out = width
        at = table.cursor_coordinate
        was = table.ordered_columns[at.column].key.value if table.columns else ROLES[0]
        table.clear(columns=True)
        widths = [max(map(len, cells)) for cells in zip(HEADERS, *self._rows.values(), strict=True)]
        room, left_out = width - FRAME_CELLS, list[str]()
        for name in TOLD_BELOW:
            taken = sum(widths[i] + GAP for i, column in enumerate(COLUMNS) if column not in left_out)
            if taken > room:
                left_out.append(name)
        shown = [i for i, column in enumerate(COLUMNS) if column not in left_out]
        for i in shown:
            table.add_column(HEADERS[i], key=COLUMNS[i])
        for key, cells in self._rows.items():
            table.add_row(*(cells[i] for i in shown), key=key)
        names = [COLUMNS[i] for i in shown]
        table.move_cursor(
            row=min(at.row, len(self._rows) - 1), column=names.index(was) if was in names else names.index(ROLES[0])
        )

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
        title = f"Ledger of {self.known.chosen_name}, bytes per parameter and GiB {where}{changed}"
        self.query_one("#groups-panel", Panel).border_title = title
        taken, room = self.known.taken_bytes, self.size.width - 4
        panel = self.query_one("#ledger-bars-panel", Panel)
        panel.border_title = bars_title(memory, width=room - 2, taken=taken, on_card=self.known.on_card)
        panel.border_subtitle = short_legend(memory, width=room - 2, taken=taken)
        bars = memory_bars(memory, width=room, taken=taken, unicode=self.known.unicode)
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
        if self._cells is None or self.edit_line.is_open:
            return
        if cell is None:
            self.notify("a name or a sum; left and right choose a value to set")
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
