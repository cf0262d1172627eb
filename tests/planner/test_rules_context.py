"""What the rules read of a job, a model and a stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.architecture import Architecture, LayerKind
from planner.job import Job
from planner.rules import with_rules
from planner.rules.context import RuleContext, read_context
from planner.rules.model import read_model
from planner.rules.overrides import read_overrides
from planner.stack import Stack
from profiles.releases import newest_known

FULL = LayerKind(name="full", attention="full", linears=(), norm_parameters=0, heads=16, kv_heads=4, head_dim=64)
MODEL = Architecture(
    model="test/llama",
    model_type="llama",
    config={"model_type": "llama"},
    origin="config.json",
    hidden=1024,
    vocab=32_000,
    kinds=(FULL,),
    order=(0, 0),
    tied=False,
    embedding_parameters=0,
    final_norm_parameters=0,
)


def context(stack: Stack | None = None, *, capability: str | None = "9.0", gpus: int = 8, **job: Any) -> RuleContext:
    facts = read_context(
        Job.model_validate({"model": "m", **job}),
        MODEL,
        stack or Stack(),
        device="cuda",
        gpus_per_node=gpus,
        compute_capability=capability,
    )
    return with_rules(facts)


def test_packages_left_out_count_as_the_newest_known() -> None:
    found = context(Stack(versions={"trl": "1.12.0"}))
    assert found.versions["trl"] == "1.12.0"
    assert found.versions["torch"] == newest_known()["torch"]
    assert "deepspeed" not in found.versions
    assert "zero" in found.lacks


def test_packages_said_to_be_absent_stay_absent() -> None:
    found = context(Stack(origin={"peft": "absent"}))
    assert found.lacks["lora"] == "peft >= 0.8.0, the stack has none"


def test_a_local_build_counts_as_its_release() -> None:
    found = context(Stack(versions={"torch": "2.13.0+cpu", "accelerate": "1.14.0"}))
    assert "fsdp2" not in found.lacks
    assert "fsdp2_tied_embeddings" in found.lacks


@pytest.mark.parametrize(("text", "old"), [("7.5", True), ("8.0", False), ("12.0", False), (None, False)])
def test_cards_before_ampere_are_old(text: str | None, old: bool) -> None:
    assert context(capability=text).old_card is old


def test_nodes_multiply_and_a_cpu_has_room_for_one() -> None:
    assert context(nodes=4).num_gpus == 32
    assert context(gpus=0).num_gpus == 1


@pytest.mark.parametrize(
    ("targets", "head"),
    [("all-linear", False), (["q_proj", "v_proj"], False), (["lm_head"], True), (["model.embed_out"], True)],
)
def test_adapters_on_the_head_are_seen(targets: str | list[str], head: bool) -> None:
    assert context(lora={"target_modules": targets}).head_adapter is head


@pytest.mark.parametrize(
    ("trainer", "given", "generations"), [("grpo", {}, 8), ("rloo", {}, 2), ("grpo", {"num_generations": 4}, 4)]
)
def test_generations_follow_the_trainer(trainer: str, given: dict[str, Any], generations: int) -> None:
    assert context(trainer=trainer, trl=given).num_generations == generations


def test_only_rules_that_can_refuse_here_are_asked() -> None:
    asked = {rule.id for _, group in context().rules for rule in group}
    assert "zero-needs-deepspeed" in asked
    assert "cpu-no-sharding" not in asked
    assert "cp-full-attention" not in asked


def test_contexts_of_equal_inputs_are_equal() -> None:
    assert context(seq_len=2048) == context(seq_len=2048)
    assert context(seq_len=2048) != context(seq_len=4096)


def with_config(config: dict[str, object], **changes: Any) -> tuple[str, ...]:
    return read_model(replace(MODEL, config=config, **changes), stacks_experts=True).not_full_attention


def test_layer_types_of_the_config_come_first() -> None:
    assert with_config({"layer_types": ["full_attention", "full_attention"]}) == ()
    assert with_config({"layer_types": ["full_attention", "conv"]}) == ("conv",)
    nested: dict[str, object] = {"text_config": {"layer_types": ["chunked_attention"]}}
    assert with_config(nested, is_composite=True) == ("chunked_attention",)


def test_shapes_speak_where_the_config_is_silent() -> None:
    window = replace(FULL, name="sliding", attention="sliding", window=4096)
    assert with_config({}, kinds=(window,), model_type="mistral") == ("sliding_attention",)
    # Mistral from v0.2 on has no window, and is accepted.
    assert with_config({"sliding_window": None}, model_type="mistral") == ()


def test_families_speak_where_shapes_cannot() -> None:
    assert with_config({}, model_type="deepseek_v32") == ("indexed_attention",)
    assert with_config({}, model_type="deepseek_v3") == ()


def test_a_composite_model_has_its_outer_class_s_limits() -> None:
    inner = replace(MODEL, model_type="gemma3_text", config={"model_type": "gemma3_text"})
    outer = replace(inner, config={"model_type": "gemma3"}, is_composite=True)
    assert read_model(inner, stacks_experts=True).flash
    assert not read_model(outer, stacks_experts=True).flash


def test_overrides_read_only_what_the_trainer_would_take() -> None:
    found = read_overrides(
        {"loss_type": 3, "label_smoothing_factor": True, "model_init_kwargs": "x", "pad_to_multiple_of": 8}
    )
    assert found.loss_type is None
    assert found.label_smoothing == 0
    assert not found.rope
    assert found.pad_to_multiple_of == 8


def test_overrides_default_to_the_trainer_s_own() -> None:
    found = read_overrides({})
    assert found.packing_strategy == "bfd"
    assert found.keeps_max_length
    assert found.use_liger is None
    assert found.kl_batch
