from __future__ import annotations

import signal
from itertools import groupby

import pytest

# A job in the background of a script is deaf to Ctrl-C, one under nohup to a hang-up, and so is all that they start.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


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
