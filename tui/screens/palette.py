"""The palette of commands, in signs that every terminal has."""

from __future__ import annotations

from contextlib import suppress

from textual.command import CommandPalette


class Palette(CommandPalette):
    """Textual's own; a page up or down in a list without a line in sight ends nothing."""

    def __init__(self) -> None:
        super().__init__(id="--command-palette", placeholder="Search for commands")

    def _action_command_list(self, action: str) -> None:
        with suppress(KeyError):  # of Textual 8.2, where the list has no room for a line
            super()._action_command_list(action)
