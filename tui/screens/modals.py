"""Modal screens: the keys of a screen, a question with its answers, a text to read."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import wrap
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen

from tui.keys import EVERYWHERE, GLOSSARY, SCREENS, shown_key
from tui.memory_bars import letters
from tui.plain import Words

if TYPE_CHECKING:
    from textual.widgets import OptionList

MAX_WIDTH = 100
"""Of a box: longer lines are hard to read."""


class _Box(ModalScreen[str]):
    """A box in the middle."""

    DEFAULT_CSS = """
    _Box { align: center middle; }
    _Box > Vertical { width: 100%; max-width: 100; height: auto; max-height: 100%; border: round $primary;
        background: $surface; padding: 0 1; }
    _Box VerticalScroll { height: auto; max-height: 75vh; }
    _Box #answers { height: auto; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('')", "Back")]

    def __init__(self) -> None:
        super().__init__()
        self._is_answered = False

    def dismiss(self, result: str | None = None) -> AwaitComplete:
        """Close, once: a key typed twice in haste is still on its way here, and would close what is below."""
        if self._is_answered:
            return AwaitComplete()
        self._is_answered = True
        return super().dismiss(result)


class TextBox(_Box):
    """A text to read; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,enter,question_mark,space,c", "dismiss('')", "Back", show=False)
    ]

    def __init__(self, title: str, lay_out: Callable[[int], str | Text]) -> None:
        """Show a text.

        Args:
            title: of the box.
            lay_out: the text for a width in cells; asked again whenever the terminal changes.
        """
        super().__init__()
        self._title, self._lay_out = title, lay_out

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            with VerticalScroll():
                yield Words("", id="text")
            yield Words("Esc back", id="answers")

    def on_resize(self) -> None:
        self.query_one("#text", Words).update(self._lay_out(room(self.size.width)))


def room(width: int) -> int:
    """Cells of a line in a box on a screen of ``width``: without frame, padding and scrollbar."""
    return max(20, min(MAX_WIDTH, width) - 6)


def hanging(line: str, width: int, indent: int) -> list[str]:
    """A line as lines of ``width``; those after the first begin ``indent`` cells further in."""
    return wrap(line, max(width, indent + 10), subsequent_indent=" " * indent, break_on_hyphens=False) or [""]


def keys_box(name: str) -> TextBox:
    """What every key of a screen does, and what the words and letters of the bars mean."""

    def lay_out(width: int) -> Text:
        lines = Text()
        for title, keys in ((name, SCREENS[name]), ("everywhere", EVERYWHERE)):
            lines.append(f"{title}\n", "bold")
            for key in keys:
                line = f"  {shown_key(key.key):<10}{key.word:<16}{key.says}"
                lines.append("\n".join(hanging(line, width, 28)) + "\n")
        lines.append("words\n", "bold")
        for word, meaning in (*GLOSSARY, ("letters of bars", letters())):
            lines.append("\n".join(hanging(f"  {word:<16}{meaning}", width, 18)) + "\n")
        return lines

    return TextBox("Keys", lay_out)


class Picker(_Box):
    """Offers, of which one may be taken: the screen is dismissed with its number, with "" on Escape."""

    DEFAULT_CSS = """
    Picker OptionList, Picker OptionList:focus { height: auto; max-height: 75vh; border: none; padding: 0;
        background: $surface; }
    """

    def __init__(self, title: str, offers: list[tuple[str, str]], says: str) -> None:
        """Offer.

        Args:
            title: of the box.
            offers: (what is taken, what it would do) pairs, at least one.
            says: what Enter does.
        """
        super().__init__()
        self._title, self._offers, self._says = title, offers, says

    def compose(self) -> ComposeResult:
        from textual.widgets import OptionList  # 5 ms, which the first frame does not wait for

        with Vertical() as box:
            box.border_title = self._title
            yield OptionList(*(Text(f"{head}\n  {text}") for head, text in self._offers), markup=False)
            yield Words(f"{self._says}  Esc back", id="answers")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(str(event.option_index))


class Question(_Box):
    """A text, and answers by letter; Enter is the first."""

    def __init__(self, title: str, text: str | Text, answers: list[tuple[str, str]]) -> None:
        """Ask.

        Args:
            title: of the box.
            text: what is asked.
            answers: (letter, word) pairs; the screen is dismissed with the letter, with "" on Escape.
        """
        super().__init__()
        self._title, self._text, self._answers = title, text, answers

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            with VerticalScroll():
                yield Words(self._text, id="text")
            first, *others = self._answers
            words = "  ".join([f"{first[0]} or Enter {first[1]}", *(f"{letter} {word}" for letter, word in others)])
            yield Words(f"{words}  Esc back", id="answers")

    def on_key(self, event: Key) -> None:
        letters = {letter for letter, _ in self._answers}
        answer = self._answers[0][0] if event.key == "enter" else event.character
        if answer in letters:
            # The screen below may have a sense of its own for the key, and is in front by the time it comes there.
            event.stop()
            event.prevent_default()
            self.dismiss(answer)
