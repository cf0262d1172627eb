"""Terminals that have no more than ASCII: what Textual itself draws with block characters."""

from __future__ import annotations


def draw_in_ascii() -> None:
    """Scrollbars of whole cells, by colour alone, and a palette without its picture, for this process."""
    from textual.command import SearchIcon
    from textual.scrollbar import ScrollBarRender

    ScrollBarRender.VERTICAL_BARS = [" "] * len(ScrollBarRender.VERTICAL_BARS)
    ScrollBarRender.HORIZONTAL_BARS = [" "] * len(ScrollBarRender.HORIZONTAL_BARS)

    def icon(self: SearchIcon) -> str:
        return ">"

    SearchIcon.render = icon  # type: ignore[method-assign]
