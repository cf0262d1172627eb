"""Card ranking: one job on many machines that could be had, by time and, given prices, by cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from planner.contradictions import check_inputs
from planner.named_machine import named_machine
from planner.pins import PinError
from planner.plan_json import round_significant
from planner.problem import PlanInput, with_job
from planner.search.longest import settled
from planner.search.methods import search_job
from planner.search.shortage import short_bytes
from planner.time.run_cost import run_length
from profiles.cards import CardProfile

CARDS_SCHEMA = "trlfit.cards/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Cards that could be had."""

    profile: CardProfile
    count: int
    """Cards of one node."""
    nodes: int = 1
    price: float | None = None
    """Of one card for one hour, in whatever money; None when not given."""

    @property
    def num_cards(self) -> int:
        """Over all nodes."""
        return self.count * self.nodes


def rank_offers(inputs: PlanInput, offers: Sequence[Offer]) -> dict[str, Any]:
    """The `trlfit.cards/1` document: each offer with the plan it allows, those that fit first, fastest first.

    Of goal ``longest`` each offer is planned at its own length, and the longest comes first; ranks by time and cost are
    then those of a token. A price is paid for every card of the offer, used or not. Between equal steps fewer cards
    come first.

    Raises:
        planner.memory.adapters.TargetError: LoRA targets that the model does not have.
    """
    found = sorted((_judged(inputs, offer) for offer in offers), key=_by_time)
    fitting = [entry for entry in found if entry["fits"]]
    priced = [entry for entry in fitting if entry["cost_per_step"] is not None]
    for place, entry in enumerate(sorted(priced, key=lambda entry: entry["cost_per_step"] / entry["seq_len"]), 1):
        entry["rank_by_cost"] = place
    for place, entry in enumerate(sorted(fitting, key=_pace), 1):
        entry["rank_by_time"] = place
    return {
        "schema": CARDS_SCHEMA,
        "job": inputs.job.model_dump(mode="json", exclude={"machine", "nodes"}),
        "stack": inputs.stack.model_dump(mode="json"),
        "machines": found,
    }


def _by_time(entry: Mapping[str, Any]) -> tuple[bool, int, float, int, str]:
    """The longest sequence first, where lengths differ; what does not fit follows, closest first."""
    fits = entry["fits"]
    size = entry["step_s"] if fits else entry["short_bytes"]
    tokens = entry["seq_len"] if fits else 0
    return (not fits, -tokens, inf if size is None else size, entry["count"] * entry["nodes"], entry["card"])


def _pace(entry: Mapping[str, Any]) -> float:
    """Seconds of a step for each token of a sequence."""
    return inf if entry["step_s"] is None else entry["step_s"] / entry["seq_len"]


def _judged(inputs: PlanInput, offer: Offer) -> dict[str, Any]:
    machine = named_machine(offer.profile, offer.count, offer.nodes)
    asked = replace(with_job(inputs, machine=machine.spec, nodes=offer.nodes), machine=machine, profile=offer.profile)
    entry: dict[str, Any] = {
        "machine": machine.spec,
        "card": offer.profile.id,
        "count": offer.count,
        "nodes": offer.nodes,
        "rank_by_time": None,
        "rank_by_cost": None,
        "seq_len": inputs.job.seq_len,
        "fits": False,
        "refused": None,
        "short_bytes": None,
        "num_gpus": None,
        "device_bytes": None,
        "capacity_bytes": offer.profile.nvml_bytes,
        "host_bytes": None,
        "phase": None,
        "step_s": None,
        "tokens_per_s": None,
        "cost_per_hour": None if offer.price is None else round_significant(offer.price * offer.num_cards),
        "cost_per_step": None,
        "cost_per_million_tokens": None,
        "steps": None,
        "finish_s": None,
        "run_cost": None,
        "alters": None,
        "choice": None,
    }
    return {**entry, **dict(_outcome(asked, entry["cost_per_hour"]))}


def _outcome(asked: PlanInput, per_hour: float | None) -> Iterator[tuple[str, Any]]:
    try:
        check_inputs(asked)
    except PinError as error:
        yield "refused", str(error)
        return
    asked = settled(asked)
    yield "seq_len", asked.job.seq_len
    found = search_job(asked, asked.job.goal)
    candidate = found.closest
    if candidate is None:
        yield "refused", found.refusal
        return
    problem = found.problem_of(candidate)
    memory = problem.judge.memory_of(candidate)
    yield "fits", candidate.fits
    yield "short_bytes", short_bytes(problem, candidate)
    yield "num_gpus", candidate.choice.num_gpus
    yield "device_bytes", memory.device_bytes
    yield "phase", memory.peak_phase
    yield "host_bytes", memory.host.peak_bytes
    yield "alters", candidate.alters
    yield "choice", candidate.choice.to_json()
    if candidate.time is None:
        return
    yield "step_s", round_significant(candidate.step_s)
    yield "tokens_per_s", round_significant(candidate.time.tokens_per_s)
    steps = run_length(asked.job, asked.data_rows).steps
    yield "steps", steps
    if steps is not None:
        yield "finish_s", round_significant(steps * candidate.step_s)
    if per_hour is not None:
        per_step = per_hour * candidate.step_s / 3600
        yield "cost_per_step", round_significant(per_step)
        yield "run_cost", round_significant(steps * per_step) if steps is not None else None
        yield "cost_per_million_tokens", round_significant(per_hour / 3600 / candidate.time.tokens_per_s * 1e6)
