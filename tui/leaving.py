"""Leaving at once, whatever goes on in the background: threads that nobody waits for, helpers that end with us."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import launcher

HELPERS = str(Path(launcher.__file__).parent / "children")
"""Scripts that answer a question in the training Python; a run is never one of them."""
GONE_S = 1.0
"""For threads to see that their helper is gone and to clear away its files."""
_POLL_S = 0.02


class DaemonThreads(ThreadPoolExecutor):
    """A thread for each piece of work; none is waited for at the end, and none waits for a free one.

    asyncio's own pool has few threads, which quiet runs that are followed would fill, and is waited for at the end.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._alive: list[Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start ``fn`` in a thread of its own."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        thread = Thread(target=work, daemon=True)
        self._alive = [other for other in self._alive if other.is_alive()] + [thread]
        thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Give threads whose helper was ended a moment, not more."""
        until = time.monotonic() + GONE_S
        while end_helpers() and any(thread.is_alive() for thread in self._alive) and time.monotonic() < until:
            time.sleep(_POLL_S)
        for thread in self._alive:
            thread.join(_POLL_S)


def end_helpers() -> int:
    """Kill the helpers that this process has started, and what they started; returns how many there were."""
    import psutil  # 10 ms

    ended = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if not any(word.startswith(HELPERS) for word in child.cmdline()):
                continue
            ended += 1
            below = child.children(recursive=True)
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            for process in below:
                with contextlib.suppress(psutil.Error):
                    process.kill()
    return ended
