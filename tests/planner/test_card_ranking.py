"""Machines that could be had: each as its own plan says, in order of time, and of cost by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.advice.card_ranking import Offer, rank_offers
from planner.planning import make_plan
from profiles.cards import find_card, load_cards
from profiles.releases import newest_known
from tests.planner.replay import inputs_of, named_machine

JOB: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "machine": "1xH100-80GB", "seq_len": 4096, "global_batch": 8}
STACK = dict(newest_known())
PRICES = {"H100-80GB": 2.49, "A100-80GB": 1.29, "L40S": 0.99}


def ranked(offers: list[Offer], **changes: Any) -> dict[str, dict[str, Any]]:
    document = rank_offers(inputs_of({**JOB, **changes}, stack=STACK), offers)
    assert document["schema"] == "trlfit.cards/1"
    return {f"{e['machine']}x{e['nodes']}": e for e in document["machines"]}


def offers(counts: tuple[int, ...] = (1, 2, 8), **prices: float) -> list[Offer]:
    return [
        Offer(profile=find_card(card), count=count, price=price)
        for card, price in {**PRICES, **prices}.items()
        for count in counts
    ]


FOUND = ranked(offers())


def test_each_machine_is_what_its_own_plan_says() -> None:
    assert len(FOUND) == 9
    for entry in FOUND.values():
        alone = make_plan(inputs_of({**JOB, "machine": entry["machine"]}, stack=STACK)).document
        best = alone["best"] or alone["near_misses"][0]
        assert entry["fits"] == (alone["best"] is not None)
        assert entry["choice"] == best["choice"]
        assert entry["device_bytes"] == best["memory"]["device_bytes"]
        assert entry["step_s"] == best["time"]["step_s"]
        assert entry["capacity_bytes"] == best["memory"]["capacity_bytes"]


def test_what_fits_comes_first_and_the_fastest_of_it() -> None:
    entries = list(FOUND.values())
    fitting = [entry for entry in entries if entry["fits"]]
    assert entries[: len(fitting)] == fitting
    assert [entry["rank_by_time"] for entry in fitting] == list(range(1, len(fitting) + 1))
    steps = [entry["step_s"] for entry in fitting]
    assert steps == sorted(steps)
    short = [entry["short_bytes"] for entry in entries[len(fitting) :]]
    assert short == sorted(short)
    assert short and all(size > 0 for size in short)
    assert all(entry["rank_by_time"] is None for entry in entries[len(fitting) :])


def test_cost_by_hand() -> None:
    """Eight cards at 2.49 are 19.92 an hour; a step costs its seconds of that, a million tokens 1e6 / 32,768 steps."""
    entry = FOUND["8xH100-80GBx1"]
    assert entry["cost_per_hour"] == pytest.approx(19.92)
    assert entry["cost_per_step"] == pytest.approx(19.92 / 3600 * entry["step_s"], rel=1e-4)
    assert entry["cost_per_million_tokens"] == pytest.approx(entry["cost_per_step"] * 1e6 / 32_768, rel=1e-4)
    priced = sorted((e for e in FOUND.values() if e["fits"]), key=lambda e: float(e["cost_per_step"]))
    assert [entry["rank_by_cost"] for entry in priced] == list(range(1, len(priced) + 1))


def test_a_price_that_doubles_doubles_the_cost_and_may_change_its_rank() -> None:
    dearer = ranked(offers(**{"H100-80GB": 249.0}))
    entry = dearer["8xH100-80GBx1"]
    assert entry["cost_per_step"] == pytest.approx(100 * FOUND["8xH100-80GBx1"]["cost_per_step"], rel=1e-4)
    fitting = [e for e in dearer.values() if e["fits"]]
    assert max(e["rank_by_cost"] for e in fitting if e["card"] != "H100-80GB") < entry["rank_by_cost"]
    assert entry["rank_by_time"] == FOUND["8xH100-80GBx1"]["rank_by_time"] == 1


def test_without_a_price_there_is_no_cost() -> None:
    found = ranked(
        [Offer(profile=find_card("H100-80GB"), count=8), Offer(profile=find_card("L40S"), count=8, price=1.0)]
    )
    assert found["8xH100-80GBx1"]["cost_per_hour"] is None
    assert found["8xH100-80GBx1"]["rank_by_cost"] is None
    assert found["8xL40Sx1"]["rank_by_cost"] == 1


def test_nodes_are_paid_for() -> None:
    found = ranked([Offer(profile=find_card("A100-40GB"), count=8, nodes=2, price=1.0)], global_batch=16)
    (entry,) = found.values()
    assert entry["cost_per_hour"] == 16
    assert entry["num_gpus"] <= 16


def test_pins_that_a_machine_cannot_keep_are_said() -> None:
    found = ranked(offers(counts=(1, 8)), pins={"dp_shard": 8, "sharding": "fsdp"})
    assert "dp_shard=8" in found["1xH100-80GBx1"]["refused"]
    assert found["1xH100-80GBx1"]["fits"] is False
    assert found["8xH100-80GBx1"]["refused"] is None
    # It lacks no bytes, and comes after what does.
    assert list(found)[-3:] == [name for name in found if name.startswith("1x")]


def test_every_card_of_the_table_has_an_answer() -> None:
    found = ranked([Offer(profile=card, count=1) for card in load_cards()], model="Qwen/Qwen3-0.6B", seq_len=512)
    assert len(found) == len(load_cards())
    assert all(entry["fits"] or entry["short_bytes"] or entry["refused"] for entry in found.values())
    machine = named_machine("1xRTX4090")
    assert found["1xRTX4090x1"]["capacity_bytes"] == machine.cards[0].total_bytes


def test_of_the_longest_goal_each_machine_has_its_own_length() -> None:
    """As its own plan says; more memory holds more tokens, and the longest comes first."""
    asked = [Offer(profile=find_card(card), count=8, price=1.0) for card in ("A100-40GB", "H100-80GB", "RTX4090")]
    found = ranked(asked, goal="longest", global_batch=1)
    for entry in found.values():
        plan = make_plan(
            inputs_of({**JOB, "machine": entry["machine"], "goal": "longest", "global_batch": 1}, stack=STACK)
        )
        assert entry["seq_len"] == plan.document["longest"]
        assert plan.best is not None and entry["choice"] == plan.best.choice.to_json()
    lengths = [entry["seq_len"] for entry in found.values()]
    assert next(iter(found)) == "8xH100-80GBx1"
    assert lengths == sorted(lengths, reverse=True)
    # Ranks compare the tokens of a second, not steps of different lengths.
    pace = sorted(found.values(), key=lambda entry: -entry["tokens_per_s"])
    assert [entry["rank_by_time"] for entry in pace] == [1, 2, 3]
    cost = sorted(found.values(), key=lambda entry: float(entry["cost_per_million_tokens"]))
    assert [entry["rank_by_cost"] for entry in cost] == [1, 2, 3]
