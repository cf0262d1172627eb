"""Text as it is: no markup, and nothing in it moves the terminal's cursor or changes its colours.

Names of models, runs, users and processes, log lines and error messages come from outside.
"""

from __future__ import annotations

import re
from typing import Any

from rich.text import Text
from textual.content import Content
from textual.visual import VisualType
from textual.widgets import Static

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls but line ends and tabs, and marks that turn the direction of writing."""


def plain(text: str) -> str:
    """``text`` with a question mark for each sign that is none."""
    return _CONTROLS.sub("?", text)


class Words(Static):
    """A text that takes no markup and lets no control through."""

    def __init__(self, content: str | Text = "", **about: Any) -> None:
        super().__init__(_plain_content(content), markup=False, **about)

    def update(self, content: VisualType = "", *, layout: bool = True) -> None:
        """Another text."""
        super().update(_plain_content(content), layout=layout)


def _plain_content(content: VisualType) -> VisualType:
    if isinstance(content, Text):
        content.plain = plain(content.plain)  # as long as before, so that its styles stay where they are
    return Content(plain(content)) if isinstance(content, str) else content
