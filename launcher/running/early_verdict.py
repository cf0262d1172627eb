"""The early verdict: after the first steps, whether a run will stay on its card when its longest rows come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.ending.run_metrics import Predicted, as_integer, as_mapping, as_number
from planner.units import format_bytes, format_gib

FIRST_STEPS = 3
"""Rows before a verdict: the second step is the first with the optimizer's states from its beginning."""
GROWS = frozenset({"saved_activations", "recompute"})
"""Parts of a phase that grow with the tokens of a micro-batch; others stay."""
PAIRED = ("dpo", "reward")
"""Trainers whose examples are two sequences."""

Kind = Literal["holds", "over", "unsure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyVerdict:
    """Whether the run will hold."""

    kind: Kind
    """``unsure``: it holds unless longer rows come than the looked-at data have."""
    sentence: str
    expected_bytes: int
    """The peak that is expected at the longest micro-batch, as ``peak_bytes`` is counted."""
    room_bytes: int | None
    """What the card has room for, counted the same way; None when that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run has shown so far."""

    rows: int
    epoch: float | None
    peak_bytes: int
    """Peak over ranks: allocated on a card, growth of resident memory on a CPU."""
    reserved_bytes: int | None
    device_bytes: int | None
    """All that is in use on the card."""
    batch_tokens: int | None
    """The largest micro-batch of a rank, padding included; None where nothing counts them."""
    resident: bool = False
    """``peak_bytes`` is growth of resident memory, for want of a card: libraries and kernels' buffers are in it."""


class BatchMemory:
    """The plan's peak as a function of the tokens of a micro-batch.

    Read off its phases: saved activations, recompute and whole logits grow in proportion to the tokens; the rest stays.
    At the planned length that is the plan itself; below, an affine stand-in for the model, which spares a watcher the
    planner.
    """

    def __init__(self, plan: Mapping[str, Any]) -> None:
        """Read a plan.json; whatever it does not say leaves the answers at None."""
        job, best = as_mapping(plan.get("job")), as_mapping(plan.get("best"))
        choice, memory = as_mapping(best.get("choice")), as_mapping(best.get("memory"))
        self.predicted = Predicted.from_plan(plan)
        self.capacity_bytes = as_integer(memory.get("capacity_bytes"))
        self.seq_len = as_integer(job.get("seq_len"))
        self.packing = choice.get("packing") is True
        self.rows = (as_integer(choice.get("micro_batch")) or 1) * (2 if job.get("trainer") in PAIRED else 1)
        self._ranks = (as_integer(choice.get("cp")) or 1) * (as_integer(choice.get("sp")) or 1)
        grows = GROWS | {"loss"} if choice.get("loss_path") == "full_logits" else GROWS
        self._phases: list[tuple[int, int]] = []
        for phase in memory.get("phases") or ():
            parts = {str(k): as_integer(v) or 0 for k, v in as_mapping(as_mapping(phase).get("parts")).items()}
            growing = sum(size for part, size in parts.items() if part in grows)
            resting = sum(size for part, size in parts.items() if part not in grows | {"context", "slack"})
            self._phases.append((resting, growing))

    def tokens(self, length: int) -> int:
        """Tokens of a rank's micro-batch whose longest row has ``length``."""
        return self.rows * -(-length // self._ranks)

    def length(self, tokens: int) -> int:
        """The inverse of ``tokens``, for rows that fill a whole micro-batch."""
        return tokens * self._ranks // self.rows

    def at(self, tokens: int) -> int | None:
        """Bytes of tensors that the plan expects at the peak with micro-batches of ``tokens``."""
        if not self._phases or not self.seq_len:
            return None
        share = tokens / self.tokens(self.seq_len)
        return max(int(resting + share * growing) for resting, growing in self._phases)

    def room(self, seen: Seen) -> int | None:
        """What tensors may take on the card: beside context, other processes and what the allocator cannot use."""
        if self.capacity_bytes is None:
            return None
        predicted = self.predicted
        reserved, allocated = predicted.reserved_bytes or 0, predicted.allocated_bytes or 0
        beside = max(0, (predicted.device_bytes or 0) - reserved)
        if seen.device_bytes and seen.reserved_bytes:
            beside = max(0, seen.device_bytes - seen.reserved_bytes)
        slack = reserved / allocated if allocated and reserved else 1.0
        return int((self.capacity_bytes - beside) / max(1.0, slack))


def early_verdict(batch: BatchMemory, data: Mapping[str, Any] | None, seen: Seen) -> EarlyVerdict | None:
    """Hold the first steps against what will come; None before there is enough to say.

    Args:
        batch: the plan's memory by tokens.
        data: data.json, None where the data were not looked at.
        seen: what the run has shown.
    """
    predicted = batch.predicted.allocated_bytes
    if seen.rows < FIRST_STEPS or not seen.peak_bytes or not predicted:
        return None
    longest, certain = _longest(batch, data, seen)
    now = None if seen.batch_tokens is None else batch.at(seen.batch_tokens)

    def expected(length: int | None) -> int:
        then = None if length is None else batch.at(batch.tokens(length))
        if now is None or then is None or then <= now:
            return seen.peak_bytes
        # What is larger than predicted now grows by as much more.
        return seen.peak_bytes + round((then - now) * max(1.0, seen.peak_bytes / now))

    sure, most, room = expected(certain), expected(longest), batch.room(seen)
    head = f"peak {format_gib(seen.peak_bytes)} of {format_gib(predicted)} GiB predicted"
    if seen.resident:
        grown, tensors = format_bytes(seen.peak_bytes), format_bytes(predicted)
        head = f"resident memory grew by {grown} ({tensors} of tensors predicted, the rest is libraries)"
    if room is None:
        return EarlyVerdict(
            kind="unsure", sentence=f"{head}; the card's size is not known", expected_bytes=most, room_bytes=None
        )
    if sure > room:
        return EarlyVerdict(
            kind="over", sentence=_over(head, seen, batch, certain, sure, room), expected_bytes=sure, room_bytes=room
        )
    if most > room:
        words = (
            f"{head}, holds so far; should a row of {longest:,} tokens come, about {format_bytes(most)} are needed,"
            f" and {format_bytes(room)} is there"
        )
        return EarlyVerdict(kind="unsure", sentence=words, expected_bytes=most, room_bytes=room)
    longer = f": {format_bytes(most)} when its longest rows come" if most > 1.01 * seen.peak_bytes else ""
    return EarlyVerdict(kind="holds", sentence=f"{head}, will hold{longer}", expected_bytes=most, room_bytes=room)


def _over(head: str, seen: Seen, batch: BatchMemory, length: int | None, need: int, room: int) -> str:
    there = f"about {format_bytes(need)} are needed, and {format_bytes(room)} is there"
    if length is None or seen.batch_tokens is None or batch.tokens(length) <= seen.batch_tokens:
        return f"{head}, heading over: {there}"
    return (
        f"{head}, heading over in epoch {int(seen.epoch or 0) + 1}: rows of {length:,} tokens come (the longest so far"
        f" {batch.length(seen.batch_tokens):,}), for which {there}"
    )


def _longest(batch: BatchMemory, data: Mapping[str, Any] | None, seen: Seen) -> tuple[int | None, int | None]:
    """(longest row that may come, longest that certainly comes), in tokens."""
    if batch.seq_len is None:
        return None, None
    if seen.epoch is not None and seen.epoch >= 1:
        return None, None  # every row has been there
    if batch.packing:
        return batch.seq_len, batch.seq_len
    found = as_mapping(data)
    longest, sampled = as_integer(found.get("tokens_max")), as_integer(found.get("sampled_rows"))
    if longest is None:
        return batch.seq_len, None
    certain = min(longest, batch.seq_len)
    whole = as_number(found.get("num_rows"))
    return (certain if whole is not None and sampled is not None and sampled >= whole else batch.seq_len), certain
