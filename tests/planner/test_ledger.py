"""The ledger adds up: groups to all parameters, their bytes to the phase, parts to the phase's total."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.ledger.ledger import GROUPS, group_blocks, ledger, state_source
from planner.memory.phases import PARTS
from tests.planner.replay import bundled, problem_of

FULL = Choice(method="full", loss_path="fused", recompute="full")
ROLES = ("weights", "gradients", "master", "moment1", "moment2")


def document(choice: Choice, model: str = "Qwen/Qwen3-8B", **job: Any) -> dict[str, Any]:
    values = {"model": model, "method": choice.method, "machine": "8xH100-80GB", "seq_len": 4096, **job}
    problem = problem_of(values, stack={"trl": "1.16.0"})
    return ledger(problem, problem.judge.judge(choice, "nothing"))


CASES: tuple[tuple[str, Choice], ...] = (
    ("Qwen/Qwen3-8B", FULL),
    ("Qwen/Qwen3-4B", replace(FULL, sharding="fsdp", dp_shard=8, weights="bf16")),
    ("Qwen/Qwen3-8B", replace(FULL, sharding="zero3", dp_shard=8, optimizer="adamw_torch")),
    ("Qwen/Qwen3-8B", replace(FULL, sharding="zero2", dp_shard=8, offload=frozenset({"optimizer"}))),
    ("Qwen/Qwen3-8B", replace(FULL, sharding="fsdp", dp_shard=8, offload=frozenset({"optimizer", "params"}))),
    ("google/gemma-3-4b-pt", replace(FULL, method="lora", weights="bf16")),
    ("Qwen/Qwen3-30B-A3B", replace(FULL, method="qlora", weights="bf16", sharding="ddp", dp_replicate=8)),
    ("openai/gpt-oss-20b", replace(FULL, method="lora", weights="bf16", attention="eager", recompute="none")),
    ("Qwen/Qwen3.5-4B", replace(FULL, method="qlora", weights="bf16", sharding="fsdp", dp_shard=4, cp=2)),
)
IDS = [f"{model}-{choice.method}-{choice.sharding}" for model, choice in CASES]


@pytest.mark.parametrize(("model", "choice"), CASES, ids=IDS)
def test_groups_make_all_parameters(model: str, choice: Choice) -> None:
    found = document(choice, model)
    blocks = problem_of({"model": model, "method": choice.method, "machine": "8xH100-80GB"}).judge.memory.blocks(
        choice.method
    )
    assert sum(group["parameters"] for group in found["groups"]) == blocks.num_parameters
    assert sum(group["trainable"] for group in found["groups"]) == blocks.total.trainable
    names = [group["group"] for group in found["groups"]]
    assert names == [name for name in (*GROUPS, "adapters") if name in names]


@pytest.mark.parametrize(("model", "choice"), CASES, ids=IDS)
def test_bytes_of_groups_make_the_phase(model: str, choice: Choice) -> None:
    found = document(choice, model)
    step = {
        part["part"]: part["bytes"] for phase in found["phases"] if phase["name"] == "step" for part in phase["parts"]
    }
    for role in ROLES:
        total = sum(group["bytes"][role] for group in found["groups"])
        assert total == pytest.approx(step.get(role, 0), abs=len(found["groups"]))


@pytest.mark.parametrize(("model", "choice"), CASES, ids=IDS)
def test_parts_make_the_phase_and_say_how(model: str, choice: Choice) -> None:
    found = document(choice, model)
    for phase in found["phases"]:
        assert sum(part["bytes"] for part in phase["parts"]) == phase["bytes"]
        for part in phase["parts"]:
            assert part["part"] in PARTS
            assert part["bytes"] != 0
            assert part["formula"] and part["source"] and part["text"]
    assert max(phase["bytes"] for phase in found["phases"]) == pytest.approx(
        found["memory"]["device_bytes"], abs=65 * 2**20
    )


def formula(found: dict[str, Any], phase: str, part: str) -> str:
    (one,) = (p for x in found["phases"] if x["name"] == phase for p in x["parts"] if p["part"] == part)
    text: str = one["formula"]
    return text


def size(found: dict[str, Any], phase: str, part: str) -> int:
    (one,) = (p["bytes"] for x in found["phases"] if x["name"] == phase for p in x["parts"] if p["part"] == part)
    return int(one)


def number_before(text: str, words: str) -> int:
    return int(text[: text.index(words)].split()[-1].replace(",", ""))


def test_formulas_hold_their_numbers() -> None:
    sharded = document(replace(FULL, sharding="fsdp", dp_shard=8))
    assert formula(sharded, "step", "moment1") == "8,190,735,360 trained x 4 B / 8 GPUs"
    assert formula(sharded, "backward", "gradients").startswith("up to 8,190,735,360 trained x 4 B / 8 GPUs, as far as")
    assert formula(sharded, "loss", "loss") == "fused: 4,096 tokens x 151,936 vocabulary, hidden 4,096"
    saved = formula(sharded, "loss", "saved_activations")
    assert saved.startswith("layer inputs of 36 layers x 4,096 tokens: 36 x 33,554,432 B + ")
    # An input of a layer is 4,096 tokens of 4,096 values in 2 bytes, and the numbers make up the part.
    assert 36 * 33_554_432 + number_before(saved, " B outside") == size(sharded, "loss", "saved_activations")
    assert formula(sharded, "loss", "context") == "500.0 MiB of CUDA context + 800.0 MiB of communicators"
    assert formula(sharded, "loss", "slack") == "3% of what is allocated, reserved beside it"
    ring = document(replace(FULL, sharding="fsdp", cp=8), seq_len=131_072)
    assert formula(ring, "backward", "gather").endswith("keys and values of the ring")
    packed = document(replace(FULL, method="qlora", weights="bf16"))
    assert formula(packed, "forward", "weights") == (
        "1,244,967,936 frozen x 2 B + 6,945,767,424 quantised x 0.5625 B + 43,646,976 adapters x 2 B"
    )


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"recompute": "none"}, "every layer's saved tensors of 36 layers"),
        ({"recompute": "selective"}, "layer inputs and attention outputs of 36 layers"),
        ({"recompute": "every_2"}, "layer inputs of 36 layers"),
        (
            {"offload": frozenset({"activations"})},
            "layer inputs of 36 layers x 4,096 tokens, 4 layers of them on the card",
        ),
    ],
)
def test_what_is_saved_in_words(changes: dict[str, Any], kept: str) -> None:
    assert formula(document(replace(FULL, **changes)), "loss", "saved_activations").startswith(kept)


def test_the_step_is_the_optimizers_and_no_trace_of_layers() -> None:
    found = document(replace(FULL, sharding="zero2", dp_shard=8))
    (step,) = (p for x in found["phases"] if x["name"] == "step" for p in x["parts"] if p["part"] == "recompute")
    assert step["formula"] == "the optimizer's own copies" and step["source"].startswith("torch.optim, deepspeed")


def test_what_is_offloaded_is_said_to_be_elsewhere() -> None:
    found = document(replace(FULL, sharding="fsdp", dp_shard=8, offload=frozenset({"optimizer", "params"})))
    attention = next(group for group in found["groups"] if group["group"] == "attention")
    assert set(attention["bytes"].values()) == {0}
    assert attention["formula"].endswith("trained x 4 B / 8 GPUs, on the host")


def test_a_reference_model_is_a_group_of_its_own() -> None:
    found = document(replace(FULL, weights="bf16", mixed_precision="no"), trainer="dpo")
    reference = found["groups"][-1]
    assert (reference["group"], reference["parameters"], reference["trainable"]) == ("reference", 8_190_735_360, 0)
    assert reference["bytes"]["weights"] == 2 * 8_190_735_360
    assert formula(found, "forward", "weights") == "8,190,735,360 trained x 2 B + 8,190,735,360 frozen x 2 B"
    step = next(phase for phase in found["phases"] if phase["name"] == "step")
    weights = next(part["bytes"] for part in step["parts"] if part["part"] == "weights")
    assert weights == sum(group["bytes"]["weights"] for group in found["groups"])


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ("none", "autocast on one GPU"),
        ("ddp", "DDP"),
        ("zero1", "deepspeed"),
        ("zero3", "deepspeed"),
        ("fsdp", "accelerate"),
        ("hsdp", "accelerate"),
        ("fsdp1", "accelerate"),
    ],
)
def test_sources_of_states(sharding: Any, words: str) -> None:
    assert words in state_source(replace(FULL, sharding=sharding))


def test_quantised_groups() -> None:
    """bitsandbytes packs attention and MLP; embedding, head and norms stay whole."""
    blocks = group_blocks(bundled("Qwen/Qwen3-8B"), "qlora", 16, "all-linear")
    assert {name for name, block in blocks.items() if block.quantised} == {"attention", "mlp"}
    assert blocks["attention"].quantised == 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert blocks["attention"].frozen == 0
    assert blocks["adapters"].adapter == 43_646_976


def test_the_document_names_itself() -> None:
    found = document(FULL)
    assert found["schema"] == "trlfit.ledger/1"
    assert found["choice"] == FULL.to_json()
    assert found["time"]["step_s"] > 0
    # 16 bytes of 8.2 billion parameters on one card of 80 GiB.
    assert found["fits"] is False
