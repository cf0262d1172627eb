"""The walk through a step against a plain one that visits every layer, and each phase by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from planner.choice import Choice
from planner.memory.activations import ActivationsAt, LayerAt, ModeAt, activations_at
from planner.memory.blocks import Block, Blocks
from planner.memory.coefficients import Affine, Coefficients, LayerBytes, ModeBytes
from planner.memory.depth import OFFLOAD_BANDS, Depth, depth_of, recomputed_layers
from planner.memory.loss import LossBytes
from planner.memory.phases import (
    PARTS,
    LayerWalk,
    LayerWalker,
    Moment,
    States,
    held_bytes,
    loss_moment,
    phases,
    resident_states,
    step_moment,
)
from planner.memory.sharding import NOTHING_BESIDE, Beside, ShardingBytes
from planner.memory.states import role_table

RECOMPUTES = ("none", "full", "selective", "every_2", "every_3", "every_4")
CHOICE = Choice(method="full", loss_path="fused", recompute="full")


def random_layer(r: random.Random) -> LayerAt:
    def mode() -> ModeAt:
        backward = r.randrange(1000)
        return ModeAt(r.randrange(300), r.randrange(1000), backward, r.randrange(backward + 1))

    return LayerAt(mode(), mode(), mode())


def random_step(seed: int) -> tuple[tuple[int, ...], str, bool, ActivationsAt, States, ShardingBytes]:
    r = random.Random(seed)
    kinds = r.choice((1, 1, 2, 3))
    period = tuple(r.randrange(kinds) for _ in range(r.randrange(1, 7)))
    order = (period * 40)[: r.randrange(1, 63)]
    if r.random() < 0.3:
        order = tuple(r.randrange(kinds) for _ in range(r.randrange(1, 30)))

    def sizes(limit: int) -> tuple[int, ...]:
        return tuple(r.randrange(limit) for _ in range(kinds))

    gradients = sizes(200)
    states = States(
        rest={"weights": 0.0, "master": 0.0, "moment1": 0.0, "moment2": 0.0},
        rest_bytes=0.0,
        all_gradients=float(sum(gradients[kind] for kind in order) + 500),
        layer_gradients=tuple(map(float, gradients)),
        embedding_gradients=float(r.randrange(3000)),
        tail_gradients=float(r.randrange(300)),
        cast_bytes=tuple(map(float, sizes(100))) if r.random() < 0.5 else (0.0,) * kinds,
        step_bytes=0.0,
    )
    shard = ShardingBytes(
        layer_gather=sizes(400),
        layer_reduce=sizes(400),
        ring=sizes(600) if r.random() < 0.5 else (0,) * kinds,
        root_forward=r.randrange(200),
        root_backward=r.randrange(200),
        rest_buckets=r.randrange(200),
        backward_buckets=r.randrange(200),
        last_gradients=r.randrange(200),
        last_reduce=r.randrange(4000),
    )
    if r.random() < 0.5:
        shard = replace(shard, beside=random_beside(r, order), last_gather=r.randrange(400))
    kept_outside = r.randrange(100) if r.random() < 0.5 else None
    at = ActivationsAt(tuple(random_layer(r) for _ in range(kinds)), r.randrange(100), r.randrange(100), kept_outside)
    return order, r.choice(RECOMPUTES), r.random() < 0.4, at, states, shard


def random_beside(r: random.Random, order: tuple[int, ...]) -> tuple[Beside, ...]:
    """As FSDP2 makes it: by the layer's kind and its neighbours', what was reduced before adding up."""
    whole, trained = ([r.randrange(400) for _ in range(max(order) + 1)] for _ in range(2))
    outside, kept = r.randrange(2000), r.choice((0, 3))
    found: list[Beside] = []
    for index in range(len(order)):
        below, above = order[index - 1], order[(index + 1) % len(order)]
        reduced = trained[above] if index + 1 < len(order) else outside
        found.append(
            Beside(
                forward_gather=whole[order[index]],
                forward_copy=whole[below] if index else outside,
                backward_gather=whole[below] if index else outside,
                reduced=reduced + kept * (len(order) - index),
            )
        )
    return tuple(found)


def every_layer(
    order: tuple[int, ...],
    recompute: str,
    offloads: bool,
    at: ActivationsAt,
    states: States,
    shard: ShardingBytes,
    *,
    rows: int,
    tied: bool,
    accumulates: bool,
) -> tuple[float, float, float]:
    """(forward, backward, saved) of a walk that looks at each layer in turn, as one would write it down first."""
    again = [recompute in ("full", "selective")] * len(order)
    if recompute.startswith("every_"):
        again = [index % int(recompute[-1]) == 0 for index in range(len(order))]
    modes, kept = list[ModeAt](), list[int]()
    for index, kind in enumerate(order):
        layer = at.kinds[kind]
        mode = layer.none if not again[index] else layer.selective if recompute == "selective" else layer.full
        modes.append(mode)
        kept.append(mode.kept if not offloads or index >= len(order) - 4 else 0)
    persisting = states.all_gradients if accumulates else 0.0
    forward = backward = 0.0
    saved, casts = float(at.model_saved), 0.0
    if at.model_saved_none is not None and not any(again):
        saved = float(at.model_saved_none)
    for index, kind in enumerate(order):
        casts += states.cast_bytes[kind]
        beside = shard.beside[index] if shard.beside else NOTHING_BESIDE
        running = modes[index].forward + shard.ring[kind] * rows
        if beside.forward_copy:
            running = max(running, at.kinds[kind].full.kept + beside.forward_copy)
        live = saved + running + shard.layer_gather[kind] + beside.forward_gather + casts
        forward = max(forward, persisting + live + shard.root_forward + shard.rest_buckets)
        saved += kept[index]
    all_saved = saved
    casts = sum(states.cast_bytes[kind] for index, kind in enumerate(order) if not again[index])
    gradients = 0.0 if accumulates else states.tail_gradients
    for index in reversed(range(len(order))):
        kind = order[index]
        moment = max(modes[index].backward, modes[index].attention_backward + shard.ring[kind] * rows)
        live = saved + gradients + moment + casts + shard.layer_gather[kind] + shard.layer_reduce[kind]
        live += shard.beside[index].backward_gather + shard.beside[index].reduced if shard.beside else 0
        buckets = shard.rest_buckets + shard.backward_buckets
        backward = max(backward, persisting + live + shard.root_backward + buckets)
        saved -= kept[index]
        if not accumulates:
            gradients += states.layer_gradients[kind]
        if not again[index]:
            casts -= states.cast_bytes[kind]
    last = persisting if accumulates else gradients + states.embedding_gradients * (2 if tied else 1)
    reduced = shard.rest_buckets + shard.backward_buckets + shard.last_reduce
    whole = shard.root_backward if shard.last_gather is None else shard.last_gather
    backward = max(backward, last + shard.last_gradients + whole + reduced)
    return forward, backward, all_saved + at.final_norm


@pytest.mark.parametrize("block", range(8))
def test_a_handful_of_layers_stands_for_all(block: int) -> None:
    for seed in range(block, 1600, 8):
        order, recompute, offloads, at, states, shard = random_step(seed)
        rows, tied, accumulates = 1 + seed % 3, seed % 2 == 0, seed % 5 == 0
        depth = depth_of(order, recompute, offloads, neighbours=bool(shard.beside))
        walker = LayerWalker(depth, states, shard, tied=tied, accumulates=accumulates)
        walk = walker.at(at, rows)
        expected = every_layer(
            order, recompute, offloads, at, states, shard, rows=rows, tied=tied, accumulates=accumulates
        )
        found = (walk.forward_bytes, walk.backward_bytes, walk.saved)
        assert found == pytest.approx(expected), seed
        assert (sum(walk.forward), sum(walk.backward)) == pytest.approx(expected[:2]), seed


def test_few_stations_whatever_the_depth() -> None:
    short, long = (depth_of((0,) * n, "full", False) for n in (8, 80))
    assert len(short.backward) == len(long.backward) == 2
    assert long.totals == (80,)
    # Gemma's five sliding and one full, every fourth recomputed: a period of twelve at each end.
    gemma = depth_of((0, 0, 0, 0, 0, 1) * 10, "every_4", False)
    assert len(gemma.backward) == 24
    # Where neighbours count, the first and the last layer stand for themselves.
    for place, layers in (("backward", [79, 78, 1, 0]), ("forward", [0, 79])):
        stations = getattr(depth_of((0,) * 80, "full", False, neighbours=True), place)
        assert [station.place for station in stations] == layers
    assert sum(gemma.totals) == 60


def test_offload_leaves_the_last_four_inputs_on_the_card() -> None:
    depth = depth_of((0,) * 36, "full", True)
    by_place = dict(zip((shape.on_card for shape in depth.shapes), depth.totals, strict=True))
    assert by_place == {False: 32, True: OFFLOAD_BANDS}
    # A model with fewer layers than bands keeps them all.
    assert depth_of((0, 0, 0), "full", True).totals == (3,)
    assert depth_of((0, 0, 0), "full", True).shapes[0].on_card


def test_every_nth_layer_counts_from_the_first() -> None:
    assert recomputed_layers("every_3", 7) == ["full", "none", "none", "full", "none", "none", "full"]
    assert recomputed_layers("selective", 2) == ["selective"] * 2
    assert recomputed_layers("none", 2) == ["none"] * 2


FLAT = ModeAt(10, 100, 200, 50)
AT = ActivationsAt((LayerAt(FLAT, FLAT, FLAT),), 3, 7)
NOTHING = ShardingBytes(layer_gather=(0,), layer_reduce=(0,), ring=(0,))


def states(**changes: Any) -> States:
    values: dict[str, Any] = {
        "rest": {"weights": 40.0, "master": 0.0, "moment1": 40.0, "moment2": 40.0},
        "rest_bytes": 120.0,
        "all_gradients": 90.0,
        "layer_gradients": (20.0,),
        "embedding_gradients": 30.0,
        "tail_gradients": 0.0,
        "cast_bytes": (0.0,),
        "step_bytes": 5.0,
        **changes,
    }
    return States(**values)


def walk(
    depth: Depth, held: States, shard: ShardingBytes = NOTHING, *, tied: bool = False, accumulates: bool = False
) -> LayerWalk:
    return LayerWalker(depth, held, shard, tied=tied, accumulates=accumulates).at(AT, 1)


THREE = depth_of((0, 0, 0), "full", False)


def test_forward_stacks_up_and_backward_walks_down() -> None:
    found = walk(THREE, states())
    # Two layers kept below the third, which is at work.
    assert found.forward == Moment(saved_activations=3 + 2 * 10, recompute=100)
    # The first layer's backward: its own input left, two layers' gradients made. 3 + 10 + 40 + 200 > 3 + 30 + 200.
    assert found.backward == Moment(gradients=40, saved_activations=13, recompute=200)
    assert found.saved == 3 + 30 + 7


def test_heavy_inputs_make_the_last_layer_the_worst() -> None:
    found = walk(THREE, states(layer_gradients=(4.0,)))
    assert found.backward == Moment(gradients=0, saved_activations=33, recompute=200)


def test_accumulated_gradients_live_through_the_whole_step() -> None:
    found = walk(THREE, states(), accumulates=True)
    assert found.forward.gradients == found.backward.gradients == 90
    assert found.backward.saved_activations == 33
    loss = LossBytes(50, 60, "", "")
    walker = LayerWalker(THREE, states(), NOTHING, tied=False, accumulates=True)
    assert loss_moment(walker, found, loss, NOTHING, 90.0) == Moment(gradients=90, saved_activations=40, loss=60)


def test_a_tied_embeddings_gradient_is_added_out_of_place() -> None:
    light = ActivationsAt((LayerAt(*(ModeAt(0, 0, 0, 0),) * 3),), 0, 0)

    def peak(tied: bool) -> Moment:
        return LayerWalker(THREE, states(), NOTHING, tied=tied, accumulates=False).at(light, 1).backward

    # All layers' 60, the embedding's 30; tied, the head's gradient that exists, the new one, and 0 saved.
    assert peak(False).gradients == 60 + 30
    assert peak(True).gradients == 60 + 2 * 30


def test_autocast_keeps_copies_of_what_is_not_recomputed() -> None:
    held = states(cast_bytes=(6.0,))
    recomputed = walk(THREE, held)
    assert (recomputed.forward.casts, recomputed.backward.casts) == (18, 0)
    kept = walk(depth_of((0, 0, 0), "none", False), held)
    # Backward reaches the first layer with one copy left, or the last with three.
    assert kept.backward.casts in (6, 18)
    walker = LayerWalker(depth_of((0, 0, 0), "none", False), held, NOTHING, tied=False, accumulates=False)
    forward_heavy = loss_moment(walker, kept, LossBytes(50, 50, "", ""), NOTHING, 0.0)
    assert (forward_heavy.casts, forward_heavy.loss) == (18, 50)


def test_loss_takes_the_higher_of_its_two_moments() -> None:
    held = states(cast_bytes=(6.0,))
    walker = LayerWalker(THREE, held, NOTHING, tied=False, accumulates=False)
    layers = walker.at(AT, 1)
    # 18 bytes of copies live in forward and none in backward.
    assert loss_moment(walker, layers, LossBytes(50, 60, "", ""), NOTHING, 0.0)[3:] == (50, 0, 0, 18)
    assert loss_moment(walker, layers, LossBytes(50, 69, "", ""), NOTHING, 0.0)[3:] == (69, 0, 0, 0)


def test_fsdp2_gathers_ahead_where_full_logits_meet_the_head() -> None:
    """Softmax with the head alone; the head's backward with the last layer; then the head's gradient is reduced."""
    shard = replace(
        NOTHING,
        beside=(NOTHING_BESIDE,) * 3,
        root_loss=30,
        loss_backward=20,
        loss_copy=4,
        loss_ahead=5,
        tail_gather=6,
        tail_reduce=70,
    )
    walker, found = LayerWalker(THREE, states(), shard, tied=False, accumulates=False), walk(THREE, states(), shard)

    def moment(forward: int, backward: int, at_head: int) -> tuple[float, float, float]:
        found_moment = loss_moment(walker, found, LossBytes(forward, backward, "", "", at_head), shard, 0.0)
        return found_moment.loss, found_moment.gather, found_moment.buckets

    assert moment(0, 100, 90) == (100, 20, 0)
    assert moment(0, 100, 98) == (98, 25, 0)
    # A loss inside the model comes after the gather.
    assert moment(0, 100, 0) == (100, 25, 0)
    assert moment(90, 90, 1) == (90, 30, 0)
    assert moment(10, 40, 1) == (0, 6, 70)
    small = replace(shard, tail_reduce=10)
    assert loss_moment(walker, found, LossBytes(3, 3, "", ""), small, 0.0).gather == 34


def test_the_ring_comes_on_top_of_attention_alone() -> None:
    # 50 of attention and 140 of ring are below the MLP's 200; 160 are not.
    small, large = (
        walk(THREE, states(), ShardingBytes(layer_gather=(0,), layer_reduce=(0,), ring=(ring,))).backward
        for ring in (140, 160)
    )
    assert (small.recompute, small.gather) == (200, 0)
    assert (large.recompute, large.gather) == (50, 160)


def test_step_holds_gradients_and_the_optimizers_copies() -> None:
    shard = ShardingBytes(layer_gather=(0,), layer_reduce=(0,), ring=(0,), rest_buckets=11, step_bytes=17)
    assert step_moment(CHOICE, states(), shard) == Moment(gradients=90, recompute=22, buckets=11)
    hosted = replace(CHOICE, offload=frozenset({"optimizer"}))
    assert step_moment(hosted, states(step_bytes=0.0), shard).recompute == 0
    # What stage 3 gathers when the optimizer is done counts where that is more than the optimizer's own 22.
    assert step_moment(CHOICE, states(), replace(shard, step_gather=21)).gather == 0
    ends = step_moment(CHOICE, states(), replace(shard, step_gather=23))
    assert ends == Moment(gradients=90, gather=23, buckets=11)


def test_phases_in_order_and_in_parts() -> None:
    shard = ShardingBytes(layer_gather=(0,), layer_reduce=(0,), ring=(0,), rest_buckets=11, load_bytes=9, save_bytes=13)
    moments = {name: Moment(gradients=1) for name in ("forward", "loss", "backward", "step")}
    found = phases(states(), shard, moments)
    assert [phase.name for phase in found] == ["load", "forward", "loss", "backward", "step", "save"]
    assert all(tuple(phase.parts) == PARTS for phase in found)
    assert found[0].bytes == 40 + 9
    assert found[2].bytes == 120 + 1
    assert found[5].parts["gather"] == 13
    assert found[5].bytes == 120 + 13 + 11


BLOCKS = Blocks(
    embedding=Block(trained=100),
    kinds=(Block(trained=10),),
    final_norm=Block(trained=2),
    head=Block(),
    other=Block(),
    cast_weights=(8,),
    cast_adapters=(0,),
    total=Block(trained=132),
)


def resident(choice: Choice, *, tied: bool = True) -> States:
    roles = role_table(choice, "nf4")
    return resident_states(choice, BLOCKS, roles, held_bytes(BLOCKS.total, roles), tied=tied)


def test_states_at_rest_of_fp32_training() -> None:
    found = resident(CHOICE)
    assert found.rest == {"weights": 528, "master": 0, "moment1": 528, "moment2": 528}
    assert (found.rest_bytes, found.all_gradients) == (1584, 528)
    assert found.layer_gradients == (40,)
    # A tied embedding is the head: its gradient is there from the start of backward.
    assert (found.embedding_gradients, found.tail_gradients) == (400, 408)
    assert resident(CHOICE, tied=False).tail_gradients == 8
    assert resident(replace(CHOICE, sharding="fsdp", dp_shard=2)).tail_gradients == 4
    assert found.cast_bytes == (16,)


@pytest.mark.parametrize(
    ("changes", "casts"),
    [
        ({"weights": "bf16"}, 0),
        ({"mixed_precision": "no"}, 0),
        ({"sharding": "fsdp", "dp_shard": 2}, 0),
        ({"sharding": "ddp", "dp_replicate": 2}, 16),
    ],
)
def test_casts_are_of_fp32_weights_under_autocast(changes: dict[str, Any], casts: float) -> None:
    assert resident(replace(CHOICE, **changes)).cast_bytes == (casts,)


@pytest.mark.parametrize(
    ("changes", "casts"),
    [
        # Five of nine adapter weights in 2 bytes, those of experts not; under fp32 weights beside eight of the base.
        ({"method": "lora", "weights": "bf16"}, 10),
        ({"method": "lora", "weights": "fp32"}, 26),
        ({"method": "lora", "weights": "bf16", "mixed_precision": "no"}, 0),
        ({"method": "qlora", "weights": "bf16"}, 0),
    ],
)
def test_casts_of_adapters_that_are_held_in_fp32(changes: dict[str, Any], casts: float) -> None:
    choice = replace(CHOICE, **changes)
    blocks = replace(BLOCKS, kinds=(Block(frozen=10, adapter=9),), cast_adapters=(5,))
    roles = role_table(choice, "nf4")
    assert resident_states(choice, blocks, roles, held_bytes(blocks.total, roles), tied=True).cast_bytes == (casts,)


def test_offload_empties_the_card() -> None:
    optimizer = resident(replace(CHOICE, offload=frozenset({"optimizer"})))
    assert optimizer.rest == {"weights": 528, "master": 0, "moment1": 0, "moment2": 0}
    both = resident(replace(CHOICE, offload=frozenset({"optimizer", "params"})))
    assert both.rest_bytes == both.all_gradients == both.embedding_gradients == both.tail_gradients == 0


def test_foreach_copies_every_local_parameter() -> None:
    assert resident(replace(CHOICE, optimizer="adamw_torch")).step_bytes == 528
    assert resident(CHOICE).step_bytes == 0
    hosted = replace(CHOICE, optimizer="adamw_torch", offload=frozenset({"optimizer"}))
    assert resident(hosted).step_bytes == 0


def test_held_bytes_of_every_fate() -> None:
    choice = replace(CHOICE, method="qlora", weights="bf16", sharding="fsdp", dp_shard=4)
    held = held_bytes(Block(frozen=80, quantised=1600, adapter=40), role_table(choice, "nf4"))
    # 2 bytes of frozen, 0.5 of codes, 2 of adapters over four ranks; every rank has all the scales.
    assert held.weights == (80 * 2 + 1600 * 0.5 + 40 * 2) / 4 + 1600 * 0.0625
    assert (held.gradients, held.master, held.moment1, held.moment2) == (20, 0, 20, 20)


def test_coefficients_at_a_token_count() -> None:
    def mode(k: float) -> ModeBytes:
        return ModeBytes(
            kept=Affine(k), forward=Affine(2 * k, 1), backward=Affine(3 * k, 0, 0.5), attention_backward=Affine(k)
        )

    found = activations_at(
        Coefficients(
            layers=(LayerBytes(none=mode(1), full=mode(2), selective=mode(3)),),
            model_saved=Affine(5),
            final_norm_saved=Affine(6),
            evidence="formula",
            relative_error=0.1,
            source="",
        ),
        tokens=10,
        sequence=4,
    )
    assert found.kinds[0].full == ModeAt(20, 41, 80, 20)
    assert (found.model_saved, found.final_norm, found.model_saved_none) == (50, 60, None)
