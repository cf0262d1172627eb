"""How a run ended and how its memory and time compare with the plan: from exit, log and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from signal import NSIG
from typing import Any, Literal

from launcher.ending.judgement import KINDS, Circumstances, Kind, judge, shorten, signal_name
from launcher.ending.log_evidence import Shortage, read_evidence
from launcher.ending.run_metrics import Metrics, Predicted

OUTCOME_SCHEMA = "trlfit.outcome/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """outcome.json; docs/run-folder.md explains each field."""

    kind: Kind
    sentence: str
    """For people: one line, no full stop."""
    exit_code: int | None = None
    signal: str | None = None
    phase: str | None = None
    shortage: Shortage | None = None
    exception: str | None = None
    where: str | None = None
    rank: int | None = None
    predicted: Predicted = field(default_factory=Predicted)
    seen: Metrics = field(default_factory=Metrics)
    memory_error: float | None = None
    """Seen over predicted, less one; only after two steps, when every phase has run."""
    step_error: float | None = None
    run_id: str | None = None
    by: Literal["supervisor", "guard", "reader"] = "reader"
    started_at: str | None = None
    ended_at: str | None = None
    duration_s: float | None = None
    ended_processes: int = 0
    """Processes that outlived the command and were ended."""
    left_processes: tuple[int, ...] = ()
    """Pids that could not be ended."""
    note: str | None = None
    """Why an automatic retry that was asked for did not follow."""

    @property
    def errors(self) -> dict[str, float]:
        """Seen over predicted, less one, of every number that both have; memory as torch and NVML count it."""
        seen, predicted = self.seen, self.predicted
        pairs = {
            "allocated": (seen.allocated_bytes, predicted.allocated_bytes),
            "reserved": (seen.reserved_bytes, predicted.reserved_bytes),
            "device": (seen.device_bytes, predicted.device_bytes),
            "resident": (None if seen.allocated_bytes else seen.rss_growth_bytes, predicted.allocated_bytes),
            "step": (seen.step_s, predicted.step_s),
        }
        found = {name: _error(*pair, seen) for name, pair in pairs.items()}
        return {name: error for name, error in found.items() if error is not None}

    def to_json(self) -> dict[str, Any]:
        """The content of outcome.json."""
        return {
            "schema": OUTCOME_SCHEMA,
            **asdict(self),
            "seen": self.seen.to_json(),
            "left_processes": list(self.left_processes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Outcome | None:
        """The inverse of ``to_json``; None for anything that is not an outcome."""
        values = {key: data[key] for key in cls.__slots__ if key in data} if data else {}
        try:
            values["predicted"] = Predicted(**values.get("predicted", {}))
            values["seen"] = Metrics.from_json(values.get("seen", {}))
            values["left_processes"] = tuple(values.get("left_processes", ()))
            if values.get("shortage"):
                values["shortage"] = Shortage(**values["shortage"])
            return cls(**values) if values.get("kind") in KINDS else None
        except TypeError:
            return None


def classify(
    exit_code: int | None,
    signal: int | None,
    log_tail: str,
    metrics: Metrics,
    predicted: Predicted,
    around: Circumstances | None = None,
) -> Outcome:
    """Judge an end.

    Args:
        exit_code: Of ``bash command.sh``; None when a signal ended bash or nobody saw the exit.
        signal: The signal that ended bash, or None.
        log_tail: The end of log.txt.
        metrics: Summary of metrics.jsonl.
        predicted: What the plan said.
        around: What the watcher knows beside.

    Returns:
        The outcome without times and processes, which the watcher fills in.
    """
    around = around or Circumstances()
    if exit_code is not None and 128 < exit_code < 128 + NSIG:
        signal = exit_code - 128  # bash reports a child that died of a signal this way
    evidence = read_evidence(log_tail)
    verdict = judge(exit_code, signal, evidence, log_tail, metrics, predicted, around)
    signal, raised = verdict.signal or signal, verdict.raised
    return Outcome(
        kind=verdict.kind,
        sentence=verdict.sentence,
        exit_code=exit_code,
        signal=signal_name(signal) if signal else None,
        phase=verdict.phase,
        shortage=verdict.shortage,
        exception=shorten(raised.text, 2000) if raised else None,
        where=raised.place if raised else None,
        rank=verdict.failure.rank if verdict.failure else verdict.rank,
        predicted=predicted,
        seen=metrics,
        memory_error=_error(metrics.memory_bytes, predicted.allocated_bytes, metrics),
        step_error=_error(metrics.step_s, predicted.step_s, metrics),
    )


def _error(seen: float | None, predicted: float | None, metrics: Metrics) -> float | None:
    if not seen or not predicted or (metrics.last_step or 0) < 2:
        return None
    return seen / predicted - 1
