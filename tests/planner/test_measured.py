"""What probes saw, as plans take it: rates as peaks, a job's bytes and seconds carried to any depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.measured.probes import (
    Cell,
    Measured,
    MeasuredJob,
    MeasuredRates,
    first_layers,
    matching,
    measured_hardware,
    probe_depths,
    probed_choice,
)
from planner.memory.coefficients_json import option_key, shape_hash
from planner.memory.model import MemoryModel
from planner.planning import make_plan
from planner.problem import PlanInput, Problem, make_problem, scored_beside, time_model
from planner.search.search import search
from planner.time.rates import rates_of
from tests.planner.replay import bundled, inputs_of

MIB = 2**20
CHOICE = Choice(method="full", loss_path="fused", recompute="none", weights="bf16", mixed_precision="no")


def inputs(machine: str = "1xH100-80GB", **job: Any) -> PlanInput:
    return inputs_of({"model": "Qwen/Qwen3-0.6B", "machine": machine, "seq_len": 2048, "global_batch": 1, **job})


def simulated(problem: Problem, choice: Choice, layers: int, sequence: int) -> MemoryModel:
    memory = problem.judge.memory
    small = first_layers(memory.job.architecture, layers)
    return MemoryModel(
        job=replace(memory.job, architecture=small, seq_len=sequence),
        hardware=memory.hardware,
        reserve=memory.reserve,
        source=memory.source,
    )


def probed(
    asked: PlanInput,
    choice: Choice = CHOICE,
    missed: Callable[[int, int], int] = lambda layers, tokens: 0,
    slower: float = 1.0,
    outside_s: float = 0.0,
) -> MeasuredJob:
    """A probe that saw what the models say, and ``missed(layers, tokens)`` bytes in every phase; layers ``slower``."""
    problem = make_problem(asked)
    memory, architecture = problem.judge.memory, asked.architecture
    cells: list[Cell] = []
    for layers in probe_depths(architecture):
        for sequence in (asked.job.seq_len // 2, asked.job.seq_len):
            small = simulated(problem, choice, layers, sequence)
            workspace = small.device_of(choice).workspace_bytes
            phases = small.frame(choice).phases(1, 1)
            time = time_model(asked.job, asked.stack, small).estimate(choice)
            assert time is not None
            work = {p: s for p, s in time.parts.items() if p not in ("loss", "optimizer", "communication")}
            seconds = {"forward": 0.0, "loss": outside_s, "backward": slower * sum(work.values())}
            cells.append(
                Cell(
                    layers=layers,
                    sequence=sequence,
                    tokens=sequence,
                    peaks={phase.name: phase.bytes + workspace + missed(layers, sequence) for phase in phases},
                    seconds={**seconds, "step": 0.010 + 0.002 * layers, "other": 0.001},
                )
            )
    options = memory.activation_options(choice)
    return MeasuredJob(
        trainer="sft",
        shape=shape_hash(architecture),
        vocab=architecture.vocab,
        tied=architecture.tied,
        options=option_key(architecture, options),
        lora_r=options.lora_r,
        choice=choice,
        cells=tuple(cells),
    )


def with_jobs(asked: PlanInput, *jobs: MeasuredJob) -> Problem:
    return make_problem(replace(asked, measured=Measured(card="H100-80GB", jobs=jobs)))


def test_measured_rates_are_what_the_models_then_reach() -> None:
    hardware = make_problem(inputs()).hardware
    rates = MeasuredRates(
        matmul_flops=700e12, fp32_flops=50e12, bandwidth=3.0e12, host_link=50e9, link=300e9, context_bytes=450 * MIB
    )
    found = rates_of(measured_hardware(hardware, rates))
    assert found is not None
    # Training reached 0.73 of the peak where the best product alone reached 0.803.
    assert found.matmul == pytest.approx(700e12 * 0.73 / 0.803)
    assert found.fp32_matmul == pytest.approx(50e12)
    assert found.streaming == pytest.approx(3.0e12)
    assert found.peak == hardware.matmul_flops
    told = make_problem(replace(inputs(), measured=Measured(card="H100-80GB", rates=rates)))
    assert told.hardware.host_link == pytest.approx(50e9 / 0.88)
    assert told.judge.memory.estimate(CHOICE).phases[0].parts["context"] == 450 * MIB
    # A job loads more kernels than products alone.
    job = replace(probed(inputs()), context_bytes=520 * MIB)
    told = make_problem(replace(inputs(), measured=Measured(card="H100-80GB", rates=rates, jobs=(job,))))
    assert told.judge.memory.estimate(CHOICE).phases[0].parts["context"] == 520 * MIB


def test_a_card_without_a_data_sheet_gets_times_from_its_rates() -> None:
    asked = inputs()
    card = asked.machine.cards[0].model_copy(update={"name": "NVIDIA Z1", "card_id": None})
    asked = replace(asked, machine=asked.machine.model_copy(update={"cards": [card]}), profile=None)
    assert make_problem(asked).judge.time.estimate(CHOICE) is None
    rates = MeasuredRates(matmul_flops=100e12, bandwidth=1e12)
    told = make_problem(replace(asked, measured=Measured(card="NVIDIA Z1", rates=rates)))
    time = told.judge.time.estimate(CHOICE)
    assert time is not None
    assert (time.low_s, time.high_s) == (pytest.approx(0.8 * time.step_s), pytest.approx(1.2 * time.step_s, rel=0.2))


def test_rates_of_one_card_are_not_taken_for_another() -> None:
    rates = MeasuredRates(matmul_flops=1e12)
    other = replace(inputs("1xA100-80GB"), measured=Measured(card="H100-80GB", rates=rates))
    assert make_problem(other).hardware == make_problem(inputs("1xA100-80GB")).hardware


def test_a_throttled_host_link_makes_the_plan_drop_offload() -> None:
    """LoRA of Qwen3-32B at 64k on eight H100: activations on the host save a smaller batch, if the host is near."""
    asked = inputs_of(
        {"model": "Qwen/Qwen3-32B", "machine": "8xH100-80GB", "method": "lora", "seq_len": 65536, "global_batch": 8}
    )

    def offload(host_link: float) -> frozenset[str]:
        measured = Measured(card="H100-80GB", rates=MeasuredRates(host_link=host_link))
        problem = make_problem(replace(asked, measured=measured))
        best = search(problem.judge, problem.options, "fastest").best
        assert best is not None
        return best.frame.offload

    assert offload(55e9) == {"activations"}
    assert offload(1e9) == frozenset()


def test_what_the_simulation_missed_is_carried_to_any_depth_and_length() -> None:
    asked = inputs()

    def missed(layers: int, tokens: int) -> int:
        return 3 * MIB + layers * tokens * 512

    before = make_problem(asked).judge.memory.estimate(CHOICE)
    after = with_jobs(asked, probed(asked, missed=missed)).judge.memory.estimate(CHOICE)
    assert (before.evidence, after.evidence) == ("formula", "measured")
    # 28 layers of 2,048 tokens: 3 MiB + 28 x 1 MiB.
    assert after.allocated_bytes - before.allocated_bytes == 31 * MIB
    assert {p.name: p.bytes for p in after.phases}[after.peak_phase] + 64 * MIB + 131072 <= after.device_bytes
    assert after.high_bytes - after.low_bytes < before.high_bytes - before.low_bytes
    # At half the length, another plan: half of what grows.
    short = inputs(seq_len=1024)
    found = with_jobs(short, probed(asked, missed=missed)).judge.memory.estimate(CHOICE)
    assert found.allocated_bytes - make_problem(short).judge.memory.estimate(CHOICE).allocated_bytes == 17 * MIB


def test_a_probe_that_saw_less_lowers_the_plan_and_no_part_is_negative() -> None:
    asked = inputs()
    less = with_jobs(asked, probed(asked, missed=lambda layers, tokens: -layers * 8 * MIB)).judge.memory
    found, before = less.estimate(CHOICE), make_problem(asked).judge.memory.estimate(CHOICE)
    assert found.allocated_bytes == before.allocated_bytes - 28 * 8 * MIB
    assert all(size >= 0 for phase in found.phases for size in phase.parts.values())


@pytest.mark.parametrize(
    "change",
    [{"recompute": "full"}, {"loss_path": "full_logits"}, {"weights": "fp32", "mixed_precision": "bf16"}],
    ids=["recompute", "loss", "dtypes"],
)
def test_other_layers_and_losses_are_not_corrected(change: dict[str, Any]) -> None:
    asked = inputs()
    problem, other = with_jobs(asked, probed(asked, missed=lambda *_: MIB)), replace(CHOICE, **change)
    assert matching(problem.inputs.measured.jobs, problem.judge.memory, other) is None
    assert problem.judge.memory.estimate(other) == make_problem(asked).judge.memory.estimate(other)
    time = problem.judge.time.estimate(other)
    assert time is not None and time.evidence != "measured"


def test_layers_under_fsdp_are_corrected_but_not_its_step() -> None:
    asked = inputs("8xH100-80GB", global_batch=8)
    sharded = Choice(method="full", loss_path="fused", recompute="none", sharding="fsdp", dp_shard=8, weights="bf16")
    ran = probed_choice(sharded)
    assert (ran.sharding, ran.num_gpus, ran.weights, ran.mixed_precision) == ("none", 1, "bf16", "no")
    one = inputs()
    problem = with_jobs(asked, probed(one, ran, missed=lambda layers, _: layers * MIB))
    found, before = (p.judge.memory.frame(sharded).phases(1, 1) for p in (problem, make_problem(asked)))
    gained = {new.name: new.bytes - old.bytes for new, old in zip(found, before, strict=True)}
    assert gained == {"load": 0, "forward": 28 * MIB, "loss": 28 * MIB, "backward": 28 * MIB, "step": 0, "save": 0}


def test_seconds_of_layers_and_of_everything_else_are_carried_on() -> None:
    asked = inputs()
    before = make_problem(asked).judge.time.estimate(CHOICE)
    after = with_jobs(asked, probed(asked, slower=2.0, outside_s=0.05)).judge.time.estimate(CHOICE)
    assert before is not None and after is not None
    layers = sum(s for p, s in before.parts.items() if p not in ("loss", "optimizer", "communication"))
    # The optimizer takes 10 ms and 2 ms a layer, all else 50 ms and 1 ms.
    assert after.step_s == pytest.approx(2.0 * layers + 0.05 + 0.010 + 28 * 0.002 + 0.001)
    assert after.parts["optimizer"] == pytest.approx(0.066)
    assert sum(after.seconds) == pytest.approx(after.step_s)
    assert (after.evidence, after.high_s) == ("measured", pytest.approx(1.15 * after.step_s))
    twice = with_jobs(asked, probed(asked, slower=2.0, outside_s=0.05)).judge.time.estimate(
        replace(CHOICE, grad_accum=2)
    )
    assert twice is not None
    assert twice.step_s == pytest.approx(2 * (2.0 * layers + 0.05) + 0.066 + 0.001)


def test_what_was_not_probed_is_no_faster_for_that() -> None:
    """The nearest probe of the same layers says how fast device and trainer are; the evidence stays the model's."""
    asked = inputs()
    again = replace(CHOICE, recompute="full")
    plain = make_problem(asked).judge.time
    probe = with_jobs(asked, probed(asked, slower=2.0, outside_s=0.05)).judge.time
    before, after, own = plain.estimate(again), probe.estimate(again), probe.estimate(CHOICE)
    assert before is not None and after is not None and own is not None
    layers = sum(s for p, s in before.parts.items() if p not in ("loss", "optimizer", "communication"))
    assert after.step_s == pytest.approx(2.0 * layers + 0.05 + 0.066 + 0.001)
    assert after.step_s > own.step_s
    assert (after.evidence, own.evidence) == (before.evidence, "measured")
    # Products in another dtype are another matter.
    wide = replace(CHOICE, weights="fp32")
    assert probe.estimate(wide) == plain.estimate(wide)


def test_a_probe_in_which_more_layers_took_no_longer_says_nothing_of_time() -> None:
    asked = inputs()
    job = probed(asked)
    flat = replace(job, cells=tuple(replace(cell, seconds=job.cells[0].seconds) for cell in job.cells))
    found = with_jobs(asked, flat).judge.time.estimate(CHOICE)
    assert found == make_problem(asked).judge.time.estimate(CHOICE)


@pytest.mark.parametrize(
    ("model", "depths"),
    [
        ("Qwen/Qwen3-0.6B", (1, 2)),
        # Five sliding layers and a full one, over and over.
        ("google/gemma-3-1b-pt", (6, 12)),
        # A dense layer, then mixtures.
        ("deepseek-ai/DeepSeek-V2-Lite", (2, 3)),
    ],
)
def test_two_depths_tell_what_more_depth_adds(model: str, depths: tuple[int, int]) -> None:
    assert probe_depths(bundled(model)) == depths


@pytest.mark.parametrize(("recompute", "depths"), [("every_2", (2, 4)), ("every_4", (4, 8)), ("selective", (1, 2))])
def test_depths_follow_the_layers_that_are_recomputed(recompute: str, depths: tuple[int, int]) -> None:
    assert probe_depths(bundled("Qwen/Qwen3-0.6B"), recompute) == depths


def test_a_plan_with_a_probe_says_measured_and_is_deterministic() -> None:
    asked = inputs(pins={"recompute": "none", "loss_path": "fused", "weights": "bf16", "mixed_precision": "no"})
    asked = replace(asked, measured=Measured(card="H100-80GB", jobs=(probed(asked),)))
    best = make_plan(asked).document["best"]
    assert (best["memory"]["evidence"], best["time"]["evidence"]) == ("measured", "measured")
    assert make_plan(asked).document["best"] == best


PINS = {"loss_path": "fused", "weights": "bf16", "mixed_precision": "no"}


def test_a_best_plan_that_was_not_probed_beside_others_that_were_is_said() -> None:
    asked = inputs(pins=PINS)
    again = probed(asked, replace(CHOICE, recompute="full"))
    plan = make_plan(replace(asked, measured=Measured(card="H100-80GB", jobs=(again,))))
    best, notes = plan.document["best"], plan.document["notes"]
    assert best["time"]["evidence"] != "measured" and best["choice"]["recompute"] == "none"
    assert "`trlfit probe MODEL --measure --pin recompute=none` measures the best" in notes[-1]
    job = probed(asked)
    pinned = inputs(pins={"recompute": "none", **PINS})
    assert make_plan(replace(pinned, measured=Measured(card="H100-80GB", jobs=(job,)))).document["notes"] == []


@pytest.mark.parametrize(
    ("ran", "planned"),
    [
        ({}, {"trainer": "dpo"}),
        ({"trainer": "dpo"}, {}),
        ({"trainer": "dpo"}, {"trainer": "reward"}),
        ({"trainer": "dpo"}, {"trainer": "dpo", "trl": {"precompute_ref_log_probs": True}}),
        ({"trainer": "kto"}, {"trainer": "kto", "trl": {"loss_type": "apo_zero_unpaired"}}),
    ],
)
def test_a_probe_corrects_its_own_trainer_alone(ran: dict[str, Any], planned: dict[str, Any]) -> None:
    """And of one trainer, what scores the same rows beside the policy in the same way."""
    own, other = inputs(**ran), inputs(**planned)
    found = replace(probed(own), trainer=own.job.trainer, scored_beside=scored_beside(own.job))
    card = own.machine.usable_cards[0].card_id
    measured = Measured(card=card, jobs=(found,))
    assert make_problem(replace(own, measured=measured)).probes is not None
    assert make_problem(replace(other, measured=measured)).probes is None
