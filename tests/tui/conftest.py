from __future__ import annotations

from collections.abc import Iterator

import pytest
from textual.command import SearchIcon
from textual.scrollbar import ScrollBarRender

from tests.launcher.conftest import nvml_libraries, nvml_stub

__all__ = ["nvml_libraries", "nvml_stub"]


@pytest.fixture(autouse=True)
def glyphs_of_textual() -> Iterator[None]:
    """What ``tui.ascii`` alters for a whole process ends with the test that asked for it."""
    bars = ScrollBarRender.VERTICAL_BARS, ScrollBarRender.HORIZONTAL_BARS
    icon = SearchIcon.render
    yield
    ScrollBarRender.VERTICAL_BARS, ScrollBarRender.HORIZONTAL_BARS = bars
    SearchIcon.render = icon  # type: ignore[method-assign]
