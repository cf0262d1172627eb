"""What the six screens share: the line that names them, the editor, the footer, and how they are told of news."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Footer
from textual.widgets.data_table import RowKey

from tui.edit_line import EditLine
from tui.known import Known
from tui.plain import Words, plain

if TYPE_CHECKING:
    from tui.app import TrlfitApp

NAMES = ("goal", "plans", "ledger", "files", "run", "history")
"""In the order of their digits."""
FULL_SIZE = (80, 24)
"""From here on every panel is shown."""
TINY_ROWS = 16
WIDE = 100
"""From so many cells on nothing is shortened."""


class Table(DataTable[object], inherit_bindings=False):
    """A table whose Enter is the screen's, that moves by arrows and by letters, and takes no text for markup."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "cursor_up", "Up", show=False),
        Binding("down,j", "cursor_down", "Down", show=False),
        Binding("left,h", "cursor_left", "Left", show=False),
        Binding("right,l", "cursor_right", "Right", show=False),
        Binding("pageup", "page_up", "Page up", show=False),
        Binding("pagedown", "page_down", "Page down", show=False),
        Binding("home,ctrl+home", "scroll_top", "Top", show=False),
        Binding("end,ctrl+end", "scroll_bottom", "Bottom", show=False),
    ]

    def action_cursor_left(self) -> None:
        """To the cell on the left; rows are not scrolled out of sight sideways."""
        if self.cursor_type != "row":
            super().action_cursor_left()

    def action_cursor_right(self) -> None:
        """The same to the right."""
        if self.cursor_type != "row":
            super().action_cursor_right()

    def add_row(self, *cells: object, **about: Any) -> RowKey:
        """A row of texts as they are."""
        return super().add_row(*map(_as_it_is, cells), **about)

    def set_text(self, row: str, column: str, text: str) -> None:
        """Another text for a cell; one that stands there already is not drawn again."""
        if str(self.get_cell(row, column)) != plain(text):
            self.update_cell(row, column, _as_it_is(text), update_width=True)


def _as_it_is(cell: object) -> object:
    """A file or a model may be called ``[bold]``."""
    return Text(plain(cell)) if isinstance(cell, str) else cell


class Panel(Vertical):
    """A framed box with a title."""

    DEFAULT_CSS = """
    Panel { border: round $panel-lighten-2; border-title-color: $text; border-subtitle-color: $text-muted;
        height: auto; padding: 0; }
    """

    def render_str(self, text_content: str | Content) -> Content:
        """Titles are text as it is, not markup."""
        return Content(plain(text_content)) if isinstance(text_content, str) else text_content


class PlanningScreen(Screen[None]):
    """One of the six."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012  # Textual's own, an instance variable
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    NAME: ClassVar[str] = ""
    DEFAULT_CSS = """
    PlanningScreen #top { height: 1; }
    PlanningScreen #banner { height: auto; max-height: 3; display: none; background: $warning; color: $text; }
    PlanningScreen #banner.shown { display: block; }
    PlanningScreen #body { height: 1fr; }
    """

    def compose(self) -> ComposeResult:
        yield Words("", id="top")
        yield Words("", id="banner")
        with Vertical(id="body"):
            yield from self.body()
        yield EditLine()
        yield Footer(show_command_palette=False)

    def body(self) -> ComposeResult:
        """The widgets between the first line and the foot."""
        yield from ()

    def show(self) -> None:
        """Draw everything from what the app knows."""

    @property
    def trlfit(self) -> TrlfitApp:
        """The app."""
        return cast("TrlfitApp", self.app)

    @property
    def known(self) -> Known:
        """What the session knows."""
        return self.trlfit.known

    @property
    def edit_line(self) -> EditLine:
        """The editor at the foot."""
        return self.query_one(EditLine)

    @property
    def is_tiny(self) -> bool:
        """There is no room for more than one panel."""
        return self.size.height < TINY_ROWS

    def show_panel(self, name: str, visible: bool) -> None:
        """A panel beside the screen's main one."""
        self.query_one(f"#{name}").display = visible and not self.is_tiny

    def table(self, name: str) -> Table:
        """A table of this screen."""
        return self.query_one(f"#{name}", Table)

    def action_launch(self) -> None:
        """Of the screens that have a key for it."""
        self.trlfit.launch()

    def refresh_view(self) -> None:
        """Draw again, if this screen is in front."""
        if not self.is_current or not self.is_mounted:
            return
        self.query_one("#top", Words).update(self._top())
        banner = self.query_one("#banner", Words)
        banner.update(self.known.banner)
        banner.set_class(bool(self.known.banner), "shown")
        with self.app.batch_update():
            self.show()

    def on_screen_resume(self) -> None:
        self.refresh_view()

    def on_resize(self) -> None:
        self.call_after_refresh(self.refresh_view)

    def _top(self) -> str:
        width = self.size.width
        if width < FULL_SIZE[0] or self.size.height < FULL_SIZE[1]:
            tabs = [f"[{n} {name.upper()}]" if name == self.NAME else str(n) for n, name in enumerate(NAMES, 1)]
            return f"{' '.join(tabs)}  small: {FULL_SIZE[0]}x{FULL_SIZE[1]} shows all"
        tabs = [
            f"[{n} {name.upper()}]" if name == self.NAME else (f"[{n} {name}]" if width >= WIDE else f"{n} {name}")
            for n, name in enumerate(NAMES, 1)
        ]
        left = " ".join(tabs)
        room = width - len(left) - 1
        right = self.known.subject(room)
        return f"{left} {right[:room]:>{max(0, room)}}"

    def key_escape(self) -> None:
        if self.edit_line.is_open:
            self.edit_line.close()
