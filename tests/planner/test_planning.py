"""The plan document: its shape, its promises, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.ledger.one_choice import choose_one
from planner.machine import Host, Machine
from planner.memory.adapters import TargetError
from planner.pins import PinError
from planner.plan import Plan
from planner.planning import PlanOutcome, RefusedJob, make_plan
from planner.problem import make_problem, method_label, run_file_names
from profiles.releases import newest_known
from tests.planner.replay import inputs_of, named_machine

STACK = {**newest_known(), "deepspeed": "0.19.8", "bitsandbytes": "0.50.0"}
JOB: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 16}


def plan(stack: dict[str, str] | None = None, **changes: Any) -> PlanOutcome:
    return make_plan(inputs_of({**JOB, **changes}, stack=STACK if stack is None else stack))


FITS = plan()


def test_the_document_is_what_its_schema_says() -> None:
    text = json.dumps(FITS.document)
    read = Plan.model_validate_json(text)
    assert read.job_alone() == FITS.problem.inputs.job
    assert read.model_dump(mode="json", exclude_none=True)["judged"] == FITS.document["judged"] > 100
    assert json.dumps(FITS.document, sort_keys=True) == json.dumps(plan().document, sort_keys=True)


def test_best_is_the_first_candidate_and_the_searchs_own() -> None:
    document = FITS.document
    assert document["best"] == document["candidates"][0]
    assert FITS.best is not None
    assert document["best"]["choice"] == FITS.best.choice.to_json()
    assert document["best"]["fits"] is True
    assert len(document["candidates"]) == 8
    shown = [Choice.from_json(dict(c["choice"])) for c in document["candidates"]]
    assert len({replace(c, micro_batch=1, grad_accum=1) for c in shown}) == 8
    assert all(c.global_batch == 16 for c in shown)


def test_numbers_that_belong_together() -> None:
    best = FITS.document["best"]
    memory, time = best["memory"], best["time"]
    assert memory["low_bytes"] <= memory["allocated_bytes"] <= memory["high_bytes"]
    assert memory["allocated_bytes"] <= memory["reserved_bytes"] <= memory["device_bytes"]
    # Of an H100's 79.65 GiB CUDA offers 79.11; the driver keeps the rest.
    (driver,) = {card["reserved_bytes"] for card in FITS.document["machine"]["cards"]}
    assert driver / 2**30 == pytest.approx(0.54, abs=0.01)
    assert memory["headroom_bytes"] == int(memory["capacity_bytes"] * 0.95) - driver - memory["device_bytes"]
    peak = next(phase for phase in memory["phases"] if phase["name"] == memory["peak_phase"])
    assert peak["bytes"] == max(phase["bytes"] for phase in memory["phases"])
    for phase in memory["phases"]:
        assert sum(phase["parts"].values()) == phase["bytes"]
    assert time["low_s"] < time["step_s"] < time["high_s"]
    assert sum(time["parts"].values()) == pytest.approx(time["step_s"], rel=1e-4)
    assert time["tokens_per_s"] == pytest.approx(16 * 4096 / time["step_s"], rel=1e-4)
    assert best["cards"] == list(range(best["num_gpus"]))


def test_parameters_and_groups() -> None:
    architecture = FITS.document["architecture"]
    assert architecture["parameters"]["total"] == architecture["parameters"]["trainable"] == 8_190_735_360
    assert sum(architecture["groups"].values()) == 8_190_735_360
    lora = plan(method="lora").document["architecture"]["parameters"]
    assert (lora["trainable"], lora["adapters"]) == (43_646_976, 43_646_976)


def test_rejected_rules_have_counts_and_examples() -> None:
    for rule, entry in FITS.document["rejected"].items():
        assert rule in FITS.result.rejected
        assert entry["count"] > 0
        assert entry["example"]
        assert set(entry["choice"]) == set(FITS.document["best"]["choice"])


def test_reasons_of_the_best_and_one_line_of_the_others() -> None:
    document = FITS.document
    assert len(document["best"]["why"]) >= 2
    assert all(len(c["why"]) == 1 and c["why"][0].startswith("peak ") for c in document["candidates"][1:])
    assert all(len(c["why"]) == 1 for c in document["near_misses"])


NOTHING = plan(model="Qwen/Qwen2.5-72B", machine="1xRTX4090", pins={"gpus": 1})


def test_nothing_fits_still_holds_near_misses_and_changes() -> None:
    document = NOTHING.document
    assert document["best"] is None
    assert NOTHING.best is None
    assert document["candidates"] == document["near_misses"] != []
    assert not any(c["fits"] for c in document["candidates"])
    shortage = [c["memory"]["headroom_bytes"] for c in document["near_misses"]]
    assert shortage == sorted(shortage, reverse=True)
    assert all("GiB over the card" in c["why"][0] for c in document["near_misses"])
    Plan.model_validate(document)


def test_changes_are_offered_with_their_own_machines_cards() -> None:
    document = plan(model="meta-llama/Llama-3.1-8B", machine="1xRTX4090", global_batch=8).document
    levers = {change["lever"]: change for change in document["changes"]}
    assert set(levers) >= {"lora", "qlora", "more GPUs"}
    assert levers["more GPUs"]["candidate"]["cards"] == [0, 1]
    assert levers["lora"]["candidate"]["choice"]["method"] == "lora"
    assert document["job"]["method"] == "full"
    Plan.model_validate(document)


def test_a_fully_pinned_choice_comes_back_whether_it_fits_or_not() -> None:
    pins = {
        "loss_path": "fused",
        "recompute": "full",
        "offload": "",
        "sharding": "none",
        "cp": 1,
        "sp": 1,
        "tp": 1,
        "dp_shard": 1,
        "dp_replicate": 1,
        "micro_batch": 1,
        "grad_accum": 16,
        "optimizer": "adamw_torch_fused",
        "weights": "fp32",
        "mixed_precision": "bf16",
        "attention": "sdpa",
        "precision": "bf16",
    }
    for fits, model in ((True, "Qwen/Qwen3-0.6B"), (False, "Qwen/Qwen3-8B")):
        (first, *others) = plan(model=model, machine="1xH100-80GB", pins=pins).document["candidates"]
        assert others == []
        assert first["fits"] is fits
        given = {knob: value for knob, value in pins.items() if knob != "offload"}
        assert {knob: first["choice"][knob] for knob in given} == given


def test_the_goal_longest_answers_with_a_length() -> None:
    found = plan(goal="longest", model="Qwen/Qwen3-4B", machine="1xH100-80GB", global_batch=1)
    document = found.document
    assert document["longest"] == document["job"]["seq_len"] == document["staircase"][-1]["tokens"]
    assert document["best"]["fits"]
    Plan.model_validate(document)
    hopeless = plan(goal="longest", model="Qwen/Qwen2.5-72B", machine="1xRTX4090", global_batch=1)
    assert (hopeless.document["longest"], hopeless.document["best"]) == (None, None)
    # The question stays the length that was asked for.
    assert hopeless.document["job"]["seq_len"] == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": "dpo", "data": {"packing": True}}, "dpo does not pack rows"),
        ({"pins": {"sharding": "none", "gpus": 2}}, "sharding none runs on one GPU"),
        ({"global_batch": 3, "pins": {"gpus": 2}}, "global_batch 3"),
        ({"pins": {"loss_path": "chunked"}}, "chunked"),
    ],
)
def test_refused_jobs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedJob) as caught:
        plan(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pins", [{"cp": 3, "gpus": 8}, {"colour": 1}, {"cp": 16}, {"cp": 2, "sp": 1, "tp": 1, "dp_shard": 3, "gpus": 8}]
)
def test_pins_that_make_no_run(pins: dict[str, Any]) -> None:
    with pytest.raises(PinError):
        plan(pins=pins)


def test_targets_that_the_model_does_not_have() -> None:
    with pytest.raises(TargetError, match="'c_attn' is no module of Qwen/Qwen3-8B; it has q_proj"):
        plan(method="lora", lora={"target_modules": ["c_attn"]})


def test_tensor_parallelism_is_refused_in_one_line_that_says_why() -> None:
    with pytest.raises(RefusedJob) as refused:
        plan(pins={"tp": 2})
    assert str(refused.value) == (
        "no run is possible: tp 2 is not offered: such a run cannot resume from a checkpoint and is not counted here; "
        "fsdp and zero3 divide the same states"
    )


def test_a_named_machines_host_is_warned_about() -> None:
    pins = {"offload": ["activations"], "recompute": "full"}
    (warning,) = [w for w in plan(pins=pins).document["best"]["warnings"] if "named machine" in w]
    assert "the host of a named machine is not known" in warning
    machine = named_machine("8xH100-80GB")
    machine.host = Host(total_bytes=2**40, available_bytes=2**40, cores=64)
    known = make_plan(inputs_of({**JOB, "pins": pins}, stack=STACK, machine=machine)).document["best"]
    assert not [w for w in known["warnings"] if "not known" in w]


def test_a_cpu_machine_gets_a_plan() -> None:
    machine = Machine(origin="cpu", spec="cpu", host=Host(total_bytes=2**35, available_bytes=2**35, cores=8))
    job = {"model": "Qwen/Qwen3-0.6B", "machine": "cpu", "seq_len": 512, "global_batch": 4}
    document = make_plan(inputs_of(job, stack={"trl": "1.16.0"}, machine=machine)).document
    assert document["best"]["choice"]["sharding"] == "none"
    assert document["best"]["cards"] == []
    two = make_problem(inputs_of({**job, "pins": {"dp_replicate": 2}}, stack={"trl": "1.16.0"}, machine=machine))
    assert two.hardware.gpus_per_node == 2
    asked = make_problem(inputs_of({**job, "pins": {"gpus": 4}}, stack={"trl": "1.16.0"}, machine=machine))
    assert asked.hardware.gpus_per_node == 4


def test_an_unknown_card_has_no_time() -> None:
    document = make_plan(replace(inputs_of(JOB, stack=STACK), profile=None)).document
    assert document["best"]["time"] is None
    Plan.model_validate(document)


@pytest.mark.parametrize(
    ("changes", "rows", "reference", "vocabulary"),
    [
        ({}, 1, False, True),
        ({"trainer": "dpo"}, 2, True, True),
        ({"trainer": "dpo", "method": "lora"}, 2, False, True),
        ({"trainer": "dpo", "trl": {"precompute_ref_log_probs": True}}, 2, False, True),
        ({"trainer": "kto"}, 1, True, True),
        ({"trainer": "reward"}, 2, False, False),
        ({"trainer": "grpo"}, 1, False, True),
        ({"trainer": "rloo"}, 1, True, True),
    ],
)
def test_what_trainers_hold(changes: dict[str, Any], rows: int, reference: bool, vocabulary: bool) -> None:
    job = make_problem(inputs_of({**JOB, **changes}, stack=STACK)).judge.memory.job
    assert (job.rows_per_sequence, job.reference_model, job.scores_vocabulary) == (rows, reference, vocabulary)


@pytest.mark.parametrize(
    ("stack", "model", "loss_paths", "attentions", "eight_bit"),
    [
        ({"trl": "1.16.0"}, "Qwen/Qwen3-8B", ("fused",), ("sdpa",), ()),
        (
            {"trl": "1.12.0", "liger-kernel": "0.8.0"},
            "Qwen/Qwen3-8B",
            ("chunked_fp32", "full_logits", "liger"),
            ("sdpa",),
            (),
        ),
        ({"trl": "1.0.0", "torchao": "0.18.0"}, "Qwen/Qwen3-8B", ("full_logits",), ("sdpa",), ("adamw_torch_8bit",)),
        (
            {"trl": "1.16.0", "flash-attn": "2.8.3", "bitsandbytes": "0.50.0"},
            "google/gemma-2-2b",
            ("fused",),
            ("eager", "flash_attention_2"),
            ("adamw_bnb_8bit",),
        ),
    ],
)
def test_what_the_stack_can_do(
    stack: dict[str, str],
    model: str,
    loss_paths: tuple[str, ...],
    attentions: tuple[str, ...],
    eight_bit: tuple[str, ...],
) -> None:
    options = make_problem(inputs_of({**JOB, "model": model}, stack=stack)).options
    assert (options.loss_paths, options.attentions, options.optimizers_8bit) == (loss_paths, attentions, eight_bit)


def test_files_of_a_run() -> None:
    plain = Choice(method="full", loss_path="fused", recompute="full")
    assert run_file_names(plain, 1) == ["train.py", "accelerate.yaml", "command.sh", "job.yaml", "plan.json"]
    zero = run_file_names(replace(plain, sharding="zero2", dp_shard=16), 2)
    assert zero == ["train.py", "accelerate.yaml", "deepspeed.json", "command.sh", "job.yaml", "plan.json", "slurm.sh"]
    assert [method_label(m) for m in ("full", "lora", "qlora")] == ["full training", "LoRA", "QLoRA"]


def test_one_choice_that_the_libraries_refuse_is_still_judged() -> None:
    """Published runs used settings that no longer go together: the ledger explains their bytes all the same."""
    one = choose_one(inputs_of({**JOB, "global_batch": 8, "pins": {"sharding": "none", "gpus": 8}}, stack=STACK))
    assert one.refusals
    assert one.candidate.choice.sharding == "none"
    assert one.problem.judge.memory_of(one.candidate).allocated_bytes > 0
    legal = choose_one(inputs_of(JOB, stack=STACK))
    assert legal.refusals == ()
    assert legal.candidate.choice == FITS.result.fitting[0].choice
