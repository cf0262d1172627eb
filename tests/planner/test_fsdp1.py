"""FSDP1 by hand arithmetic on Llama-3-8B, by the real FSDP1 on two pretended ranks, and by what was published."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.choice import Choice
from planner.memory.activations import ActivationsAt, LayerAt, ModeAt
from planner.memory.blocks import parameter_blocks
from planner.memory.depth import depth_of
from planner.memory.phases import LayerWalker, States
from planner.memory.sharding import ShardingBytes, sharding_bytes
from planner.memory.states import trainable_roles
from tests.planner.replay import bundled, rows

CHILD = Path(__file__).with_name("real_fsdp1.py")
CHOICE = Choice(method="lora", loss_path="liger", recompute="full", sharding="fsdp1", dp_shard=2, weights="bf16")
LINEARS = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336
LAYER = LINEARS + 2 * 4096
HEAD = 128_256 * 4096
ROOT = 2 * HEAD + 4096
"""Embedding, head and final norm."""
ADAPTERS = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336))
"""Rank 16 on every linear of one layer."""


def shard(**changes: Any) -> ShardingBytes:
    choice, architecture = replace(CHOICE, **changes), bundled("meta-llama/Llama-3.1-8B")
    blocks = parameter_blocks(architecture, choice.method, 16, "all-linear")
    return sharding_bytes(choice, architecture, blocks, trainable_roles(choice), 4096, True)


def test_the_root_is_whole_from_forward_to_the_end_of_backward() -> None:
    found = shard()
    assert (found.root_forward, found.root_loss, found.root_backward) == (2 * ROOT,) * 3
    # A head that trains has its gradient whole as well.
    assert shard(method="full").root_backward == 2 * ROOT + 2 * (HEAD + 4096)


def test_one_layer_is_gathered_where_checkpoints_hide_the_next() -> None:
    assert shard().layer_gather == (2 * (LAYER + ADAPTERS),)
    assert shard(recompute="none").layer_gather == (4 * (LAYER + ADAPTERS),)
    # Four bits are stored as a quarter of two bytes.
    assert shard(method="qlora").layer_gather == (2 * (LINEARS // 4 + 2 * 4096 + ADAPTERS),)
    assert shard(method="full", weights="fp32", mixed_precision="no").layer_gather == (4 * LAYER,)


@pytest.mark.parametrize(
    ("method", "recompute", "stay"),
    [("lora", "full", True), ("qlora", "full", True), ("lora", "none", False), ("full", "full", False)],
)
def test_inputs_stay_where_a_frozen_layer_is_recomputed(method: Any, recompute: Any, stay: bool) -> None:
    assert shard(method=method, recompute=recompute).inputs_stay is stay


def walk(order: tuple[int, ...], *, stay: bool) -> float:
    """Saved bytes at the worst moment of backward; each kind's input has 100 bytes more than the one before."""
    kinds = max(order) + 1
    layers = tuple(LayerAt(*(ModeAt(100 * (kind + 1), 1, 10, 5),) * 3) for kind in range(kinds))
    states = States(
        rest={},
        rest_bytes=0.0,
        all_gradients=0.0,
        layer_gradients=(0.0,) * kinds,
        embedding_gradients=0.0,
        tail_gradients=0.0,
        cast_bytes=(0.0,) * kinds,
        step_bytes=0.0,
    )
    nothing = (0,) * kinds
    sharding = ShardingBytes(layer_gather=nothing, layer_reduce=nothing, ring=nothing, inputs_stay=stay)
    depth = depth_of(order, "full", False)
    walker = LayerWalker(depth, states, sharding, tied=False, accumulates=False)
    return walker.at(ActivationsAt(layers, model_saved=7, final_norm=0), 1).backward.saved_activations


def test_backward_keeps_inputs_and_their_gradients() -> None:
    """Five layers: at the first all five inputs, and gradients of four, one of which has just arrived there."""
    assert walk((0,) * 5, stay=False) == 7 + 5 * 100
    assert walk((0,) * 5, stay=True) == 7 + 5 * 100 + 3 * 100
    assert walk((0,), stay=True) == 7 + 100
    # At the first of (0, 1, 0, 1): inputs of all four; gradients of a 1, a 0 and a 1, the nearest kind's less one.
    assert walk((0, 1, 0, 1), stay=True) == 7 + 2 * 100 + 2 * 200 + 2 * 200


@pytest.mark.stack
def test_the_real_one() -> None:
    """Eight layers. With the gradient of its own input complete, the n-th of them in backward has n gradients alive."""
    done = subprocess.run([sys.executable, str(CHILD)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    frozen, trained, ahead = json.loads(done.stdout)
    assert [hidden for hidden, _ in frozen] == [8 + n for n in range(1, 9)]
    assert [hidden for hidden, _ in trained] == [8, 7, 6, 5, 4, 3, 2, 1]
    # Without a reentrant checkpoint the next layer is gathered ahead, until there is none.
    layer_bytes = 2 * 64 * 64 * 4
    assert [other - one for (_, other), (_, one) in zip(ahead, frozen, strict=True)] == [layer_bytes] * 7 + [0]


def seen(row_id: str) -> int:
    return next(row["measured"]["bytes"] for row in rows("measured") if row["id"].startswith(row_id))


@pytest.mark.parametrize("several", [("fms-liger-044", "fms-liger-045"), ("fms-liger-076", "fms-liger-077")])
def test_what_was_published_grows_by_thirty_hidden_states(several: tuple[str, str]) -> None:
    """LoRA on 32 layers: 30 gradients of 4,096 bf16 values a token beyond what the same run takes on one card."""
    slopes = [(seen(more) - seen(less)) / (4 * 4096) for less, more in (several, ("fms-liger-012", "fms-liger-013"))]
    assert slopes[0] - slopes[1] == pytest.approx(30 * 4096 * 2, rel=0.001)


def test_what_was_published_stands_on_the_root_and_one_layer() -> None:
    """Two cards, LoRA of rank 16 on attention, at no tokens: half of the states, the root, one layer."""
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    states = (32 * LAYER + ROOT) * 2 / 2 + adapters * 12 / 2
    at_none = seen("fms-liger-044") - (seen("fms-liger-045") - seen("fms-liger-044"))
    assert states + 2 * ROOT + 2 * LAYER == pytest.approx(at_none, rel=0.005)
