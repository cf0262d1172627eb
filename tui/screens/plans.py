"""Screen 2: the plans, ranked inside what they alter; what fills a card, phase by phase; and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable

from tui.cells import PLAN_COLUMNS, bars_title, plan_row, plans_title
from tui.columns import fit
from tui.keys import PLANS, bindings
from tui.memory_bars import legend, memory_bars, short_legend
from tui.plain import Words
from tui.screens.base import WIDE, Panel, PlanningScreen, Table
from tui.screens.modals import Picker, TextBox, hanging

PRIORITIES = {
    "#": 0, "GiB": 1, "free": 2, "step": 3, "shard": 4, "recompute": 5, "offload": 6, "mb x ga": 7, "GPUs": 8,
    "train": 9, "loss": 10, "tok/s": 11, "alters": 12, "verdict": 13,
}  # fmt: skip
"""Which columns stay on a narrow terminal."""
ALL_OF_IT = "e shows all, with time, cards and host"
"""The key stands where the need for it arises."""
FRAME_CELLS = 4
"""Of a line: the frame and the padding."""


class PlansScreen(PlanningScreen):
    """What fits, and what does not."""

    NAME = "plans"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(PLANS)]
    CSS = """
    #plans-panel { height: 1fr; min-height: 6; }
    #plans { height: 1fr; }
    #bars { height: auto; padding: 0 1; }
    #legend { height: auto; padding: 0 1; }
    #why-scroll { height: auto; max-height: 6; padding: 0 1; }
    PlansScreen.-short #legend { display: none; }
    PlansScreen.-short #why-panel { max-height: 4; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._sorted_by: str | None = None
        self._reversed = False
        self._filter = ""
        self._marked: list[int] = []
        self._rows: list[int] = []
        """Row -> index of the candidate."""
        self._drawn: object = None
        self._edition = 0

    def body(self) -> ComposeResult:
        with Panel(id="plans-panel"):
            yield Table(id="plans", cursor_type="row", zebra_stripes=True)
        with Panel(id="bars-panel"):
            yield Words("", id="bars")
            yield Words("", id="legend")
        with Panel(id="why-panel") as panel:
            panel.border_title = "Why"
            with VerticalScroll(id="why-scroll", can_focus=False):
                yield Words("", id="why")

    def on_mount(self) -> None:
        self.table("plans").focus()

    @property
    def _candidates(self) -> list[Mapping[str, Any]]:
        return self.known.candidates

    def show(self) -> None:
        self._fill()
        self._show_chosen()

    def _fill(self) -> None:
        known, table = self.known, self.table("plans")
        panel = self.query_one("#plans-panel", Panel)
        panel.border_title = plans_title(known.plan, known.status, wide=self.size.width >= WIDE)
        if known.edition != self._edition:  # marks were of plans that are gone
            self._edition, self._marked = known.edition, []
        state = (known.edition, self._sorted_by, self._reversed, self._filter, tuple(self._marked), self.size.width)
        if state == self._drawn:
            return
        self._drawn = state
        cells = [plan_row(rank, candidate) for rank, candidate in enumerate(self._candidates, 1)]
        self._rows = self._ordered(cells)
        widths = [max([len(name), *(len(row[column]) for row in cells)]) for column, name in enumerate(PLAN_COLUMNS)]
        columns = fit(widths, [PRIORITIES[name] for name in PLAN_COLUMNS], self.size.width - FRAME_CELLS)
        table.clear(columns=True)
        for column in columns:
            arrow = (" v" if self._reversed else " ^") if PLAN_COLUMNS[column] == self._sorted_by else ""
            table.add_column(PLAN_COLUMNS[column] + arrow, key=PLAN_COLUMNS[column])
        for index in self._rows:
            style = "" if self._candidates[index]["fits"] else "dim"
            row = list(cells[index])
            if index in self._marked:
                row[0] = f"*{row[0]}"
            table.add_row(*(Text(row[column], style) for column in columns), key=str(index))
        if known.chosen in self._rows:
            table.move_cursor(row=self._rows.index(known.chosen))

    def _ordered(self, cells: list[tuple[str, ...]]) -> list[int]:
        rows = [index for index, row in enumerate(cells) if self._filter in " ".join(row).lower()]
        if self._sorted_by is not None:
            column = PLAN_COLUMNS.index(self._sorted_by)
            rows.sort(key=lambda index: _sort_key(cells[index][column]), reverse=self._reversed)
        elif self._reversed:
            rows.reverse()
        return rows

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.cursor_row < len(self._rows) and self.is_current:
            self.known.chosen = self._rows[event.cursor_row]
            self._show_chosen()

    def _show_chosen(self) -> None:
        candidate = self.known.candidate
        bars, why = self.query_one("#bars", Words), self.query_one("#why", Words)
        panel = self.query_one("#bars-panel", Panel)
        self.show_panel("bars-panel", candidate is not None)
        self.show_panel("why-panel", True)
        if candidate is None:
            why.update("\n".join(self.known.nothing_lines()))
            return
        memory, taken, unicode = candidate["memory"], self.known.taken_bytes, self.known.unicode
        room = self.size.width - FRAME_CELLS
        panel.border_title = bars_title(memory, width=room - 2, taken=taken, on_card=self.known.on_card)
        is_short = self.has_class("-short")
        panel.border_subtitle = short_legend(memory, width=room - 2, taken=taken) if is_short else ""
        bars.update(memory_bars(memory, width=room, taken=taken, unicode=unicode))
        self.query_one("#legend", Words).update(legend(memory, width=room, taken=taken, unicode=unicode))
        why.update("\n".join(self.known.reasons))
        self.query_one("#why-panel", Panel).border_subtitle = ALL_OF_IT

    def action_ledger(self) -> None:
        self.trlfit.action_mode("ledger")

    def action_filter(self) -> None:
        self.edit_line.ask("filter", self._filter, self._filtered, says=lambda text: f"{self._matches(text)} plans")

    def _matches(self, text: str) -> int:
        rows = [" ".join(plan_row(rank, c)).lower() for rank, c in enumerate(self._candidates, 1)]
        return sum(text.strip().lower() in row for row in rows)

    def _filtered(self, text: str) -> None:
        self._filter = text.strip().lower()
        self.refresh_view()

    def action_sort(self) -> None:
        names = [None, *(str(column.key.value) for column in self.table("plans").ordered_columns)]
        place = names.index(self._sorted_by) if self._sorted_by in names else 0
        self._sorted_by = names[(place + 1) % len(names)]
        self.refresh_view()

    def action_reverse(self) -> None:
        self._reversed = not self._reversed
        self.refresh_view()

    def action_mark(self) -> None:
        index = self.known.chosen
        if not self._rows:
            return
        if index in self._marked:
            self._marked.remove(index)
        else:
            self._marked = [*self._marked[-1:], index]
        if len(self._marked) == 2:
            first, second = self._marked
            self._marked = []
            text = self.known.side_by_side(first, second)
            self.app.push_screen(TextBox(f"Plans {first + 1} and {second + 1}", lambda width: text))
        self.refresh_view()

    def action_probe(self) -> None:
        self.trlfit.probe()

    def action_explain(self) -> None:
        candidate, known = self.known.candidate, self.known
        if candidate is None:
            self.notify("no plan is chosen")
            return
        facts, memory, taken = known.facts, candidate["memory"], known.taken_bytes

        def lay_out(width: int) -> Text:
            lines = Text("\n".join(part for line in facts for part in hanging(line, width, 8)))
            lines.append("\n\n")
            return lines.append_text(legend(memory, width=width, taken=taken, unicode=known.unicode))

        self.app.push_screen(TextBox(f"Why {known.chosen_name}", lay_out))

    def action_changes(self) -> None:
        offers = [(change["flags"], change["sentence"]) for change in self.known.changes]
        if not offers:
            self.notify("no single change that was tried would help")
            return

        def answered(answer: str | None) -> None:
            if answer:
                self.trlfit.take(offers[int(answer)][0])

        self.app.push_screen(Picker("What would fit, or help", offers, "arrows choose, Enter sets it"), answered)


def _sort_key(cell: str) -> tuple[int, float, str]:
    """Numbers by size, everything else behind them by letters."""
    try:
        return (0, float(cell.split()[0].replace(",", "")), cell)
    except (ValueError, IndexError):
        return (1, 0.0, cell)
