"""Why a run ended: rules over exit, log and metrics, of which the first that speaks decides."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from launcher.ending.kernel_log import KernelKill
from launcher.ending.log_evidence import Failure, LogEvidence, Raised, Shortage, guess_phase, read_shortage
from launcher.ending.run_metrics import Metrics, Predicted
from planner.units import format_bytes, format_seconds

Kind = Literal[
    "done", "out_of_memory", "configuration_error", "data_error", "hung", "killed", "node_lost",
    "disk_full", "stopped", "failed",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
FULL_BYTES = 1 << 20
"""Less than this is a full disk: not one tensor of a checkpoint goes in."""


BEYOND_VOCABULARY = "a row holds a token id beyond the vocabulary: tokenise the data with this model's tokenizer"
_WORKER_KILLED = re.compile(r"DataLoader worker .*(killed by signal: Killed|exited unexpectedly)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the one who watched the run knows beside exit code, log and metrics."""

    stop: str | None = None
    """Set when we ended the run: who asked, as the end of "stopped ..."."""
    hung: str | None = None
    """Set when we ended the run because it had fallen silent: how silent, as a clause."""
    lost: str | None = None
    """Set when nobody saw the exit: why, as a clause."""
    oom_kills: Mapping[str, int] = field(default_factory=dict[str, int])
    """Kernel out-of-memory kills during the run: ``cgroup``, ``machine``."""
    kernel_kill: KernelKill | None = None
    """Of a process of the run, by the kernel's log."""
    nodes: int = 1
    free_bytes: int | None = None
    """Left on the disk of the run folder: a full one keeps the error itself out of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A kind with its sentence and what it was read from."""

    kind: Kind
    sentence: str
    phase: str | None = None
    shortage: Shortage | None = None
    failure: Failure | None = None
    raised: Raised | None = None
    signal: int | None = None
    rank: int | None = None
    """Of the process that a signal ended, where a launcher tells it."""


def judge(
    exit_code: int | None,
    signal: int | None,
    evidence: LogEvidence,
    log_tail: str,
    metrics: Metrics,
    predicted: Predicted,
    around: Circumstances,
) -> Verdict:
    """The first rule that has something to say decides; see docs/run-folder.md for their meaning.

    Args:
        exit_code: Of the command, None when nobody saw it or a signal ended it.
        signal: That ended the command.
        evidence: What the log says.
        log_tail: The log itself.
        metrics: Summary of metrics.jsonl.
        predicted: What the plan said.
        around: What the watcher knows beside.
    """
    if around.stop and not (exit_code == 0 and metrics.ended):
        return Verdict(kind="stopped", sentence=f"stopped {around.stop}{_at(metrics)}")
    finished = exit_code == 0 and (metrics.ended or not metrics.started or not evidence.own)
    if finished or ((around.lost or around.hung) and metrics.ended):
        return _done(metrics, predicted, around)
    # What raises exits by itself; what a signal ended may have logged an error long before.
    by_signal = signal is not None or (evidence.exit_code or 0) < 0
    failures = evidence.at_the_end if by_signal or around.lost or around.hung else evidence.own
    return (
        _out_of_memory(failures, metrics, predicted)
        or _host_killed(signal, evidence, metrics, around)
        or _disk_full(failures, log_tail)
        or _beyond_table(failures, evidence, metrics)
        or _raised(failures, metrics)
        or _silent(metrics, around)
        or _from_signs(evidence, metrics)
        or _by_signal(signal, evidence, metrics)
        or _lost(evidence, metrics, around)
        or _full_by_size(around, metrics)
        or _by_exit_code(exit_code, log_tail)
    )


def _done(metrics: Metrics, predicted: Predicted, around: Circumstances) -> Verdict:
    steps = metrics.last_step or 0
    parts = [f"finished after {steps} step{'' if steps == 1 else 's'}"]
    if not metrics.started:
        parts = ["the command ended without an error and recorded no training"]
    if seen := metrics.memory_bytes:
        text = f"peak {format_bytes(seen)}"
        if predicted.allocated_bytes:
            text += f" (predicted {format_bytes(predicted.allocated_bytes)})"
        parts.append(text)
    if metrics.step_s:
        text = f"{format_seconds(metrics.step_s)} a step"
        if predicted.step_s:
            text += f" (predicted {format_seconds(predicted.step_s)})"
        parts.append(text)
    if metrics.first_bad_step is not None:
        parts.append(f"the loss was not a number from step {metrics.first_bad_step} on")
    if around.lost:
        parts.append(around.lost)
    if around.hung:
        parts.append("it did not exit by itself and was ended")
    return Verdict(kind="done", sentence=", ".join(parts))


def _out_of_memory(failures: Sequence[Failure], metrics: Metrics, predicted: Predicted) -> Verdict | None:
    found = next(((f, r) for f in failures for r in f.chain if r.is_short_of_memory), None)
    if found is None:
        return None
    failure, raised = found
    shortage = read_shortage(raised.text)
    phase = guess_phase(raised.frames) or (None if metrics.started else "load")
    places = {"gpu": "", "host": "host ", "shared_memory": "shared "}
    text = f"out of {places[shortage.where]}memory{f' in {phase}' if phase else ''}"
    text += "" if phase == "load" else _at(metrics, 1)
    text += f" on rank {failure.rank}" if failure.rank is not None else ""
    if shortage.asked_bytes is not None:
        text += f": asked for {format_bytes(shortage.asked_bytes)}"
    if shortage.free_bytes is not None and shortage.capacity_bytes is not None:
        free, whole = format_bytes(shortage.free_bytes), format_bytes(shortage.capacity_bytes)
        text += f" with {free} of {whole} free"
    if shortage.others_bytes:
        text += f", {format_bytes(shortage.others_bytes)} of it held by other processes"
    if shortage.where == "shared_memory":
        text += ": /dev/shm is too small for the data loader's workers"
    elif predicted.allocated_bytes:
        at = f" in {predicted.peak_phase}" if predicted.peak_phase else ""
        text += f"; the plan predicted {format_bytes(predicted.allocated_bytes)} at its peak{at}"
    return Verdict(
        kind="out_of_memory", sentence=text, phase=phase, shortage=shortage, failure=failure,
        raised=raised,
    )  # fmt: skip


def _host_killed(signal: int | None, evidence: LogEvidence, metrics: Metrics, around: Circumstances) -> Verdict | None:
    """SIGKILL with the kernel's own record of an out-of-memory kill, or the scheduler's."""
    worker = any(_WORKER_KILLED.search(failure.last.text) for failure in evidence.own)
    by_kill = signals.SIGKILL in (signal, -(evidence.exit_code or 0)) or worker or bool(around.lost)
    if "host_memory" in evidence.signs:
        proof = "the scheduler reports it"
    elif by_kill and (kill := around.kernel_kill) is not None:
        proof = f"the kernel's log: {kill.name} held {format_bytes(kill.resident_bytes)}"
    elif by_kill and (count := around.oom_kills.get("cgroup", 0)):
        proof = f"{count} out-of-memory kill{'s' if count > 1 else ''} in its control group"
    elif by_kill and (count := around.oom_kills.get("machine", 0)):
        proof = f"{count} out-of-memory kill{'s' if count > 1 else ''} on this machine meanwhile"
    else:
        return None
    phase = None if metrics.started else "load"
    during = "" if metrics.last_step else " before the first step"
    return Verdict(
        kind="out_of_memory",
        sentence=f"the kernel killed the training{during}{_at(metrics)}: the host ran out of memory ({proof})",
        phase=phase,
        shortage=Shortage(where="host"),
        signal=None if around.lost or worker else signals.SIGKILL,
    )


def _disk_full(failures: Sequence[Failure], log_tail: str) -> Verdict | None:
    full = re.compile(
        r"No space left on device|Disk quota exceeded|os error 28|\[Errno (?:27|28|122)\]"
        r"|PytorchStreamWriter failed writing file"
    )
    for failure in failures:
        for raised in failure.chain:
            if full.search(raised.text):
                return Verdict(
                    kind="disk_full",
                    sentence=f"the disk is full: {shorten(raised.message)}",
                    phase=guess_phase(raised.frames),
                    failure=failure,
                    raised=raised,
                )
    if not failures and (line := full.search(log_tail[-20_000:])):
        return Verdict(kind="disk_full", sentence=f"the disk is full: {line.group(0)}")
    return None


def _full_by_size(around: Circumstances, metrics: Metrics) -> Verdict | None:
    if around.free_bytes is None or around.free_bytes >= FULL_BYTES:
        return None
    free = format_bytes(around.free_bytes)
    text = f"the disk of the run folder is full ({free} left){_at(metrics)}"
    return Verdict(kind="disk_full", sentence=text)


def _raised(failures: Sequence[Failure], metrics: Metrics) -> Verdict | None:
    """The first exception that is nobody else's echo."""
    for failure in failures:
        raised = failure.last
        if re.search(r"Timed out waiting|collective operation timeout", raised.text):
            continue
        if raised.kind in {"KeyboardInterrupt", "SystemExit"}:
            continue
        place = raised.place
        kind: Kind = _kind_of(raised, metrics)
        text = _data_words(failure) if kind == "data_error" else shorten(raised.text)
        words = {"configuration_error": "configuration error", "data_error": "data error"}
        text = f"{words.get(kind, 'failed')}{_at(metrics)}: {text}{f' ({place})' if place else ''}"
        return Verdict(
            kind=kind,
            sentence=text,
            phase=guess_phase(raised.frames),
            failure=failure,
            raised=raised,
        )
    return None


def _beyond_table(failures: Sequence[Failure], evidence: LogEvidence, metrics: Metrics) -> Verdict | None:
    """On a card a token id or a label that is too large is an assertion of a kernel, met by whatever came next."""
    failure = next((failure for failure in failures if failure.last.is_device_assert), None)
    if failure is None or "index" not in evidence.signs:
        return None
    what = BEYOND_VOCABULARY if "srcIndex" in evidence.signs["index"] else "a label is beyond the number of classes"
    return Verdict(
        kind="data_error", sentence=f"data error{_at(metrics)}: {what}", failure=failure, raised=failure.last
    )


def _kind_of(raised: Raised, metrics: Metrics) -> Kind:
    if raised.is_about_data:
        return "data_error"
    if raised.is_about_setup:
        return "configuration_error"
    return "failed" if raised.is_in_training or metrics.rows else "configuration_error"


def _data_words(failure: Failure) -> str:
    """The exception, said for one who knows the data and not datasets."""
    raised = failure.last
    if raised.kind == "KeyError":
        return f"the rows have no column {raised.message}"
    if raised.is_beyond_vocabulary:
        return BEYOND_VOCABULARY
    if raised.kind == "StopIteration":
        return "the data set is empty"
    if raised.kind.endswith("DatasetGenerationError") and len(failure.chain) > 1:
        return shorten(failure.chain[-2].text)  # the last one says only that something failed
    return shorten(raised.text)


def _silent(metrics: Metrics, around: Circumstances) -> Verdict | None:
    if around.hung is None:
        return None
    before = "" if metrics.last_step else " before the first step"
    return Verdict(kind="hung", sentence=f"hung{before}{_at(metrics)}: {around.hung}; it was ended")


def _from_signs(evidence: LogEvidence, metrics: Metrics) -> Verdict | None:
    """What schedulers, drivers and watchdogs wrote into the log."""
    signs = evidence.signs
    if "time_limit" in signs:
        return Verdict(kind="killed", sentence=f"ended by the scheduler's time limit{_at(metrics)}")
    if "preempted" in signs:
        return Verdict(kind="killed", sentence=f"preempted by the scheduler{_at(metrics)}")
    if "cancelled" in signs:
        return Verdict(kind="killed", sentence=f"cancelled in the scheduler{_at(metrics)}")
    if "node" in signs:
        return Verdict(kind="node_lost", sentence=f"a node or card failed: {shorten(signs['node'])}")
    if "hung" in signs:
        failure = next(iter(evidence.own), None)
        return Verdict(
            kind="hung",
            sentence=f"hung{_at(metrics)}: a rank waited for the others until the time-out: {shorten(signs['hung'])}",
            failure=failure,
            raised=failure.last if failure else None,
        )
    return None


def _by_signal(signal: int | None, evidence: LogEvidence, metrics: Metrics) -> Verdict | None:
    inner = -(evidence.exit_code or 0)
    number = inner if inner > 0 else signal
    if number is None:
        return None
    name = signal_name(number)
    rank = evidence.exit_rank if inner > 0 else None
    who = "" if rank is None else f"rank {rank} "
    crashes = {signals.SIGSEGV, signals.SIGABRT, signals.SIGBUS, signals.SIGFPE, signals.SIGILL}
    if number in crashes:
        hint = ": /dev/shm or the disk may be full" if number == signals.SIGBUS else ""
        text = f"{who}crashed with {name}{_at(metrics)}{hint}"
        return Verdict(kind="failed", sentence=text, signal=number, rank=rank)
    hint = ", with no out-of-memory kill on record" if number == signals.SIGKILL else ""
    text = f"{who}{'was ' if who else ''}ended from outside by {name}{_at(metrics)}{hint}"
    return Verdict(kind="killed", sentence=text, signal=number, rank=rank)


def _lost(evidence: LogEvidence, metrics: Metrics, around: Circumstances) -> Verdict | None:
    """Only other processes' absence is on record; or nobody saw the end at all."""
    peers = [f for f in evidence.failures if f.last.is_lost_peer]
    if around.lost and not peers:
        return Verdict(kind="killed", sentence=f"killed{_at(metrics)}: {around.lost}")
    if not peers:
        return None
    failure = peers[0]
    several = around.nodes > 1
    who = "another node" if several else "another process"
    return Verdict(
        kind="node_lost" if several else "failed",
        sentence=f"lost {who}{_at(metrics)}: {shorten(failure.last.text)}",
        failure=failure,
        raised=failure.last,
    )


def _by_exit_code(exit_code: int | None, log_tail: str) -> Verdict:
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    last = shorten(lines[-1]) if lines else "the log is empty"
    if exit_code in (126, 127) or (exit_code == 2 and "error:" in last):
        return Verdict(kind="configuration_error", sentence=f"configuration error: {last}")
    code = "an unknown exit code" if exit_code is None else f"exit code {exit_code}"
    return Verdict(kind="failed", sentence=f"failed with {code}: {last}")


def _at(metrics: Metrics, ahead: int = 0) -> str:
    if metrics.last_step is None:
        return " at step 1" if ahead and metrics.started else ""
    return f" at step {metrics.last_step + ahead}" if ahead else f" after step {metrics.last_step}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shorten(text: str, limit: int = 240) -> str:
    """One line without its full stop, cut to ``limit`` characters."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
