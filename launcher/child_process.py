"""Running a script of ``launcher/children`` in another Python, which may turn out to be anything.

The script is bounded in time and in what it prints. It leads a session of its own, which is ended with it; one that
reads a request has our end of its stdin for as long as we live. Whether we are done, interrupted or killed, nothing
that it started outlives us.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from launcher.errors import EnvironmentLacks, TrlfitError, UsageError

CHILDREN = Path(__file__).parent / "children"
SAID_LINES = 200
"""Of a child's words; the last of them explain a failure."""
_MOST_BYTES = 32 * 2**20
_LOOK_S = 0.1
"""A child may end and leave what holds its pipes: this often it is looked for."""
_LAST_LOOK_S = 0.002
"""As often once it has closed its pipes, which it does just before it ends."""
_KINDS: dict[str, type[TrlfitError]] = {"usage": UsageError, "environment": EnvironmentLacks}


class TooSlow(Exception):
    """The child did not end in time; it and all that it started are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a child left when it ended."""

    code: int
    """Its exit code, or minus the signal that ended it."""
    output: str
    said: tuple[str, ...]
    """The last lines of its stderr that nobody took, without spaces around them."""

    @property
    def last_words(self) -> str:
        """The last thing that it said, short."""
        return next((line for line in reversed(self.said) if line), "it said nothing")[:300]

    def document(self) -> dict[str, Any] | None:
        """The JSON object on the last line of its output, None where there is none.

        Raises:
            UsageError: the object is ``{"error": {"kind": "usage", "message": ...}}``.
            EnvironmentLacks: it is an error of another kind.
        """
        try:
            # A wrapper, a sitecustomize or a library may print before it.
            found: object = json.loads(self.output.strip().rpartition("\n")[2])
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        document = cast("dict[str, Any]", found)
        if isinstance(document.get("error"), dict):
            error: dict[str, Any] = document["error"]
            raise _KINDS.get(str(error.get("kind")), EnvironmentLacks)(str(error.get("message")))
        return document


def run_script(
    script: str,
    *,
    python: str | None,
    limit_s: float,
    request: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    most_bytes: int = _MOST_BYTES,
    heard: Callable[[bytes], bool] | None = None,
) -> Answer:
    """Run a script until it ends.

    Args:
        script: file name inside ``launcher/children``.
        python: the Python that runs it, None for the one running.
        limit_s: it is ended after this long.
        request: handed over as one line of JSON on its stdin, which then stays open; None for an empty stdin.
        arguments: of its command line.
        environment: variables beside ours, which win.
        most_bytes: of each of its streams; no Python of ours says more.
        heard: given every line of its stderr; True says that the line is not one of its words.

    Raises:
        EnvironmentLacks: it cannot be started, or prints on and on.
        TooSlow: it took longer.
    """
    interpreter = python or sys.executable
    # Scripts import others of their folder, which this variable would keep from them.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    try:
        process = subprocess.Popen(
            [interpreter, str(CHILDREN / script), *arguments],
            stdin=subprocess.DEVNULL if request is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**kept, **(environment or {})},
        )
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot start the training Python {interpreter}: {error.strerror}; name another with --python"
        ) from None
    ears = _Ears(process, most_bytes, heard)
    try:
        ears.listen(b"" if request is None else json.dumps(request).encode() + b"\n", time.monotonic() + limit_s)
    except OverflowError:
        raise EnvironmentLacks(f"the training Python {interpreter} does not answer like one: it prints on") from None
    finally:
        _end_session(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.wait()
    return Answer(code=process.returncode, output=ears.output.decode("utf-8", "replace"), said=tuple(ears.said))


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without collecting it: until then its number, which is its session's too, is nobody else's."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_session(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class _Ears:
    """Takes in what a child prints, while it is handed its request."""

    def __init__(
        self, process: subprocess.Popen[bytes], most_bytes: int, heard: Callable[[bytes], bool] | None
    ) -> None:
        self._process, self._most_bytes, self._heard = process, most_bytes, heard
        self._num_said_bytes = 0
        self._line = bytearray()
        self.output = bytearray()
        self.said: deque[str] = deque(maxlen=SAID_LINES)

    def listen(self, request: bytes, until: float) -> None:
        """Until the child has ended and all of it is taken in.

        Raises:
            TooSlow: it is ``until`` on the monotonic clock.
            OverflowError: it printed more than it may.
        """
        process = self._process
        assert process.stdout is not None and process.stderr is not None
        has_ended = False
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while selector.get_map() or not has_ended:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TooSlow
                if not has_ended and _has_ended(process):
                    has_ended = True
                    _end_session(process)  # what it started may hold the pipes
                look_s = _LOOK_S if selector.get_map() else _LAST_LOOK_S
                ready = selector.select(0 if has_ended else min(left_s, look_s))
                if has_ended and not ready:
                    break
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        request = _hand_over(key.fd, request)
                        if not request:
                            selector.unregister(key.fileobj)
                        continue
                    chunk = os.read(key.fd, 2**16)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stdout:
                        self._take_output(chunk)
                    else:
                        self._take_words(chunk)
        if self._line:
            self._take_line(bytes(self._line))

    def _take_output(self, chunk: bytes) -> None:
        self.output += chunk
        if len(self.output) > self._most_bytes:
            raise OverflowError

    def _take_words(self, chunk: bytes) -> None:
        self._num_said_bytes += len(chunk)
        if self._num_said_bytes > self._most_bytes:
            raise OverflowError
        *lines, rest = (self._line + chunk).split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            self._take_line(bytes(line))

    def _take_line(self, line: bytes) -> None:
        if self._heard is None or not self._heard(line):
            self.said.append(line.decode("utf-8", "replace").strip())


def _hand_over(descriptor: int, request: bytes) -> bytes:
    """What is left of a request to be written; nothing where the child ended before it read."""
    try:
        return request[os.write(descriptor, request) :]
    except BlockingIOError:
        return request
    except BrokenPipeError:
        return b""
