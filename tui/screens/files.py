"""Screen 4: the files that would be written, whole or as a difference to the last run of the model."""

from __future__ import annotations

import os
import shlex
import subprocess
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable

from tui.keys import FILES, bindings
from tui.plain import Words
from tui.screens.base import Panel, PlanningScreen, Table


class FilesScreen(PlanningScreen):
    """What would be written."""

    NAME = "files"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(FILES)]
    CSS = """
    #names-panel { width: 26; height: 1fr; }
    #names { height: 1fr; }
    #file-panel { width: 1fr; height: 1fr; }
    #file-scroll { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, str] = {}
        self._differs = False
        self._shown = ""

    def body(self) -> ComposeResult:
        with Horizontal():
            with Panel(id="names-panel") as panel:
                panel.border_title = "Files"
                yield Table(id="names", cursor_type="row", show_header=False)
            with Panel(id="file-panel"), VerticalScroll(id="file-scroll"):
                yield Words("", id="file")

    def on_mount(self) -> None:
        self.table("names").add_column("name", key="name")
        self.table("names").add_column("change", key="change")
        self.table("names").focus()

    def show(self) -> None:
        files, problem = self.known.files()
        table = self.table("names")
        self._files = files
        last = self.known.last_folder()
        if [row.value for row in table.rows] != list(files):
            table.clear()
            for name in files:
                table.add_row(name, "", key=name)
        for name, text in files.items():
            table.set_text(name, "change", _change(text, _read(last, name)))
        if problem:
            self.query_one("#file-panel", Panel).border_title = "nothing to write"
            self.query_one("#file", Words).update(problem)
            return
        self._show_file()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        self._show_file()

    def _file_name(self) -> str | None:
        table = self.table("names")
        if not table.row_count:
            return None
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _show_file(self) -> None:
        name = self._file_name()
        if name is None or name not in self._files:
            return
        last = self.known.last_folder()
        panel = self.query_one("#file-panel", Panel)
        old = _read(last, name)
        if self._differs and old is not None and last is not None:
            panel.border_title = f"{name}, against {last.name}"
            content = _difference(old, self._files[name])
        else:
            panel.border_title = name if not self._differs else f"{name}: no run to compare with"
            content = Text(self._files[name])
        self.query_one("#file", Words).update(content)
        if name != self._shown:
            self.query_one("#file-scroll").scroll_home(animate=False)
        self._shown = name

    def action_diff(self) -> None:
        self._differs = not self._differs
        self._show_file()

    def action_open(self) -> None:
        name = self._file_name()
        if name is None:
            return
        named = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
        try:
            editor = shlex.split(named) or ["vi"]
            with TemporaryDirectory(prefix="trlfit-file-") as scratch:
                path = Path(scratch) / name
                path.write_text(self._files[name], encoding="utf-8")
                with self.app.suspend():
                    subprocess.run([*editor, str(path)], check=False)
        except (OSError, ValueError) as error:  # a quote without its end is a ValueError
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.notify(f"{named or 'vi'} does not start: {reason}", severity="warning", markup=False)
        except SuspendNotSupported:
            self.notify("no editor can be opened here", severity="warning")

    def action_write(self) -> None:
        self.trlfit.write()


def _read(folder: Path | None, name: str) -> str | None:
    if folder is None:
        return None
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _change(new: str, old: str | None) -> str:
    """``+3 -1`` lines, ``new``, or nothing where both are the same."""
    if old is None:
        return "new"
    lines = list(unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    added, gone = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return " ".join(f"{sign}{count}" for sign, count in (("+", added), ("-", gone)) if count)


def _difference(old: str, new: str) -> Text:
    text = Text()
    for line in list(unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2))[2:]:
        style = {"+": "green", "-": "red", "@": "dim"}.get(line[:1], "")
        text.append(line + "\n", style)
    return text if text else Text("the same")
