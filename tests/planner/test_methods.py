"""A job that allows another method: searched as each method is alone, ranked as one, written as what was chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.advice.card_ranking import Offer, rank_offers
from planner.advice.changes import changes_that_fit
from planner.advice.comparison import compare
from planner.advice.old_plan import OldPlan, held_against
from planner.choice import Choice
from planner.ledger.one_choice import choose_one
from planner.plan import Plan
from planner.planning import PlanOutcome, RefusedJob, make_plan
from planner.problem import PlanInput, Problem, make_problem, with_job
from planner.rules import all_refusals, job_refusals
from planner.search.longest import longest
from planner.search.methods import methods_of, problems_of, search_job
from planner.search.search import Candidate, rank, search
from profiles.cards import find_card
from profiles.releases import newest_known
from tests.planner.replay import inputs_of
from tests.planner.test_search import GOALS, brute_force, key, random_problem

STACK = {**newest_known(), "bitsandbytes": "0.50.0"}
LITE: dict[str, Any] = {"model": "deepseek-ai/DeepSeek-V2-Lite", "machine": "1xH100-80GB", "global_batch": 8}
"""15.7 B parameters: 234 GiB at 16 bytes each, 29.3 GiB at two."""
SMALL: dict[str, Any] = {"model": "Qwen/Qwen3-0.6B", "machine": "1xH100-80GB", "global_batch": 8}
ORDER = ("nothing", "numerics", "method")


def inputs(job: dict[str, Any], *allow: str, stack: dict[str, str] | None = None, **changes: Any) -> PlanInput:
    return inputs_of({**job, "allow": list(allow), **changes}, stack=stack or STACK)


def plan(job: dict[str, Any], *allow: str, stack: dict[str, str] | None = None, **changes: Any) -> PlanOutcome:
    return make_plan(inputs(job, *allow, stack=stack, **changes))


def test_a_lighter_method_where_full_training_does_not_fit() -> None:
    assert plan(LITE, "numerics").document["best"] is None
    outcome = plan(LITE, "numerics", "method")
    assert {c.choice.method for c in outcome.result.fitting} == {"lora", "qlora"}
    document = outcome.document
    best = document["best"]
    assert best["fits"] and best["alters"] == "method"
    assert best["choice"]["method"] in ("lora", "qlora")
    assert document["candidates"][0] == best
    # What was asked for stays in the plan, as what does not fit.
    assert {c["choice"]["method"] for c in document["near_misses"]} == {"full"}
    assert document["job"]["method"] == "full"
    assert not {"lora", "qlora"} & {change["lever"] for change in document["changes"]}
    Plan.model_validate(document)


def test_a_lighter_method_where_full_training_is_refused() -> None:
    """The experts' kernel takes no fp32 weights: without bf16 there is no full training, and the job is none."""
    with pytest.raises(RefusedJob, match="choose weights bf16"):
        plan(LITE)
    document = plan(LITE, "method").document
    assert document["best"]["fits"] and document["best"]["alters"] == "method"
    assert document["near_misses"] and {c["alters"] for c in document["near_misses"]} == {"method"}


def test_a_candidate_is_described_by_its_own_method() -> None:
    """Weights as loaded: 15,706,484,224 in bf16 and adapters in fp32."""
    document = plan(LITE, "method").document
    lora = next(c for c in document["candidates"] if c["choice"]["method"] == "lora")
    adapters = document["architecture"]["parameters"]["trainable"]
    # Rank 16 on every linear layer but the head: 2.3 % of the model.
    assert adapters == document["architecture"]["parameters"]["adapters"] == 358_994_944
    load = next(phase for phase in lora["memory"]["phases"] if phase["name"] == "load")
    assert load["parts"]["weights"] == pytest.approx(15_706_484_224 * 2 + adapters * 4, rel=2e-3)
    assert set(lora["memory"]["roles"]) >= {"adapters", "frozen"}
    alone = make_plan(inputs(LITE, method="lora")).document["candidates"]
    same = next(c for c in alone if c["choice"] == lora["choice"])
    assert {**same, "alters": "method", "why": lora["why"]} == lora


def test_full_training_that_fits_comes_first_and_the_others_stay() -> None:
    outcome = plan(SMALL, "method")
    assert outcome.document["best"]["choice"] == plan(SMALL).document["best"]["choice"]
    assert outcome.document["best"]["alters"] == "nothing"
    groups = [(c.alters, c.choice.method) for c in outcome.result.fitting]
    assert set(groups) == {("nothing", "full"), ("method", "lora"), ("method", "qlora")}
    assert [ORDER.index(alters) for alters, _ in groups] == sorted(ORDER.index(alters) for alters, _ in groups)
    # All of them are in reach of a larger table.
    shown = make_plan(replace(inputs(SMALL, "method"), top=1000)).document["candidates"]
    assert {c["choice"]["method"] for c in shown} == {"full", "lora", "qlora"}


def union(asked: PlanInput) -> tuple[list[Candidate], list[Candidate]]:
    """(fitting, missing) of every method, each by brute force in a problem of its own."""
    fitting: list[Candidate] = []
    missing: list[Candidate] = []
    own = asked.job.method
    for method in {"full": ("full", "lora", "qlora"), "lora": ("lora", "qlora"), "qlora": ("qlora",)}[own]:
        p = make_problem(with_job(asked, method=method))
        if job_refusals(p.judge.rules):
            continue
        for found, judged in zip((fitting, missing), brute_force(p), strict=True):
            found += judged if method == own else [candidate._replace(alters="method") for candidate in judged]
    return fitting, missing


@pytest.mark.parametrize("block", range(6))
def test_same_candidates_and_best_as_brute_force_over_all_methods(block: int) -> None:
    for seed in range(210)[block * 5 :: 42]:
        p = random_problem(seed)
        asked = with_job(p.inputs, allow=[*p.inputs.job.allow, "method"])
        if job_refusals(p.judge.rules):
            continue
        fitting, missing = union(asked)
        for goal in GOALS:
            found = search_job(asked, goal)
            assert sorted(map(key, found.result.fitting)) == sorted(map(key, fitting)), seed
            expected = rank(fitting, goal)
            assert (found.best is None) == (not expected), seed
            if found.best is not None:
                first = expected[0]
                assert (found.best.choice, found.best.verdict, found.best.time) == (
                    first.choice,
                    first.verdict,
                    first.time,
                ), (seed, goal)
            if missing:
                closest = max(missing, key=lambda c: (-ORDER.index(c.alters), c.headroom_bytes))
                assert found.result.near_misses[0].headroom_bytes == closest.headroom_bytes, seed
            for candidate in (*found.result.fitting[:3], *found.result.near_misses[:3]):
                judged_by = found.problem_of(candidate)
                assert judged_by.inputs.job.method == candidate.choice.method
                assert not all_refusals(judged_by.judge.rules, candidate.choice)


def test_the_random_jobs_are_worth_asking() -> None:
    """Some are rescued by another method, and some do without."""
    own = rescued = 0
    for seed in range(0, 210, 5):
        p: Problem = random_problem(seed)
        if p.inputs.job.method != "full" or job_refusals(p.judge.rules):
            continue
        best = search_job(with_job(p.inputs, allow=["method"]), "fastest").best
        own += best is not None and best.alters == "nothing"
        rescued += best is not None and best.alters == "method"
    assert own >= 3
    assert rescued >= 2


@pytest.mark.parametrize("seed", range(0, 210, 15))
def test_without_leave_there_is_one_method(seed: int) -> None:
    p = random_problem(seed)
    (only,) = problems_of(p.inputs)
    assert only.options == p.options
    found = search_job(p.inputs, "fastest").result
    alone = search(p.judge, p.options, "fastest")
    if not job_refusals(p.judge.rules):
        assert (found.fitting, found.near_misses, found.judged) == (alone.fitting, alone.near_misses, alone.judged)
        assert found.rejected == alone.rejected


def test_the_methods_that_may_be_taken() -> None:
    def asked(method: str, *allow: str) -> tuple[str, ...]:
        return methods_of(inputs(SMALL, *allow, method=method).job)

    assert asked("full") == asked("full", "numerics") == ("full",)
    assert asked("full", "method") == ("full", "lora", "qlora")
    assert asked("lora", "method") == ("lora", "qlora")
    assert asked("qlora", "method") == ("qlora",)


def test_qlora_needs_bitsandbytes() -> None:
    outcome = plan(LITE, "method", stack=dict(newest_known()))
    assert {c.choice.method for c in outcome.result.fitting} == {"lora"}
    assert outcome.document["rejected"]["qlora-needs-bitsandbytes"]["choice"]["method"] == "qlora"


def test_a_method_that_the_job_cannot_have_is_left_out() -> None:
    """An adapter has no second model to synchronise: that refuses LoRA as a job, not the job."""
    job = {**SMALL, "trainer": "dpo", "trl": {"sync_ref_model": True}}
    assert [p.options.method for p in problems_of(inputs(job, "method"))] == ["full"]
    assert plan(job, "method").document["best"]["alters"] == "nothing"
    with pytest.raises(RefusedJob, match="no reference model to sync under lora"):
        plan(job, "method", method="lora")


def test_pins_that_a_method_cannot_keep_leave_it_without_candidates() -> None:
    """Nothing but full training trains in fp16 weights; and what pins rule out for all is an error as before."""
    pins = {"sharding": "zero3", "gpus": 2}
    outcome = plan(
        SMALL, "method", machine="2xH100-80GB", pins=pins, quantization="int8", stack={**STACK, "deepspeed": "0.19.8"}
    )
    assert {c.choice.method for c in outcome.result.fitting} == {"full", "lora"}
    with pytest.raises(RefusedJob, match="sharding none runs on one GPU"):
        plan(SMALL, "method", pins={"sharding": "none", "gpus": 2})


@pytest.mark.parametrize("goal", GOALS)
def test_goals_rank_what_fits(goal: str) -> None:
    outcome = plan(LITE, "method", goal=goal)
    fitting = outcome.result.fitting
    assert outcome.best is fitting[0]
    assert {c.alters for c in fitting} == {"method"}
    if goal == "headroom":
        # A base in four bits holds less than one in sixteen.
        assert outcome.best.choice.method == "qlora"
        assert outcome.best.headroom_bytes == max(c.headroom_bytes for c in fitting)
    else:
        assert outcome.best.step_s <= min(c.step_s for c in fitting) * 1.05


def test_between_equal_speeds_the_base_is_not_quantised() -> None:
    fitting = plan(LITE, "method").result.fitting
    lora, qlora = (next(c for c in fitting if c.choice.method == m) for m in ("lora", "qlora"))
    for share, first in ((1.04, "lora"), (1.06, "qlora")):
        assert qlora.time is not None
        slower = lora._replace(time=qlora.time._replace(step_s=share * qlora.step_s))
        assert rank([qlora, slower], "fastest")[0].choice.method == first


def test_the_longest_sequence_of_any_method() -> None:
    job = {**LITE, "goal": "longest", "global_batch": 1}
    alone = {m: longest(inputs(job, method=m))[0] for m in ("full", "lora", "qlora")}
    assert alone["full"] == 0 < alone["lora"]
    tokens, stairs = longest(inputs(job, "method"))
    assert tokens == max(alone.values())
    assert stairs[-1].candidate is not None and stairs[-1].candidate.alters == "method"
    document = plan(job, "method").document
    assert document["longest"] == document["job"]["seq_len"] == tokens
    assert document["best"]["fits"]
    Plan.model_validate(document)


def test_the_ledger_keeps_the_jobs_method() -> None:
    asked = inputs(SMALL, "method")
    assert choose_one(asked).candidate == choose_one(inputs(SMALL)).candidate
    long = {**SMALL, "goal": "longest", "global_batch": 1, "pins": {"recompute": "none"}}
    assert choose_one(inputs(long, "method")).problem.inputs.job.seq_len == longest(inputs(long))[0]


def test_more_cards_are_offered_as_they_would_be_planned() -> None:
    """72 B parameters: one card of 24 GB holds no method of it; what more of them hold is said with its method."""
    job = {**SMALL, "model": "Qwen/Qwen2.5-72B", "machine": "1xRTX4090"}
    changes = {change["lever"]: change for change in plan(job, "method", pins={"offload": []}).document["changes"]}
    assert not {"lora", "qlora"} & set(changes)
    more = changes["more GPUs"]
    assert more["candidate"]["choice"]["method"] == "qlora"
    assert " and QLoRA: fits with " in more["sentence"]
    count = int(more["flags"].removeprefix("--machine ").partition("x")[0])
    asked = inputs({**job, "machine": f"{count}xRTX4090"}, "method", pins={"offload": []})
    assert make_plan(asked).document["best"]["choice"] == more["candidate"]["choice"]


def test_flags_that_allow_more_keep_what_is_allowed() -> None:
    stack = dict(newest_known())
    flags = {change["lever"]: change["flags"] for change in plan(SMALL, "method", stack=stack).document["changes"]}
    assert flags == {"numerics": "--allow method,numerics"}
    # 16 bytes of 1.5 B parameters do not fit on 24 GB, 8 do.
    job = {**SMALL, "model": "Qwen/Qwen2.5-1.5B", "machine": "1xRTX4090", "seq_len": 1024, "global_batch": 1}
    tight = changes_that_fit(inputs(job, "method", stack=stack))
    assert [change.flags for change in tight if change.lever == "numerics"] == ["--allow method,numerics"]


def test_explained_by_the_models_of_each() -> None:
    document = make_plan(inputs(LITE, "method"), explain=True).document
    told = document["explanation"]
    assert told["binds"]["device_bytes"] == document["best"]["memory"]["device_bytes"]
    assert {lever["choice"]["method"] for lever in told["levers"]} == {document["best"]["choice"]["method"]}
    assert {lever["alters"] for lever in told["levers"]} == {"method"}
    for miss, entry in zip(document["near_misses"], told["near_misses"], strict=True):
        memory = miss["memory"]
        assert entry["phase"] == memory["peak_phase"]
        assert entry["short_bytes"] > 0
    Plan.model_validate(document)


def test_compared_by_rank_and_by_pins() -> None:
    asked = inputs(LITE, "method")
    ranked = make_plan(asked).document["candidates"]
    lora, qlora = (next(i for i, c in enumerate(ranked, 1) if c["choice"]["method"] == m) for m in ("lora", "qlora"))
    document = compare(asked, lora, qlora)
    assert {"knob": "method", "values": ["lora", "qlora"]} in document["differs"]
    for place, side in zip((lora, qlora), document["sides"], strict=True):
        assert side["candidate"]["memory"] == ranked[place - 1]["memory"]
    pinned = compare(asked, 1, {"recompute": "full"})["sides"][1]["candidate"]
    assert pinned["fits"] and pinned["choice"]["recompute"] == "full"


def test_an_old_choice_of_another_method_still_holds() -> None:
    asked = inputs(LITE, "method")
    document = make_plan(asked).document
    best = document["best"]
    old = OldPlan(
        job={name: value for name, value in document["job"].items() if name != "origin"},
        machine=document["machine"],
        versions=document["stack"]["versions"],
        choice=Choice.from_json(best["choice"]),
        device_bytes=best["memory"]["device_bytes"],
        allocated_bytes=best["memory"]["allocated_bytes"],
        step_s=best["time"]["step_s"],
    )
    found = held_against(asked, old)
    assert found["holds"] and found["is_best"]
    assert found["prediction"]["device_bytes"] == [old.device_bytes, old.device_bytes]
    assert found["candidate"]["alters"] == "method"


def test_cards_are_ranked_with_what_they_allow() -> None:
    offers = [Offer(profile=find_card(name), count=1) for name in ("H100-80GB", "T4")]
    machines = {entry["card"]: entry for entry in rank_offers(inputs(LITE, "method"), offers)["machines"]}
    assert machines["H100-80GB"]["fits"] and machines["H100-80GB"]["alters"] == "method"
    assert machines["H100-80GB"]["device_bytes"] == plan(LITE, "method").document["best"]["memory"]["device_bytes"]
    without = {entry["card"]: entry for entry in rank_offers(inputs(LITE), offers)["machines"]}
    assert not without["H100-80GB"]["fits"]
