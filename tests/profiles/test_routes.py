from __future__ import annotations

from typing import Any

import pytest

from profiles.routes import PRODUCTS, find_route, load_routes, spelled_out
from profiles.stacks import load_packages

F4 = {
    "bf16": (18_800, 0.0),
    "mxfp4-sr": (37_900, None),
    "mxfp4-sr-h32": (37_200, 2.11),
    "nvfp4-te-last4": (27_100, 0.87),
}
"""The source's own summary: tokens/s of one GPU, and the final training loss above bf16's in percent, where given."""


def test_every_route_is_whole() -> None:
    routes = load_routes()
    assert routes[0].id == "bf16"
    assert len({route.id for route in routes}) == len(routes)
    for route in routes:
        assert set(route.operands) == set(PRODUCTS)
        texts = (route.name, route.resolved, route.waits, route.rounding, route.layouts, route.why_capability)
        assert all((*texts, route.loss, route.source, route.memory.note, route.time.note)), route.id
        assert all(spelled_out(route.source).count(mark) == 0 for mark in ("[te]", "[ao]", "[acc]", "[fp4]"))
        assert set(route.packages) <= set(load_packages()), route.id
        assert (route.status == "reference") == (not route.packages and route.id != "bf16"), route.id
        assert (route.launch == "none") == (route.status != "with"), route.id
        for row in route.published:
            assert row.caveat, (route.id, row.gpu)
            assert row.source
            assert row.tokens_per_s or row.speedup


def test_the_published_table_is_there() -> None:
    """Tokens/s to the hundred, and the loss, of the four routes that its summary names."""
    for name, (tokens_per_s, loss) in F4.items():
        row = find_route(name).published[0]
        assert row.tokens_per_s == pytest.approx(tokens_per_s, abs=50)
        assert loss is None or row.loss_percent == loss
        assert "Llama-3-8B" in row.model
        assert "160 B" in row.model


def best(field: str) -> str:
    """The route of the FP4 source with the best downstream accuracy, or the least held-out loss."""
    rows = [(route.id, route.published[0]) for route in load_routes() if route.published and route.published[0].tasks]
    if field == "held-out":
        return min(rows, key=lambda row: row[1].held_out_nll or 9.0)[0]
    return max(rows, key=lambda row: row[1].tasks[field])[0]


def test_rankings_change_by_check() -> None:
    assert best("held-out") == "mxfp4-sr-h32"
    assert best("MMLU") == "bf16"
    assert best("HellaSwag") == best("ARC-C") == "mxfp4-sr-h32"
    assert best("WinoGrande") not in ("bf16", "mxfp4-sr-h32")


def described(name: str, product: str) -> list[dict[str, Any]]:
    return [operand.to_json() for operand in find_route(name).operands[product]]


def test_recipes_name_rounding_and_transform_per_product() -> None:
    forward, input_gradient, weight_gradient = (described("mxfp4-sr-h32", product) for product in PRODUCTS)
    assert [q["stochastic"] for q in forward + input_gradient + weight_gradient] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert [q["hadamard"] for q in forward + input_gradient + weight_gradient] == [0, 0, 0, 0, 32, 32]
    assert {q["block"] for q in forward} == {32}
    assert {q["scale"] for q in forward} == {"e8m0"}
    # NVIDIA's recipe rounds both uses of the output gradient by chance, and turns with a width of 16.
    assert [q["stochastic"] for q in described("nvfp4-te", "wgrad")] == [True, False]
    assert [q["hadamard"] for q in described("nvfp4-te", "wgrad")] == [16, 16]
    assert find_route("nvfp4-te-last4").keep_last == 4
    # One scale for the tensor waits for it; a tile's does not.
    assert {q["second"] for q in described("nvfp4-global", "input")} == {"tensor"}
    assert described("nvfp4-cta", "input")[0]["second"] == "tile"


def test_the_weight_gradient_may_stay_in_bf16() -> None:
    assert find_route("fp8-ao-rowwise-gw-hp").low_products == 2
    assert find_route("fp8-ao-rowwise").low_products == 3
    assert find_route("bf16").low_products == 0


def test_an_unknown_route_is_told_what_there_is() -> None:
    assert find_route("mxfp4-sr:emulated").id == "mxfp4-sr"
    with pytest.raises(LookupError, match=r"no precision route 'fp5'; known: bf16, fp8-te-delayed"):
        find_route("fp5")
