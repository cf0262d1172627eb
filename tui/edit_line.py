"""The one editor: a line at the foot of a screen, opened for a field, a filter or a search, and closed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Input
from textual.widgets.input import Selection

from tui.plain import Words, plain

LISTED = 6
"""Choices in sight at once."""


class _Line(Input):
    """A line whose Tab completes and whose arrows go through the choices."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "complete", show=False),
        Binding("shift+tab", "step(-1)", show=False),
        Binding("down", "step(1)", show=False),
        Binding("up", "step(-1)", show=False),
        Binding("pagedown", f"step({LISTED})", show=False),
        Binding("pageup", f"step({-LISTED})", show=False),
    ]

    @property
    def _editor(self) -> EditLine:
        return next(node for node in self.ancestors if isinstance(node, EditLine))

    def action_complete(self) -> None:
        self._editor.complete()

    def action_step(self, by: int) -> None:
        self._editor.step(by)


class EditLine(Vertical):
    """Hidden until it is asked for a value."""

    DEFAULT_CSS = """
    EditLine { height: auto; display: none; background: $surface; }
    EditLine.open { display: block; }
    EditLine > #edit-choices { height: auto; display: none; padding: 0 1; border-top: solid $panel-lighten-2; }
    EditLine.choosing > #edit-choices { display: block; }
    EditLine > Horizontal { height: auto; }
    EditLine #edit-label { width: auto; max-width: 32; padding: 0 1; }
    EditLine Input { width: 1fr; }
    EditLine #edit-says { width: auto; max-width: 50%; padding: 0 1; color: $text-muted; }
    """

    def __init__(self) -> None:
        super().__init__(id="edit-line")
        self._done: Callable[[str], str | None] = lambda text: None
        self._says: Callable[[str], str] = lambda text: ""
        self._choices: Callable[[str], Sequence[str]] | None = None
        self._found: Sequence[str] = ()
        self._at: int | None = None
        """The choice that the arrows went to."""
        self._untouched = ""
        """The value that the line was opened with, for which every choice is shown."""
        self._back: Widget | None = None

    def compose(self) -> ComposeResult:
        yield Words("", id="edit-choices")
        with Horizontal():
            yield Words("", id="edit-label")
            yield _Line(id="edit-input", compact=True, select_on_focus=False)
            yield Words("", id="edit-says")

    @property
    def is_open(self) -> bool:
        """A value is being typed."""
        return self.has_class("open")

    def ask(
        self,
        label: str,
        value: str,
        done: Callable[[str], str | None],
        *,
        says: Callable[[str], str] = lambda text: "",
        choices: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """Open for a value.

        Args:
            label: what is asked for.
            value: what it is now; the first letter typed replaces it.
            done: takes the text on Enter; a sentence that it returns is shown, and the line stays open.
            says: a remark about the text as it is typed.
            choices: listed above the line for the text so far; arrows pick one, Tab completes.
        """
        self._done, self._says, self._choices, self._back = done, says, choices, self.screen.focused
        self.app.clear_notifications()  # they would cover what is said about the text
        self.query_one("#edit-label", Words).update(label)
        field = self.query_one(Input)
        self.add_class("open")
        value = self._untouched = plain(value)
        field.value = value
        field.selection = Selection(0, len(value))
        self._say(value)
        self.screen.set_focus(field)  # at once: the next key is meant for it

    def close(self) -> None:
        """Hide, and give the focus back."""
        self.remove_class("open")
        if self._back is not None and self._back.is_mounted:
            self.screen.set_focus(self._back)

    def complete(self) -> None:
        """Take the choice that is marked, or the first one, into the line, to type on."""
        if self._found:
            self._take(self._found[self._at or 0])
            self._untouched = ""  # a folder goes on with what is in it
            self._say(self.query_one(Input).value)

    def step(self, by: int) -> None:
        """Mark another choice."""
        if self._found:
            place = (-1 if by > 0 else 0) if self._at is None else self._at
            self._at = max(0, min(len(self._found) - 1, place + by))
            self._list()

    def _take(self, text: str) -> None:
        field = self.query_one(Input)
        field.value = text
        field.cursor_position = len(text)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.is_open:
            self._say(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value
        if self._at is not None and self._found:
            text = self._found[self._at]
            self._take(text)
        problem = self._done(text)
        if problem is not None and len(self._found) == 1 and text != self._found[0]:
            # What was typed is the beginning of one thing alone.
            text = self._found[0]
            self._take(text)
            self._say(text)
            problem = self._done(text)
        if problem is None:
            self.close()
        else:
            self.query_one("#edit-says", Words).update(problem)

    def _say(self, text: str) -> None:
        self.query_one("#edit-says", Words).update(self._says(text))
        sought = "" if text == self._untouched else text
        self._found, self._at = ([] if self._choices is None else self._choices(sought)), None
        if list(self._found) == [text]:
            self._found = []
        self._list()

    def _list(self) -> None:
        """The choices around the marked one, and how many there are."""
        self.set_class(bool(self._found), "choosing")
        first = max(0, min((self._at or 0) - LISTED // 2, len(self._found) - LISTED))
        lines = Text(no_wrap=True, overflow="ellipsis")
        for place, choice in list(enumerate(self._found))[first : first + LISTED]:
            marked = place == self._at
            lines.append(f"{'>' if marked else ' '} {plain(choice)}\n", "reverse" if marked else "")
        more = f"{len(self._found):,} found; " if len(self._found) > LISTED else ""
        lines.append(f"{more}arrows pick, Tab completes, Enter takes", "dim")
        self.query_one("#edit-choices", Words).update(lines)
