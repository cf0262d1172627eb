"""Parameters by part and fate, by hand arithmetic on published shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.choice import Method
from planner.memory.blocks import Block, parameter_blocks
from tests.planner.replay import bundled

H, F, KV, V = 4096, 12_288, 1024, 151_936
QWEN3_8B_LINEAR = 2 * H * H + 2 * H * KV + 3 * H * F
"""q and o, k and v, gate, up and down."""
QWEN3_8B_NORMS = 2 * H + 2 * 128
"""Two over the hidden width, one a head for queries and one for keys."""


def test_qwen3_8b_in_full() -> None:
    blocks = parameter_blocks(bundled("Qwen/Qwen3-8B"), "full", 16, "all-linear")
    assert blocks.kinds == (Block(trained=QWEN3_8B_LINEAR + QWEN3_8B_NORMS),)
    assert (blocks.embedding, blocks.head) == (Block(trained=V * H), Block(trained=V * H))
    assert blocks.final_norm == Block(trained=H)
    assert blocks.total.trained == 36 * (QWEN3_8B_LINEAR + QWEN3_8B_NORMS) + 2 * V * H + H == 8_190_735_360
    assert blocks.num_parameters == blocks.total.trainable == 8_190_735_360
    assert blocks.cast_weights == (QWEN3_8B_LINEAR,)


def test_qwen3_8b_with_adapters() -> None:
    """Rank 16 on seven linears: 16 x (in + out) each."""
    adapter = 16 * (2 * (H + H) + 2 * (H + KV) + 3 * (H + F))
    blocks = parameter_blocks(bundled("Qwen/Qwen3-8B"), "lora", 16, "all-linear")
    assert blocks.kinds == (Block(frozen=QWEN3_8B_LINEAR + QWEN3_8B_NORMS, adapter=adapter),)
    assert blocks.total.trainable == 36 * adapter == 43_646_976
    assert blocks.cast_adapters == (adapter,)
    assert blocks.num_parameters == 8_190_735_360 + 43_646_976
    attention = parameter_blocks(bundled("Qwen/Qwen3-8B"), "lora", 16, ("q_proj", "v_proj"))
    assert attention.total.adapter == 36 * 16 * (H + H + H + KV) == 7_667_712


def test_qwen3_8b_quantised() -> None:
    """bitsandbytes replaces the linears of the layers; embedding, head and norms keep their dtype."""
    blocks = parameter_blocks(bundled("Qwen/Qwen3-8B"), "qlora", 16, "all-linear")
    assert blocks.total.quantised == 36 * QWEN3_8B_LINEAR
    assert blocks.total.frozen == 36 * QWEN3_8B_NORMS + 2 * V * H + H
    assert blocks.total.trained == 0


def test_a_tied_head_is_counted_once() -> None:
    architecture = bundled("Qwen/Qwen3-4B")
    assert architecture.tied
    blocks = parameter_blocks(architecture, "full", 16, "all-linear")
    assert blocks.head == Block()
    assert blocks.embedding == Block(trained=151_936 * 2560)
    assert blocks.num_parameters == 4_022_468_096


def test_experts_are_frozen_stacks_that_bitsandbytes_does_not_replace() -> None:
    architecture = bundled("Qwen/Qwen3-30B-A3B")
    experts = 128 * 3 * 2048 * 768
    blocks = parameter_blocks(architecture, "qlora", 16, ("q_proj",))
    (kind,) = blocks.kinds
    assert kind.quantised == 2 * 2048 * 4096 + 2 * 2048 * 512
    assert kind.frozen >= experts
    # Autocast copies the experts as it copies linears.
    assert blocks.cast_weights == (kind.quantised + experts,)


def test_adapters_of_experts_are_multiplied_through_views_that_autocast_does_not_cache() -> None:
    blocks = parameter_blocks(bundled("Qwen/Qwen3-30B-A3B"), "lora", 16, "all-linear")
    # q and o over 4,096, k and v over 512; the rest of the adapters are the experts' and the router's.
    attention = 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert blocks.cast_adapters == (attention,)
    assert blocks.kinds[0].adapter > attention


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_vision_towers_train_in_full_only(method: Method) -> None:
    architecture = bundled("google/gemma-3-4b-pt")
    tower = replace(architecture, vision_parameters=1_000_000, vision_linears=())
    plain = replace(architecture, vision_parameters=0, vision_linears=())
    more = parameter_blocks(tower, method, 16, ("q_proj",)).other
    less = parameter_blocks(plain, method, 16, ("q_proj",)).other
    added = Block(trained=1_000_000) if method == "full" else Block(frozen=1_000_000)
    assert more == less + added


def test_adapters_outside_the_layers() -> None:
    architecture = bundled("Qwen/Qwen3-8B")
    blocks = parameter_blocks(architecture, "lora", 8, ("q_proj", "lm_head"))
    assert blocks.other.adapter == 8 * (H + V)


def test_blocks_add_and_repeat() -> None:
    block = Block(trained=1, frozen=2, quantised=3, adapter=4)
    assert block + block == block.times(2) == Block(trained=2, frozen=4, quantised=6, adapter=8)
    assert block.trainable == 5


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "google/gemma-3-1b-pt", "Qwen/Qwen3.5-4B", "openai/gpt-oss-20b"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_parts_make_the_whole(model: str, method: Method) -> None:
    architecture = bundled(model)
    blocks = parameter_blocks(architecture, method, 16, "all-linear")
    layers = Block()
    for index in architecture.order:
        layers = layers + blocks.kinds[index]
    total = layers + blocks.embedding + blocks.final_norm + blocks.head + blocks.other
    assert total == blocks.total
    assert blocks.num_parameters - blocks.total.adapter == architecture.num_parameters
