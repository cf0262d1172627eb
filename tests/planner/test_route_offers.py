"""Routes beside a plan: offered with gain and price, kept away with a reason, and never taken by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.text.routes import routes_text
from planner.plan import Plan
from planner.planning import make_plan
from planner.search.search import SAME_SPEED
from profiles.releases import newest_known
from tests.planner.replay import inputs_of

STACK = {**newest_known(), "torchao": "0.18.0", "transformer-engine": "2.20.2"}
JOB: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "seq_len": 4096, "global_batch": 8}


def plan(machine: str, stack: dict[str, str] = STACK, **job: Any) -> dict[str, Any]:
    return make_plan(inputs_of({**JOB, "machine": machine, **job}, stack=stack)).document


def test_a_faster_route_is_offered_and_not_taken() -> None:
    document = plan("8xH100-80GB")
    assert {candidate["choice"]["precision"] for candidate in document["candidates"]} == {"bf16"}
    changes = [change for change in document["changes"] if change["lever"] == "precision route"]
    assert changes
    by_id = {route["route"]: route for route in document["routes"]}
    for change in changes:
        route = by_id[change["candidate"]["choice"]["precision"]]
        assert change["flags"] == f"--pin precision={route['route']}"
        assert change["alters"] == "numerics"
        assert route["gain"] >= SAME_SPEED
        # Gain and price stand in one sentence.
        assert f"{route['gain']:.0%} less time per step" in change["sentence"]
        assert change["sentence"].endswith(f"price: {route['loss']}")
        step_s = change["candidate"]["time"]["step_s"]
        assert step_s == pytest.approx((1 - route["gain"]) * document["best"]["time"]["step_s"], rel=1e-3)
    # A route that is pinned is planned, and its whole step is the one that was offered.
    name = changes[0]["candidate"]["choice"]["precision"]
    pinned = plan("8xH100-80GB", pins={"precision": name})
    assert pinned["best"]["choice"]["precision"] == name
    assert not any(change["lever"] == "precision route" for change in pinned["changes"])
    assert pinned["best"]["time"]["step_s"] <= changes[0]["candidate"]["time"]["step_s"]
    Plan.model_validate(document)


@pytest.mark.parametrize(
    ("machine", "offered"),
    [
        ("1xT4", 0),
        ("8xA100-80GB", 0),
        ("8xH100-80GB", 6),
        ("8xB200", 9),
        # Without Hopper's own block scaling, and its best plan recomputes, which delayed scaling does not survive.
        ("2xRTX5090", 4),
    ],
)
def test_every_machine_says_which_and_why_not(machine: str, offered: int) -> None:
    routes = plan(machine)["routes"]
    assert len(routes) == 14
    assert sum(route["offered"] for route in routes) == offered
    assert all(bool(route["why_not"]) != route["offered"] for route in routes)
    text = routes_text(routes, whole=True)
    assert all(route["route"] in text for route in routes)
    assert all(len(line) <= 114 for line in text.splitlines())
    # Without being asked to explain, a plan says only which.
    brief = routes_text(routes, whole=False)
    assert all((route["route"] in brief) == route["offered"] for route in routes)
    assert ("none is offered here" in text) == (offered == 0)
    assert "not nvfp4-global, nvfp4-cta, mxfp4-sr, mxfp4-sr-h32: nobody ships kernels" in text


def test_without_packages_the_flag_that_plans_with_them_is_named() -> None:
    document = plan("8xB200", stack=newest_known())
    reasons = {route["route"]: route["why_not"] for route in document["routes"]}
    assert not any(change["lever"] == "precision route" for change in document["changes"])
    assert "--stack transformer-engine=2.20.2" in reasons["nvfp4-te"]
    assert "--stack torchao=0.18.0" in reasons["mxfp8-ao"]


def test_an_adapter_gets_none() -> None:
    document = plan("8xH100-80GB", method="lora")
    reasons = {route["why_not"] for route in document["routes"] if route["route"].startswith("fp8-ao")}
    assert reasons == {"precision routes are written for full training, not for lora: pin precision=bf16"}
