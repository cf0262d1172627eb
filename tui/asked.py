"""What the screens say about the job, the machine and the plan, as text. No widget here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from launcher.errors import TrlfitError, UsageError
from launcher.paths import expanded
from planner.units import format_bytes, format_count, format_seconds
from tui import lengths
from tui.cells import size_words
from tui.fields import Field
from tui.session import Session

if TYPE_CHECKING:
    from launcher.nvml.gpus import CardSample
    from launcher.run_text.run_spec import RunSpec
    from launcher.writing.data import DataReport
    from planner.machine import Card
    from planner.planning import PlanOutcome

Json = Mapping[str, Any]
NO_DATA = "no data is named yet: 1, then Enter on data"
"""Before anything is written or run."""
_FLAG = re.compile(r"(?<![\w-])--(?=[a-z])")
SLOW_STEP_S = 3600.0
"""A run with such a step fits, and nobody wants it."""
TAKEN_BYTES = 256 * 2**20
"""More than this taken on a card since planning is said; less is a driver's breath."""


def subject(session: Session, *, room: int, unicode: bool = True) -> str:
    """``Qwen3-8B · sft full · 4,096 · 8xH100-80GB`` in ``room`` cells; with less of them the model and the machine."""
    try:
        job, _ = session.job()
    except TrlfitError:
        return "no job"
    between, dots = (" · ", "…") if unicode else (" - ", "~")
    model, machine = job.model.rstrip("/").rpartition("/")[2], job.machine.rstrip("/").rpartition("/")[2]
    whole = between.join([model, f"{job.trainer} {job.method}", f"{job.seq_len:,}", machine])
    if len(whole) <= room:
        return whole
    left = room - len(between) - len(machine)
    return between.join([model if len(model) <= left else model[: max(1, left - 1)] + dots, machine])


def on_screen(text: str) -> str:
    """A message of the command line without the dashes of its flags, which are fields here; commands stay."""
    pieces = text.split("`")
    return "`".join(piece if place % 2 else _FLAG.sub("", piece) for place, piece in enumerate(pieces))


def is_of(plan: Json, session: Session) -> bool:
    """Whether a plan is still about the model, the method and the machine that are asked for."""
    try:
        job, _ = session.job()
    except TrlfitError:
        return False
    return (job.model, job.method, job.machine) == tuple(plan["job"][name] for name in ("model", "method", "machine"))


def checks(
    plan: Json | None,
    problem: str,
    status: str,
    report: DataReport | None,
    data_line: str,
    left_out: Sequence[int] = (),
) -> list[str]:
    """What speaks for or against the job, what decides first: the plan, its notes, the data, the stack.

    Args:
        plan: the plan document, if there is one.
        problem: why there is none.
        status: what is being done for the next one.
        report: on the data.
        data_line: what was just asked for about the data.
        left_out: cards of this machine that were left out on the screen.
    """
    lines = [f"no    {on_screen(problem)}"] if problem else ([f"...   {status}"] if status else [])
    if data_line:  # what was just asked for
        lines.append(f"data  {data_line}")
    if plan is not None:
        lines.append(_verdict(plan, is_older=bool(status)))
        best = plan["best"]
        notes = [*plan["notes"], *(best["warnings"] if best is not None else ())]
        lines += [f"note  {on_screen(note)}" for note in notes]
        # That there is no card is said in their place.
        about_cards = plan["machine"]["notes"] if plan["machine"]["cards"] else ()
        if left_out:
            lines.append(f"note  left out above: card {', '.join(map(str, left_out))}")
            about_cards = [note for note in about_cards if not note.startswith("CUDA_VISIBLE_DEVICES=")]
        lines += [f"note  {note}" for note in about_cards]
    if report is not None and plan is not None:
        lines.append(f"data  {lengths.words(report.lengths, plan['job']['seq_len'])}")
    if plan is not None:
        versions = plan["stack"]["versions"]
        named = ", ".join(f"{name} {versions[name]}" for name in ("trl", "transformers", "torch") if name in versions)
        lines.append(f"stack {named}")
    return lines


def _verdict(plan: Json, *, is_older: bool) -> str:
    """Whether anything fits; of a plan that is being replaced, what it said."""
    if plan["best"] is None:
        return f"{'was' if is_older else 'no':<6}nothing fits as asked; 2 says by how much, and c there what would"
    memory, time = plan["best"]["memory"], plan["best"]["time"]
    pace = f", {format_seconds(time['step_s'])} a step" if time else ""
    where = "of each card" if plan["machine"]["cards"] else "of this machine's memory"
    is_slow = bool(time) and time["step_s"] >= SLOW_STEP_S
    word = "was" if is_older else ("slow" if is_slow else "ok")
    return f"{word:<6}the best plan takes {size_words(memory['device_bytes'])} {where}{pace}"


def _is_here(name: str) -> bool:
    try:
        return expanded(name).exists()
    except OSError:  # longer than a name may be
        return False


def finding(field: Field, plan: Json | None, report: DataReport | None) -> str:
    """What was found out about a field, else what it is."""
    choices = f"{field.says}: {', '.join(field.choices)}" if field.choices else field.says
    if plan is None:
        return choices
    if field.path == "model":
        architecture = plan["architecture"]
        total = format_count(architecture["parameters"]["total"])
        return f"{total} parameters, {architecture['layers']} layers ({architecture['origin']})"
    if field.path == "method":
        count = format_count(plan["architecture"]["parameters"]["trainable"])
        return f"{count} parameters train; Enter steps through {', '.join(field.choices)}"
    if field.path == "machine":
        from launcher.text.plan import machine_words  # the first plan comes after the first frame

        return machine_words(plan["machine"])
    if field.path == "data.dataset":
        if report is None:
            named = plan["job"]["data"]["dataset"]
            hub = "" if not named or _is_here(named) else "no file of this name here: a hub id; "
            return f"{hub}i counts the tokens of its first rows" if named else field.says
        rows = f"{report.num_rows:,} rows" if report.num_rows is not None else "rows not counted"
        return f"{rows}, {report.format}; {report.sampled_rows:,} looked at"
    if field.path == "seq_len" and report is not None:
        cut = lengths.cut_count(report.lengths, plan["job"]["seq_len"])
        return f"{1 - cut / len(report.lengths):.0%} fit whole; the longest has {report.tokens_max:,}"
    if field.path == "global_batch" and plan["best"] is not None:
        choice, gpus = plan["best"]["choice"], plan["best"]["num_gpus"]
        where = f"on each of {gpus} GPUs" if gpus > 1 else ("on the GPU" if plan["machine"]["cards"] else "on the CPU")
        return f"micro batch {choice['micro_batch']} x {choice['grad_accum']} accumulated, {where}"
    return choices


def pin_remark(text: str) -> str:
    """What is wrong with ``knob=value``, or nothing."""
    from planner.pins import PinError, parse_pins  # not before somebody pins

    knob, sign, value = text.partition("=")
    if not sign:
        return "knob=value, such as recompute=full"
    try:
        parse_pins({knob.strip(): value.strip()})
    except PinError as error:
        return str(error)
    return ""


def command(session: Session, cards: Sequence[Card]) -> str:
    """The command line that plans the same."""
    visible = visible_devices(session, cards)
    before = f"CUDA_VISIBLE_DEVICES={shlex.quote(visible)} " if visible is not None else ""
    return before + session.command()


def visible_devices(session: Session, cards: Sequence[Card]) -> str | None:
    """CUDA_VISIBLE_DEVICES that leaves out what was hidden, None where nothing was."""
    if not session.hidden_cards:
        return None
    names = [card.uuid or str(card.index) for card in cards]
    return ",".join(name for name in names if name not in session.hidden_cards)


def taken_banner(
    outcome: PlanOutcome | None, candidate: Json | None, cards: Sequence[Card], samples: Mapping[int, CardSample]
) -> str:
    """A card of the chosen plan that somebody has taken since it was made."""
    if outcome is None or candidate is None or outcome.problem.inputs.machine.origin != "nvml":
        return ""
    # The plan numbers the cards that are not left out.
    planned = {card.index: card for card in outcome.problem.inputs.machine.cards}
    now = {card.uuid or str(card.index): samples.get(card.index) for card in cards}
    for index in candidate["cards"]:
        card = planned.get(index)
        sample = None if card is None else now.get(card.uuid or str(card.index))
        if card is None or sample is None or sample.problem:
            continue
        own = sum(p.memory_bytes or 0 for p in sample.processes if p.own)
        more = sample.used_bytes - card.used_bytes - own
        if more > TAKEN_BYTES:
            who = ", ".join(f"pid {p.pid} {p.name or '?'}" for p in sample.processes if not p.own) or "somebody"
            return f"GPU {sample.index}: {format_bytes(more)} taken by {who} since planning; r plans again"
    return ""


def launch_text(
    outcome: PlanOutcome | None, chosen: int, candidate: Json | None, python: str | None, *, start: bool
) -> tuple[Text, RunSpec, Path]:
    """(what is asked before a launch, the run, its folder).

    Raises:
        UsageError: the plan cannot be written or started from here.
        NothingFits: the chosen plan does not fit.
    """
    from launcher.run_text.run_files import (
        render_run,  # writing costs 100 ms to import, which the first frame does not wait for
    )
    from launcher.writing.run_target import NothingFits, check_data_named, check_is_here, free_folder, spec_of

    if outcome is None or candidate is None:
        raise UsageError("there is no plan to launch; 1 says why")
    if not candidate["fits"]:
        raise NothingFits("the chosen plan does not fit")
    if not outcome.problem.inputs.job.data.dataset:
        raise UsageError(NO_DATA)
    check_data_named(outcome.problem.inputs.job)
    spec, _ = spec_of(outcome, chosen + 1, python)
    if start:
        check_is_here(spec, "4 and W there write the folder to copy to it")
    folder = free_folder(spec)
    files = render_run(spec)
    memory, time = candidate["memory"], candidate["time"]
    pace = f", {format_seconds(time['step_s'])} a step" if time else ""
    text = Text()
    text.append(f"{folder}\n", "bold")
    text.append(f"{', '.join(files)}\n")
    text.append(f"{size_words(memory['allocated_bytes'])} allocated per process{pace}\n")
    text.append(f"\nbash {shlex.quote(str(folder / 'command.sh'))}\n", "bold")
    lines = [line for line in files["command.sh"].splitlines() if line and not line.startswith("#")]
    text.append("\n".join(f"  {line}" for line in lines))
    return text, spec, folder
