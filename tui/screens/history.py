"""Screen 6: every run on record, predicted against seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable

from tui.columns import fit
from tui.keys import HISTORY, bindings
from tui.plain import Words
from tui.screens.base import Panel, PlanningScreen, Table

if TYPE_CHECKING:
    from launcher.ending.history import HistoryRow

PRIORITIES = (0, 7, 1, 2, 3, 4, 5, 9, 10, 6, 8, 11)
"""Of the columns of `trlfit runs`: run, model, plan, state, predicted, seen, memory err, s, s, step err, took, loss."""


class HistoryScreen(PlanningScreen):
    """The runs."""

    NAME = "history"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(HISTORY)]
    CSS = """
    #runs-panel { height: 1fr; }
    #runs { height: 1fr; }
    #no-runs { padding: 0 1; }
    #errors { height: auto; max-height: 6; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: object = None

    def body(self) -> ComposeResult:
        with Panel(id="runs-panel"):
            yield Table(id="runs", cursor_type="row", zebra_stripes=True)
            yield Words("", id="no-runs")
        yield Words("", id="errors")

    def on_mount(self) -> None:
        self.table("runs").focus()

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.trlfit.read_runs()

    def show(self) -> None:
        rows = self.known.runs
        self.query_one("#runs-panel", Panel).border_title = f"Runs  {len(rows)}, newest first"
        self.query_one("#no-runs", Words).update("" if rows else "No run yet: 2 shows the plans, L launches one.")
        self.query_one("#no-runs").display = not rows
        self.table("runs").display = bool(rows)
        self._show_words()
        state = (tuple(rows), self.size.width)
        if state != self._drawn:
            self._drawn = state
            self._fill(list(rows))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        self._show_words()

    def _show_words(self) -> None:
        """How the run under the cursor ended and where it lies; how good the predictions are; what was not read."""
        from launcher.ending.history import error_summary

        row, summary = self._row(), error_summary(self.known.runs)
        lines: list[str] = []
        if row is not None:
            lines.append(f"{row.folder}{': ' + row.sentence if row.sentence else ''}")
        if summary:
            lines.append(f"Prediction errors: {summary}")
        lines += [f"note: {note}" for note in self.known.run_notes]
        self.query_one("#errors", Words).update("\n".join(lines))

    def _fill(self, rows: list[HistoryRow]) -> None:
        from launcher.ending.history import table_rows

        table = self.table("runs")
        cursor = table.cursor_row
        header, *cells = table_rows(rows)
        widths = [max(len(row[column]) for row in (header, *cells)) for column in range(len(header))]
        columns = fit(widths, PRIORITIES, self.size.width - 4)
        table.clear(columns=True)
        for column in columns:
            table.add_column(header[column], key=str(column))
        for number, row in enumerate(cells):  # two records may have one id, where a history was edited
            table.add_row(*(row[column] for column in columns), key=str(number))
        if rows:
            table.move_cursor(row=min(cursor, len(rows) - 1))

    def _row(self) -> HistoryRow | None:
        rows, cursor = self.known.runs, self.table("runs").cursor_row
        return rows[cursor] if cursor < len(rows) else None

    def action_open(self) -> None:
        row = self._row()
        if row is not None and row.exists:
            self.trlfit.show_run(row.folder)
        elif row is not None:
            self.notify(f"{row.folder} is gone", severity="warning", markup=False)

    def action_again(self) -> None:
        row = self._row()
        if row is not None:
            self.trlfit.plan_again(row.folder)

    def action_reload(self) -> None:
        self.trlfit.read_runs()
