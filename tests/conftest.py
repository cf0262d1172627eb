from __future__ import annotations

from itertools import groupby

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that train for real come first, then those that ask real libraries or draw screens.

    `make test` gives a file to one of two processes, so that what a file makes once is made once; a file that takes
    minutes must not be the last to start.
    """

    def cost(item: pytest.Item) -> int:
        if item.get_closest_marker("launch"):
            return 0
        return 1 if item.get_closest_marker("stack") or item.path.parent.name == "tui" else 2

    files = [list(file) for _, file in groupby(items, key=lambda item: item.path)]
    files.sort(key=lambda file: min(map(cost, file)))
    items[:] = [item for file in files for item in file]
