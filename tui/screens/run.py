"""Screen 5: a training as it goes: memory against the prediction, progress, log."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Log

from planner.units import format_gib
from tui.keys import RUN, bindings
from tui.plain import Words
from tui.probe_view import ProbeView
from tui.screens.base import Panel, PlanningScreen
from tui.screens.modals import hanging

if TYPE_CHECKING:
    from tui.run_view import RunView

CHART_ROWS = 5
LOG_FRAME = 4
"""Cells of a line beside the log's text: the frame and the scrollbar."""
TITLE_FRAME = 6
"""Cells of a frame's line that its title cannot have."""


class RunScreen(PlanningScreen):
    """The run that is watched."""

    NAME = "run"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(RUN)]
    CSS = """
    #memory { height: auto; padding: 0 1; }
    #chart { height: auto; padding: 0 1; }
    #progress { height: auto; padding: 0 1; }
    #log-panel { height: 1fr; min-height: 5; }
    #log { height: 1fr; }
    RunScreen.-short #chart { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: tuple[object, int, int] = (None, 0, 0)
        """What the log is of, how many of its lines are there, and for which width."""
        self._follows = True
        self._wanted = ""
        self._found_at = -1

    def body(self) -> ComposeResult:
        with Panel(id="memory-panel"):
            yield Words("", id="memory")
            yield Words("", id="chart")
        with Panel(id="progress-panel"):
            yield Words("", id="progress")
        with Panel(id="log-panel"):
            yield Log(id="log", max_lines=5000)

    def on_mount(self) -> None:
        self.query_one(Log).focus()
        self.set_interval(1.0, self._tick)

    def _tick(self) -> None:
        """How long it has been going on."""
        view = self.known.watched
        if view is not None and view.is_live and self.is_current:
            self.show()

    def show(self) -> None:
        view = self.known.watched
        panel, progress = self.query_one("#progress-panel", Panel), self.query_one("#progress", Words)
        self.show_panel("memory-panel", view is not None and bool(view.ranks))
        if view is None:
            panel.border_title = "Run"
            nothing = "No run is watched: L on the plans (2) launches one, 6 opens an earlier one, P probes."
            launching = f"Not started yet: {self.known.launching}" if self.known.launching else ""
            progress.update(launching or self.known.refused or nothing)
            self.query_one("#log-panel").display = False
            return
        self.query_one("#log-panel").display = True
        title, lines = view.title(), self._progress(view)
        if len(title) > self.size.width - TITLE_FRAME:  # how a run ended is a sentence
            title, lines = view.name, [title, *lines]
        panel.border_title = title
        progress.update("\n".join(lines))
        if not isinstance(view, ProbeView):
            self._show_memory(view)
        self._show_log(view)

    def _progress(self, view: RunView | ProbeView) -> list[str]:
        lines: list[str] = []
        if view.fraction is not None:
            cells = max(10, self.size.width - 12)
            done = round(view.fraction * cells)
            full, rest = ("█", "─") if self.known.unicode else ("#", "-")
            lines.append(f"{full * done}{rest * (cells - done)} {view.fraction:4.0%}")
        lines.append(view.line or view.waiting)
        return lines

    def _cards(self, view: RunView, cells: int) -> list[str]:
        """What NVML says of this machine's cards, all processes together."""
        lines: list[str] = []
        for card in self.known.cards:
            sample = self.known.samples.get(card.index)
            if sample is None or sample.problem or self.known.is_hidden(card):
                continue
            used, expected = sample.used_bytes, view.predicted.device_bytes
            bar = _bar(used, used, expected, card.total_bytes, cells, unicode=self.known.unicode)
            words = f"  predicted {format_gib(expected, 2):>7}" if expected else ""
            lines.append(f"GPU {card.index}  {bar} {format_gib(used, 2):>7}  in use      {words}")
        return lines

    def _show_memory(self, view: RunView) -> None:
        from tui.run_view import chart  # with what follows a run: 40 ms, after the first frame

        predicted = view.predicted.allocated_bytes
        scale = max([view.capacity_bytes or 0, predicted or 0, *(r.peak_bytes for r in view.ranks), 1])
        where = f" of {format_gib(view.capacity_bytes)}" if view.capacity_bytes else ""
        panel = self.query_one("#memory-panel", Panel)
        panel.border_title = f"Memory  last step, peak, predicted; GiB{where}"
        cells = max(10, self.size.width - 52)
        lines: list[str] = []
        for rank in view.ranks:
            bar = _bar(rank.now_bytes, rank.peak_bytes, predicted, scale, cells, unicode=self.known.unicode)
            expected = f"  predicted {format_gib(predicted, 2):>7}" if predicted else ""
            sizes = f"{format_gib(rank.now_bytes, 2):>7}  peak {format_gib(rank.peak_bytes, 2):>7}{expected}"
            lines.append(f"rank {rank.rank} {bar} {sizes}")
        lines += self._cards(view, cells)
        if view.verdict:
            lines.append(view.verdict)
        self.query_one("#memory", Words).update("\n".join(lines))
        width = max(10, self.size.width - 4)
        drawn = chart(
            list(view.series), predicted=predicted, width=width, height=CHART_ROWS, unicode=self.known.unicode
        )
        self.query_one("#chart", Words).update("\n".join(drawn))

    def _show_log(self, view: RunView | ProbeView) -> None:
        log = self.query_one(Log)
        shown, count, width = self._logged
        if shown is not view or (isinstance(view, ProbeView) and width != self.size.width):
            log.clear()
            count = 0
        new = view.num_lines - count
        if new > 0:
            log.write_lines(self._laid_out(view, new), scroll_end=self._follows)
        if self._follows and new > 0:
            # Once more when the panels above have taken their room.
            self.call_after_refresh(log.scroll_end, animate=False)
        self._logged = (view, view.num_lines, self.size.width)
        follows = "following" if self._follows else "f follows"
        self.query_one("#log-panel", Panel).border_title = f"Log  {_lines(view.num_lines)}, {follows}"

    def _laid_out(self, view: RunView | ProbeView, last: int | None = None) -> list[str]:
        """The last lines as the log has them: what a probe says is sentences, and is not cut."""
        lines = list(view.lines) if last is None else list(view.lines)[-last:]
        if not isinstance(view, ProbeView):
            return lines
        room = max(20, self.size.width - LOG_FRAME)
        return [part for line in lines for part in ([line] if len(line) <= room else hanging(line, room, 2))]

    def action_follow(self) -> None:
        self._follows = not self._follows
        if self._follows:
            self.query_one(Log).scroll_end(animate=False)
        self.refresh_view()

    def action_find(self) -> None:
        self.edit_line.ask("find", self._wanted, self._find, says=lambda text: self._count(text))

    def _count(self, text: str) -> str:
        view = self.known.watched
        found = sum(text.lower() in line.lower() for line in view.lines) if view and text else 0
        return _lines(found)

    def _find(self, text: str) -> None:
        self._wanted, self._found_at = text, -1
        self.action_next()

    def action_next(self) -> None:
        view = self.known.watched
        if view is None or not self._wanted:
            return
        lines = self._laid_out(view)
        order = [*range(self._found_at + 1, len(lines)), *range(self._found_at + 1)]
        place = next((i for i in order if i < len(lines) and self._wanted.lower() in lines[i].lower()), None)
        if place is None:
            self.notify(f"{self._wanted!r} does not stand in the log", markup=False)
            return
        self._follows, self._found_at = False, place
        self.query_one(Log).scroll_to(y=place, animate=False)
        self.refresh_view()

    def action_cancel(self) -> None:
        self.trlfit.cancel_watched()

    def action_probe(self) -> None:
        self.trlfit.probe()

    def action_detach(self) -> None:
        self.trlfit.detach()


def _lines(count: int) -> str:
    return f"{count:,} line{'' if count == 1 else 's'}"


def _bar(now: int, peak: int, predicted: int | None, scale: int, cells: int, *, unicode: bool) -> str:
    """The last step filled, the peak dotted behind it, the prediction a stroke."""
    full, dots, rest, stroke = ("█", "·", " ", "│") if unicode else ("#", ".", " ", "|")
    at = [max(0, min(cells, round(size / scale * cells))) for size in (now, peak)]
    line = list(full * at[0] + dots * max(0, at[1] - at[0]) + rest * (cells - max(at)))
    if predicted and predicted > 0:
        line[min(cells - 1, round(predicted / scale * cells))] = stroke
    return "".join(line)
