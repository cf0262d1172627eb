"""Screen 1: the cards of this machine, the job as a form, and what speaks for or against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from tui import choices
from tui.cells import CARD_COLUMNS, card_row
from tui.columns import GAP
from tui.fields import Field, fields_for
from tui.keys import GOAL, bindings
from tui.lengths import histogram
from tui.plain import Words
from tui.screens.base import Panel, PlanningScreen, Table

if TYPE_CHECKING:
    from launcher.nvml.gpus import CardSample
    from planner.machine import Card

CHOICES: Mapping[str, choices.Choices] = {
    "model": choices.models,
    "data.dataset": choices.data_files,
    "machine": choices.machines,
    "pins": choices.more_pins,
}
"""Fields that list what may be typed."""
LABEL_CELLS = 13
CHART_ROWS = 4


class GoalScreen(PlanningScreen):
    """What to train, on what."""

    NAME = "goal"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(GOAL)]
    CSS = """
    #cards { height: auto; max-height: 10; overflow-x: hidden; }
    #cards-panel.empty #cards { display: none; }
    #no-cards { padding: 0 1; }
    #form { height: 1fr; min-height: 4; overflow-x: hidden; }
    #form-panel { height: 1fr; }
    #lengths-panel { display: none; }
    #lengths-panel.known { display: block; }
    #lengths { height: auto; padding: 0 1; }
    #checks { height: auto; max-height: 8; padding: 0 1; }
    GoalScreen.-short #cards-panel.empty { border: none; padding: 0 1; }
    GoalScreen.-short #lengths-panel { display: none; }
    GoalScreen.-short #checks { max-height: 4; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn_form: object = None

    def body(self) -> ComposeResult:
        with Panel(id="cards-panel"):
            yield Table(id="cards", cursor_type="row")
            yield Words("", id="no-cards")
        with Panel(id="form-panel"):
            yield Table(id="form", cursor_type="row", show_header=False)
        with Panel(id="lengths-panel") as panel:
            panel.border_title = "Data: tokens of each sequence looked at"
            yield Words("", id="lengths")
        with Panel(id="checks-panel") as panel:
            panel.border_title = "Checks"
            yield Words("", id="checks")

    def on_mount(self) -> None:
        for name in CARD_COLUMNS:
            self.table("cards").add_column(name, key=name)
        self.table("form").focus()

    def show(self) -> None:
        self._show_cards()
        self._show_form()
        lines = self.known.checks()
        self.query_one("#checks", Words).update("\n".join(lines))
        self.show_panel("checks-panel", bool(lines))
        self.show_panel("cards-panel", True)
        self._show_lengths()

    def _show_lengths(self) -> None:
        plan, report = self.known.current_plan, self.known.report
        panel = self.query_one("#lengths-panel")
        panel.set_class(plan is not None and report is not None, "known")
        if plan is not None and report is not None:
            drawn = histogram(
                report.lengths,
                plan["job"]["seq_len"],
                width=max(20, self.size.width - 4),
                height=CHART_ROWS,
                unicode=self.known.unicode,
            )
            self.query_one("#lengths", Words).update(drawn)

    def _show_cards(self) -> None:
        known, table = self.known, self.table("cards")
        cards = known.cards
        panel = self.query_one("#cards-panel", Panel)
        panel.set_class(not cards, "empty")
        panel.border_title = known.cards_title()
        panel.border_subtitle = "Tab, then Enter takes a card or leaves it out" if cards else ""
        self.query_one("#no-cards", Words).update("" if cards else known.no_cards_line())
        self.query_one("#no-cards").display = not cards
        if [row.value for row in table.rows] != [str(card.index) for card in cards]:
            table.clear()
            for card in cards:
                table.add_row(*self._card_cells(card, None), key=str(card.index))
        for card in cards:
            self.show_sample(card, known.samples.get(card.index))

    def _card_cells(self, card: Card, sample: CardSample | None) -> tuple[str, ...]:
        use = " " if self.known.is_hidden(card) or not card.usable else "x"
        *cells, others = (f"{use} {card.index}", *card_row(card, sample)[1:])
        taken = sum(max(len(cell), len(name)) + GAP for cell, name in zip(cells, CARD_COLUMNS, strict=False))
        return (*cells, self._beginning(others, max(8, self.size.width - 4 - taken - GAP)))

    def _beginning(self, text: str, cells: int) -> str:
        dots = "…" if self.known.unicode else "~"
        return text if len(text) <= cells else text[: cells - 1] + dots

    def show_sample(self, card: Card, sample: CardSample | None) -> None:
        """One card's row; only what changed is drawn."""
        table, key = self.table("cards"), str(card.index)
        for name, value in zip(CARD_COLUMNS, self._card_cells(card, sample), strict=True):
            table.set_text(key, name, value)

    def _show_form(self) -> None:
        table, known = self.table("form"), self.known
        self.query_one("#form-panel", Panel).border_title = f"Goal  {known.session.standing}"
        cells, rows = self._cut(known.form_rows())
        drawn = (cells, [field.path for field, _, _ in rows])
        if drawn != self._drawn_form:
            self._drawn_form, cursor = drawn, table.cursor_row
            table.clear(columns=True)
            for name, width in (("field", LABEL_CELLS), ("value", cells), ("says", None)):
                table.add_column(name, key=name, width=width)
            for field, value, says in rows:
                table.add_row(field.label, value, says, key=field.path)
            table.move_cursor(row=min(cursor, len(rows) - 1))
            return
        for field, value, says in rows:
            for name, text in (("value", value), ("says", says)):
                table.set_text(field.path, name, text)

    def _cut(self, rows: list[tuple[Field, str, str]]) -> tuple[int, list[tuple[Field, str, str]]]:
        """(cells of the values, the rows cut to them): of a long value the end is shown, of a remark the beginning."""
        room = max(20, self.size.width - 4 - LABEL_CELLS - 3 * GAP)
        cells = max(1, min(max(len(value) for _, value, _ in rows), room // 2))
        dots = "…" if self.known.unicode else "~"

        def cut(field: Field, value: str, says: str) -> tuple[Field, str, str]:
            value = value if len(value) <= cells else dots + value[len(value) - cells + 1 :]
            return field, value, self._beginning(says, room - cells)

        return cells, [cut(*row) for row in rows]

    def _field(self) -> Field | None:
        table = self.table("form")
        if not table.row_count:
            return None
        path = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        return next((f for f in fields_for(self.known.method) if f.path == path), None)

    def action_edit(self) -> None:
        if self.edit_line.is_open:
            return
        cards = self.table("cards")
        if cards.has_focus and cards.row_count:
            key = cards.coordinate_to_cell_key(cards.cursor_coordinate).row_key.value
            self.trlfit.toggle_card(int(str(key)))
            return
        field = self._field()
        if field is None:
            return
        now = self.known.value_of(field)
        if field.choices:
            self.trlfit.change(field.path, field.value(field.next(now)))
            return
        self.edit_line.ask(
            field.label,
            now,
            lambda text: self._changed(field, text),
            says=lambda text: self._remark(field, text),
            choices=CHOICES.get(field.path),
        )

    def _changed(self, field: Field, text: str) -> str | None:
        if not text.strip():
            self.trlfit.reset(field.path)
            return None
        problem = self._remark(field, text)
        if problem:
            return problem
        self.trlfit.change(field.path, field.value(text))
        return None

    def _remark(self, field: Field, text: str) -> str:
        if not text.strip():
            return "empty: the default"
        try:
            value = field.value(text)
        except ValueError as error:
            return str(error)
        return self.known.session.check(field.path, value) or ""

    def action_reset(self) -> None:
        field = self._field()
        if field is not None:
            self.trlfit.reset(field.path)

    def action_inspect(self) -> None:
        self.trlfit.inspect_data()

    def action_plans(self) -> None:
        self.trlfit.action_mode("plans")
