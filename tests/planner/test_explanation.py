"""The long answer: what binds, what a change of a knob would do, what makes a miss fit, what another TRL would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.advice.explanation import effect, explanation, smallest_fix, telling
from planner.advice.neighbours import GPUS_USED, neighbours
from planner.choice import Choice
from planner.plan import Plan
from planner.planning import make_plan
from planner.problem import Problem
from planner.search.search import Candidate, distinct, search
from profiles.releases import newest_known
from tests.planner.published_times import UPGRADES, Upgrade
from tests.planner.replay import inputs_of, problem_of
from tests.planner.test_search import all_batches, random_problem, random_result

GIB = 2**30
LONG: dict[str, Any] = {
    "model": "Qwen/Qwen3-4B",
    "machine": "1xH100-80GB",
    "global_batch": 1,
    "pins": {"weights": "bf16", "mixed_precision": "no"},
}
"""Pure bf16 training of one sequence, as in TRL's guide to long contexts."""
JOB: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 8}


def long_problem(seq_len: int) -> Problem:
    return problem_of({**LONG, "seq_len": seq_len}, stack=dict(newest_known()))


def judged(p: Problem, **knobs: Any) -> Candidate:
    values = {"method": "full", "loss_path": "fused", "recompute": "full", "weights": "bf16", "mixed_precision": "no"}
    return p.judge.judge(Choice(**{**values, **knobs}), "nothing")


def test_what_offload_frees_is_what_was_measured() -> None:
    """TRL's guide, 98,304 tokens on one H100: 59.9 GiB, with the checkpoints on the host 48.8."""
    p = long_problem(98_304)
    found = next(n for n in telling(p, judged(p)) if n.lever == "offload")
    assert found.candidate.choice.offload == {"activations"}
    assert effect(judged(p), found.candidate).freed_bytes / GIB == pytest.approx(59.9 - 48.8, rel=0.1)


def test_checkpoints_of_36_layers() -> None:
    """Without recompute all of a layer is kept: 98,304 tokens of Qwen3-4B are far over any card, and a third faster."""
    p = long_problem(98_304)
    found = next(n for n in telling(p, judged(p)) if n.lever == "recompute")
    assert found.candidate.choice.recompute == "none"
    assert not found.candidate.fits
    does = effect(judged(p), found.candidate)
    assert does.extra_share is not None and -0.35 < does.extra_share < -0.15
    (entry,) = [e for e in explanation(p, judged(p), [])["levers"] if e["lever"] == "recompute"]
    assert entry["change"] == "recompute none"
    assert entry["sentence"].startswith("takes ")
    assert "does not fit" in entry["sentence"]
    assert entry["freed_bytes"] == does.freed_bytes < -500 * GIB


@pytest.mark.parametrize("seq_len", [2048, 32_768, 98_304])
def test_bytes_and_seconds_are_those_of_whole_simulations(seq_len: int) -> None:
    p = long_problem(seq_len)
    best = search(p.judge, p.options, "fastest").best
    assert best is not None
    for entry in explanation(p, best, [])["levers"]:
        choice = Choice.from_json(dict(entry["choice"]))
        memory, time = p.judge.memory.estimate(choice), p.judge.time.estimate(choice)
        assert time is not None and best.time is not None
        now = p.judge.memory_of(best).device_bytes
        assert entry["freed_bytes"] == pytest.approx(now - memory.device_bytes, abs=128)
        assert entry["extra_s"] == pytest.approx(time.step_s - best.step_s, rel=1e-4, abs=1e-6)
        assert entry["fits"] == memory.fits == (entry["short_bytes"] == 0)


def test_what_binds_adds_up() -> None:
    document = make_plan(inputs_of(JOB, stack=dict(newest_known())), explain=True).document
    binds, best = document["explanation"]["binds"], document["best"]
    peak = next(phase for phase in best["memory"]["phases"] if phase["name"] == binds["phase"])
    sizes = sorted(peak["parts"].values(), reverse=True)
    assert list(binds["parts"].values()) == sizes[:4]
    assert binds["device_bytes"] == best["memory"]["device_bytes"]
    assert sum(binds["resources"].values()) == pytest.approx(1, abs=0.001)
    assert binds["resource"] == "compute"
    # The document with its explanation is a plan, and without it the same plan.
    read = Plan.model_validate(document)
    assert read.explanation is not None
    plain = make_plan(inputs_of(JOB, stack=dict(newest_known()))).document
    assert plain == {name: value for name, value in document.items() if name != "explanation"}


def test_near_misses_come_in_the_plans_order_with_what_makes_them_fit() -> None:
    outcome = make_plan(inputs_of(JOB, stack=dict(newest_known())), explain=True)
    shown = outcome.document["near_misses"]
    told = outcome.document["explanation"]["near_misses"]
    assert len(shown) == len(told) >= 3
    for candidate, miss in zip(shown, told, strict=True):
        assert miss["short_bytes"] >= -candidate["memory"]["headroom_bytes"]
        assert miss["phase"] == candidate["memory"]["peak_phase"]
        fix = miss["fix"]
        memory = outcome.problem.judge.memory.estimate(Choice.from_json(dict(fix["choice"])))
        assert memory.fits
        assert fix["freed_bytes"] >= miss["short_bytes"] - 128
        assert fix["change"] and fix["sentence"].startswith("frees ")


def distance(before: Choice, after: Choice) -> int:
    """Knobs that differ, of those that depend on no other, or a large number."""
    independent = ("loss_path", "recompute", "offload", "attention", "micro_batch")
    rest = replace(after, **{knob: getattr(before, knob) for knob in independent}, grad_accum=before.grad_accum)
    return sum(getattr(before, knob) != getattr(after, knob) for knob in independent) if rest == before else 99


def test_the_smallest_fix_against_all_that_fits() -> None:
    """Of random jobs: where one knob is enough no second is moved, and no other knob alone would be faster."""
    asked = single = 0
    for seed in range(0, 210, 3):
        p, result = random_problem(seed), random_result(seed)
        for miss in distinct(result.near_misses, 2):
            fix = smallest_fix(p, miss)
            near = [c for c in result.fitting if c.alters == miss.alters and distance(miss.choice, c.choice) == 1]
            asked += 1
            if near:
                assert fix is not None and fix.fits, seed
                assert fix.step_s <= min(c.step_s for c in near), seed
                single += 1
            if fix is not None:
                assert p.judge.memory_of(fix).fits
    assert (asked >= 40, single >= 10) == (True, True), (asked, single)


def test_other_numbers_of_cards_are_the_last_thing_asked_for() -> None:
    p = problem_of({**JOB, "seq_len": 8192}, stack=dict(newest_known()))
    for miss in search(p.judge, p.options, "fastest").near_misses[:6]:
        fix = smallest_fix(p, miss)
        others = [n for n in neighbours(p, miss) if n.candidate.fits and n.lever not in (GPUS_USED, "numerics")]
        if others:
            assert fix is not None and fix.choice.num_gpus == miss.choice.num_gpus


def test_nothing_is_enough() -> None:
    p = problem_of({**JOB, "machine": "1xT4"}, stack=dict(newest_known()))
    miss = search(p.judge, p.options, "fastest").near_misses[0]
    assert smallest_fix(p, miss) is None
    told = explanation(p, None, [(p, miss)])
    assert told["near_misses"][0]["fix"] is None
    assert told["binds"] is None and told["levers"] == []
    assert told["ladder"]


def test_the_search_space_of_the_brute_force_is_not_empty() -> None:
    p = random_problem(3)
    assert all_batches(p.options, Choice(method="full", loss_path="fused", recompute="full")) or p.options.pins


@pytest.mark.parametrize("upgrade", UPGRADES, ids=lambda u: f"{u.run.model} {u.run.method}")
def test_what_a_release_changes_is_what_trl_measured(upgrade: Upgrade) -> None:
    """TRL's pull request 6863: tokens per second with 1.12's chunks and with 1.13's; here one row at a time.

    A row alone carries no padding mask, which the published rows of one length do not have either.
    """
    run = upgrade.run
    asked: dict[str, Any] = {
        "model": run.model,
        "method": run.method,
        "lora": {"target_modules": list(run.lora_targets) or "all-linear"},
        "machine": f"{run.gpus}xH100-80GB",
        "seq_len": run.seq_len,
        "global_batch": 4 * run.gpus,
    }
    p = problem_of(asked, stack={**newest_known(), "trl": "1.13.0"})
    choice = replace(run.choice("chunked"), micro_batch=1, grad_accum=4)
    now = p.judge.judge(choice, "nothing")
    releases = {entry["trl"]: entry for entry in explanation(p, now, [])["releases"]}
    assert set(releases) == {"1.16.0", "1.12.0", "1.6.0"}
    older = releases["1.12.0"]
    gain = older["extra_s"] / now.step_s
    assert gain == pytest.approx(upgrade.after / upgrade.before - 1, rel=0.25)
    assert older["sentence"].startswith("TRL 1.12.0 computes the loss as chunked_fp32: ")
    assert f"{gain:.0%} more time per step" in older["sentence"]


ROW_BY_ROW = Choice(method="lora", loss_path="chunked", recompute="full", weights="bf16", grad_accum=8)


def test_what_a_release_changes_in_bytes_is_the_copy_of_lm_head() -> None:
    """Qwen3-8B's lm_head in fp32: 151,936 x 4,096 x 4 bytes = 2.32 GiB, once in forward and once in backward."""
    p = problem_of({**JOB, "machine": "1xH200", "seq_len": 512}, stack={**newest_known(), "trl": "1.13.0"})
    now = p.judge.judge(ROW_BY_ROW, "nothing")
    assert p.judge.memory_of(now).peak_phase == "loss"
    older = {entry["trl"]: entry for entry in explanation(p, now, [])["releases"]}["1.12.0"]
    copy = 151_936 * 4096 * 4
    assert 0.9 * copy < older["extra_bytes"] < 2.3 * copy
    assert f"{older['extra_bytes'] / GIB:.1f} GiB more per GPU at the peak" in older["sentence"]


def test_a_downgrade_and_an_upgrade_are_each_others_mirror() -> None:
    defaults = {"1.12.0": "chunked_fp32", "1.13.0": "chunked", "1.16.0": "fused"}
    pins = {"recompute": "full", "sharding": "fsdp", "gpus": 8}
    said: dict[str, dict[str, Any]] = {}
    for version, path in defaults.items():
        p = problem_of({**JOB, "pins": {**pins, "loss_path": path}}, stack={**newest_known(), "trl": version})
        best = search(p.judge, p.options, "fastest").best
        assert best is not None
        said[version] = {e["loss_path"]: e for e in explanation(p, best, [])["releases"]}
    down, up = said["1.16.0"]["chunked_fp32"], said["1.12.0"]["fused"]
    assert down["extra_bytes"] == -up["extra_bytes"] > GIB
    assert down["extra_s"] == pytest.approx(-up["extra_s"], rel=1e-4)
    # From 1.12 to 1.13 and on to 1.16 is from 1.12 to 1.16.
    first, second = said["1.12.0"]["chunked"], said["1.13.0"]["fused"]
    assert first["extra_bytes"] + second["extra_bytes"] == up["extra_bytes"]
    assert first["extra_s"] + second["extra_s"] == pytest.approx(up["extra_s"], rel=1e-3)


def test_a_loss_that_no_release_changes() -> None:
    p = problem_of(JOB, stack={**newest_known(), "liger-kernel": "0.8.0"})
    best = search(p.judge, p.options, "fastest").best
    assert best is not None
    liger = p.judge.judge(replace(best.choice, loss_path="liger"), "nothing")
    assert explanation(p, liger, [])["releases"] == []
    unknown = problem_of(JOB, stack={})
    assert explanation(unknown, best, [])["releases"] == []


def test_two_levers_that_alter_nothing_come_before_one_that_alters_numerics() -> None:
    """Qwen3-4B at 49,152 tokens: bf16 states alone would make room, and so do full recompute and its offload."""
    job = {**LONG, "seq_len": 49_152, "pins": {}}
    p = problem_of(job, stack={**newest_known(), "bitsandbytes": "0.50.0"})
    misses = [m for m in search(p.judge, p.options, "fastest").near_misses if m.choice.recompute == "selective"]
    assert misses
    single = [n for n in neighbours(p, misses[0]) if n.candidate.fits]
    assert {n.lever for n in single} == {"numerics"}
    fix = smallest_fix(p, misses[0])
    assert fix is not None and fix.alters == "nothing"
    assert (fix.choice.recompute, fix.choice.offload) == ("full", {"activations"})
