"""Wrapping: sentences for people, in lines of at most 100 columns on a pipe as on a terminal."""

from __future__ import annotations

import re
from textwrap import wrap

WIDTH = 100
_NO_BREAK = "\u00a0"


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most ``WIDTH`` columns; a number keeps its unit, and no word is broken.

    Args:
        text: one paragraph.
        first: what the first line begins with.
        rest: what every further line begins with.
    """
    kept = re.sub(r"(?<=\d) (?=(?:GiB|MiB|s|min|h)\b)", _NO_BREAK, text)
    lines = wrap(
        kept, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]
