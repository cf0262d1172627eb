"""Following a run from its folder: log lines, metric rows and state as events, progress as text."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launcher.ending.outcomes import Outcome
from launcher.ending.run_metrics import parse_row
from launcher.running.checkpoints import last_checkpoint
from launcher.running.early_verdict import EarlyVerdict
from launcher.running.progress import Progress as Progress
from launcher.running.run_events import BadRow as BadRow
from launcher.running.run_events import Event as Event
from launcher.running.run_events import LogLine as LogLine
from launcher.running.run_events import MetricRow as MetricRow
from launcher.running.run_events import StateChange as StateChange
from launcher.running.run_record import LOG, METRICS
from launcher.running.runs import RunState, run_state

POLL_S = 0.2
STATE_S = 0.5
"""Asking whether a process lives costs more than looking at two file sizes."""
CHUNK_BYTES = 1 << 20
BACKLOG_BYTES = 64 << 10
"""Of an old log, the end is enough; metrics are always read from their first row."""

_TRACEBACK = "Traceback (most recent call last):"
_LAUNCHERS = ("subprocess.CalledProcessError:", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class Tail:
    """Whole lines of a growing file, however they arrive, also when it is cut or replaced."""

    def __init__(self, path: Path, backlog_bytes: int | None = None) -> None:
        """Nothing is opened yet; the file may not exist.

        Args:
            path: The file.
            backlog_bytes: Start this far before its present end, at a line; None for its beginning.
        """
        self._path = path
        self._backlog_bytes = backlog_bytes
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def lines(self, *, flush: bool = False) -> Iterator[tuple[str, bool]]:
        """New lines, each with whether a carriage return ended it.

        Args:
            flush: Also give a last line that has no end: nothing more will be written.
        """
        for data in self._chunks():
            start = 0
            self._rest += data
            # A carriage return at the very end may be half of a line end.
            for match in _LINE_END.finditer(self._rest):
                if match.group() == b"\r" and match.end() == len(self._rest) and not flush:
                    break
                yield self._text(self._rest[start : match.start()]), match.group() == b"\r"
                start = match.end()
            self._rest = self._rest[start:]
        if flush and self._rest:
            yield self._text(self._rest.rstrip(b"\r")), self._rest.endswith(b"\r")
            self._rest = b""

    def _chunks(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._place(status.st_ino, status.st_size)
                file.seek(self._offset)
                while data := file.read(CHUNK_BYTES):
                    self._offset += len(data)
                    yield data
        except OSError:  # not there yet, or out of reach for a moment
            return

    def _place(self, inode: int, size: int) -> None:
        if self._inode is None and self._backlog_bytes is not None and size > self._backlog_bytes:
            self._offset = size - self._backlog_bytes
            with self._path.open("rb") as file:
                file.seek(self._offset)
                self._offset += len(file.readline())
        elif self._inode not in (None, inode) or size < self._offset:
            self._offset, self._rest = 0, b""
        self._inode = inode

    @staticmethod
    def _text(line: bytes) -> str:
        return line.decode(errors="replace")


def follow(
    folder: Path,
    *,
    poll_s: float = POLL_S,
    backlog_bytes: int | None = BACKLOG_BYTES,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Events of a run until it is over; of one that is over, what it left.

    Closing the iterator, or an interrupt inside it, leaves the run alone.

    Args:
        folder: A run folder. One that was not started gives its state and ends.
        poll_s: Seconds between looks at the files.
        backlog_bytes: How much of a log that exists already to give; None for all.
        stopped: Asked at every look, also between events; true ends the events, and leaves the run alone.

    Raises:
        UsageError: not a run folder.
    """
    state = run_state(folder)
    yield StateChange(state=state)
    log = Tail(state.folder / LOG, backlog_bytes)
    metrics = Tail(state.folder / METRICS)
    asked_at = time.monotonic()
    while state.stage == "running":
        yield from _news(log, metrics)
        if stopped():
            return
        time.sleep(poll_s)
        if time.monotonic() - asked_at >= STATE_S:
            before, state = state, run_state(folder)
            asked_at = time.monotonic()
            if state.stage == "running" and (state.note != before.note or _attempt(state) != _attempt(before)):
                yield StateChange(state=state)
    ended = state.is_over
    yield from _news(log, metrics, flush=ended)
    if ended:
        yield StateChange(state=state)


def _attempt(state: RunState) -> str | None:
    return state.record.id if state.record is not None else None


def _news(log: Tail, metrics: Tail, *, flush: bool = False) -> Iterator[Event]:
    for text, redrawn in log.lines(flush=flush):
        if text or not redrawn:
            yield LogLine(text=text, redrawn=redrawn)
    for text, _ in metrics.lines(flush=flush):
        row = parse_row(text)
        if row is not None:
            yield MetricRow(row=row)
        elif text.strip():
            yield BadRow(text=text)


def narrate(
    folder: Path,
    write: Callable[[str], object],
    *,
    log: bool = False,
    every_s: float = 5.0,
    poll_s: float = POLL_S,
) -> RunState | None:
    """Tell a run's progress in lines until it is over.

    The early verdict is told once there is one, and whenever it turns; so are the supervisor's notes and what an
    automatic retry alters.

    Args:
        folder: A run folder.
        write: Takes each line, without its end.
        log: Also every line of log.txt that is not drawn over.
        every_s: Least seconds between two progress lines; the first and the last are always told.
        poll_s: Seconds between looks at the files.

    Returns:
        The last state, or None when Ctrl-C ended the telling: the run goes on.
    """
    progress = Progress(folder)
    state: RunState | None = None
    told_at: float | None = None
    waiting: str | None = None
    verdict: EarlyVerdict | None = None
    try:
        for event in follow(folder, poll_s=poll_s):
            if isinstance(event, StateChange):
                for text in _news_of_state(state, event.state):
                    write(text)
                state = event.state
            elif log and isinstance(event, LogLine) and not event.redrawn:
                write(event.text)
            line = progress.feed(event)
            now = time.monotonic()
            if line is not None and (told_at is None or now - told_at >= every_s):
                write(line)
                told_at, waiting = now, None
            elif line is not None:
                waiting = line
            if line is not None and (found := progress.verdict) and (verdict is None or found.kind != verdict.kind):
                write(found.sentence)
                verdict = found
    except KeyboardInterrupt:
        return None
    if waiting is not None:
        write(waiting)
    return state


def _news_of_state(before: RunState | None, now: RunState) -> Iterator[str]:
    """What a change of a run's state has to say while it runs; of its end, the attempt that nobody saw start."""
    record, seen_running = now.record, before is not None and before.stage == "running"
    if now.stage != "running" and not seen_running:
        return
    if record is not None and record.attempt > 1 and (before is None or _attempt(before) != _attempt(now)):
        # From the record: the supervisor's note of it stands for a moment only, and who looks now and then misses it.
        if record.after is not None:
            yield record.after
        start = f"from {record.resumed_from}" if record.resumed_from else "from the beginning"
        yield f"attempt {record.attempt}, {start}: {record.change}"
    if now.stage == "running" and now.note is not None and (before is None or before.note != now.note):
        yield now.note


def closing_lines(outcome: Outcome, folder: Path, num_log_lines: int = 15) -> list[str]:
    """What to say at the end: the sentence, after a failure where to look, and how to go on."""
    lines = [outcome.sentence, *([outcome.note] if outcome.note else [])]
    if outcome.kind not in ("done", "stopped"):
        texts = [text for text, redrawn in Tail(folder / LOG, BACKLOG_BYTES).lines(flush=True) if not redrawn]
        lines += [f"  {text}" for text in _own_words(texts)][-num_log_lines:]
        lines.append(f"the whole log: {folder / LOG}")
    name = shlex.quote(str(folder))
    if outcome.kind == "out_of_memory":
        lines.append(f"`trlfit launch {name} --next` launches the next plan, which fits with what was seen")
    elif outcome.kind != "done" and (checkpoint := last_checkpoint(folder)) is not None:
        lines.append(f"`trlfit launch {name} --resume` goes on from {checkpoint.name}")
    return lines


def _own_words(texts: Sequence[str]) -> list[str]:
    """Lines that say something, without the traceback of a launcher whose child failed."""
    said = [text for text in texts if text.strip()]
    last = next((i for i in reversed(range(len(said))) if _TRACEBACK in said[i]), None)
    if last and said[-1].startswith(_LAUNCHERS):
        said = [*said[:last], said[-1]]
    return said
