"""What is on the screen of an app under Pilot, as text and as colours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot


def screen_text(app: App[Any]) -> str:
    """The lines of the screen as a person reads them."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def screen_colours(app: App[Any]) -> set[tuple[int, int, int]]:
    """Every colour that is sent to the terminal."""
    found: set[tuple[int, int, int]] = set()
    for strip in app.screen._compositor.render_strips():
        for segment in strip:
            style = segment.style
            for colour in (style.color, style.bgcolor) if style else ():
                if colour is not None and colour.triplet is not None:
                    found.add(tuple(colour.triplet))
    return found


async def wait_for(pilot: Pilot[Any], condition: Callable[[], bool], seconds: float = 60) -> None:
    """Let the app run until ``condition`` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"did not happen; the screen:\n{screen_text(pilot.app)}"
        await pilot.pause(0.05)
    await pilot.pause()
